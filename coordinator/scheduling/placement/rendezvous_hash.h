// Hashes for rendezvous hashing: a unit prefers the worker whose hash, mixed with the unit's hash, is highest.
#pragma once

#include <cstdint>
#include <string_view>

namespace ditfleet::scheduling {

// The finalizer of SplitMix64.
constexpr std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// FNV-1a, then mixed.
constexpr std::uint64_t rendezvous_hash(std::string_view name) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return mix_bits(hash);
}

}  // namespace ditfleet::scheduling
