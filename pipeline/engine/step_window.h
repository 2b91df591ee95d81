// What a denoiser computes for several steps at once, such as their modulation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

namespace ditfleet::pipeline {

// Bounds the memory for steps that are computed together.
inline constexpr std::int64_t kStepsTogether = 64;

// Computes the first window when it is made, and each later one when a step needs it. Used by one thread at a time.
template <typename Made>
class StepWindow {
 public:
  // `make` computes `count` steps from `first` on. Precondition: steps ≥ 1.
  StepWindow(std::int64_t steps, std::function<Made(std::int64_t first, std::int64_t count)> make)
      : steps_(steps), make_(std::move(make)), made_(make_(0, std::min(steps, kStepsTogether))) {}

  // The window of a step, until the next call, and the step's place in it.
  std::pair<const Made&, std::int64_t> at(std::int64_t step) {
    if (const std::int64_t first = step / kStepsTogether * kStepsTogether; first != first_) {
      made_ = make_(first, std::min(steps_ - first, kStepsTogether));
      first_ = first;
    }
    return {made_, step - first_};
  }

 private:
  std::int64_t steps_;
  std::function<Made(std::int64_t first, std::int64_t count)> make_;
  Made made_;
  std::int64_t first_ = 0;
};

}  // namespace ditfleet::pipeline
