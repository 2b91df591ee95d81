// One request on its way through the stages of DiffusionModel.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/engine/adapt.h"

namespace ditfleet::pipeline {

class DiffusionGeneration final : public Generation {
 public:
  std::vector<std::string> warnings() const override { return warnings_; }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return phases_; }
  Result<void> dump(const std::string& path) const override;

  void warn(const std::vector<std::string>& warnings, const std::string& prefix = {}) {
    for (const std::string& one : warnings) warnings_.push_back(prefix + one);
  }
  // The phase took the time since `start`.
  void add_phase(const std::string& name, std::chrono::steady_clock::time_point start) {
    using std::chrono::duration_cast, std::chrono::microseconds;
    phases_.emplace_back(name, duration_cast<microseconds>(std::chrono::steady_clock::now() - start).count());
  }

  Settings settings;
  RequestSize size;
  parallel::Team team;  // the ranks that denoise it
  Adapted adapted;
  Conditions conditions;
  Schedule schedule;
  std::unique_ptr<Denoiser> denoiser;
  at::Tensor latents;  // on the device; undefined before denoise()
  at::Tensor image;    // [1, channels, H, W] in [0, 1]; undefined before decode(), and of a video

 private:
  std::vector<std::string> warnings_;
  std::vector<std::pair<std::string, std::int64_t>> phases_;
};

}  // namespace ditfleet::pipeline
