// Random numbers that are the same on every machine for a seed; those of the standard library are not. Not for secrets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "coordinator/scheduling/placement/rendezvous_hash.h"

namespace ditfleet::simulation {

class Random {  // SplitMix64
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() { return scheduling::mix_bits(state_ += 0x9e3779b97f4a7c15ULL); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }  // [0, 1)
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(next() % n); }

 private:
  std::uint64_t state_;
};

}  // namespace ditfleet::simulation
