// The base class of all generations.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/model.h"

namespace ditfleet::pipeline {

class GenerationBase : public Generation {
 public:
  std::vector<std::string> warnings() const override { return warnings_; }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return phases_; }

  bool alone = false;  // denoised by this process although there are other ranks; set by ModelBase

  void add_warning(std::string warning) { warnings_.push_back(std::move(warning)); }
  // The phase took the time since `start`.
  void add_phase(const std::string& name, std::chrono::steady_clock::time_point start) {
    using std::chrono::duration_cast, std::chrono::microseconds;
    phases_.emplace_back(name, duration_cast<microseconds>(std::chrono::steady_clock::now() - start).count());
  }

 private:
  std::vector<std::string> warnings_;
  std::vector<std::pair<std::string, std::int64_t>> phases_;
};

}  // namespace ditfleet::pipeline
