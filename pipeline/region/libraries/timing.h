// Choosing among implementations by timing them on a GPU, on the operands of the call that asks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace ditfleet::region {

// Whether `bytes` can be had for a trial without going below the gigabyte of the current GPU's memory that trials leave
// free.
bool room_for_trial(std::uint64_t bytes);

// The index of the fastest of `candidates`; start(i) puts the i-th once on `stream`. The first is the library's own
// suggestion and stays unless another takes less than 98 % of its time: a smaller gain is noise. Each is started once
// untimed, which loads it. Short runs: long ones under full load, where the GPU's power limit takes a fifth of its
// clock, chose no better products on an H200. Nothing where the GPU cannot time. Waits for the stream. Throws what
// `start` throws.
std::optional<std::size_t> fastest(std::size_t candidates, void* stream, const std::function<void(std::size_t)>& start);

}  // namespace ditfleet::region
