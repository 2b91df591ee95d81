// Chooses among implementations by timing them on a GPU, on a call's own operands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

namespace ditfleet::region {

// Whether the current GPU would still have a gigabyte of free memory with `bytes` used for a trial.
bool memory_for_trial(std::uint64_t bytes);

// The index of the fastest of `candidates`; start(i) enqueues the i-th once on `stream`. The first one is the default
// and is chosen unless another takes less than 98 % of its time, since a smaller gain is noise. Each one runs once
// untimed, which loads it. Empty if the GPU cannot measure time. Waits for the stream. Throws what `start` throws.
std::optional<std::size_t> fastest(std::size_t candidates, void* stream, const std::function<void(std::size_t)>& start);

}  // namespace ditfleet::region
