#include "pipeline/engine/generation.h"

#include <algorithm>

namespace ditfleet::pipeline {

void GenerationBase::add_phase(const std::string& name, std::chrono::steady_clock::time_point start) {
  using std::chrono::duration_cast, std::chrono::microseconds;
  const std::int64_t us = duration_cast<microseconds>(std::chrono::steady_clock::now() - start).count();
  const auto known =
      std::find_if(phases_.begin(), phases_.end(), [&](const auto& phase) { return phase.first == name; });
  if (known == phases_.end())
    phases_.emplace_back(name, us);
  else
    known->second += us;
}

}  // namespace ditfleet::pipeline
