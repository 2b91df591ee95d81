#include "worker/ranks/degrees.h"

#include <algorithm>

namespace ditfleet::worker {

Degrees::Class Degrees::class_of(const pipeline::GenerationRequest& request) {
  const job::FieldValues& f = request.fields;
  std::int64_t scales = 0;
  for (const job::Field field : job::kFields)
    if (field.row().type == job::FieldType::kReal && f.has(field)) scales = 2 * scales + (*f.real(field) > 1);
  return {f.integer("width").value_or(1024) * f.integer("height").value_or(1024) * f.integer("frames").value_or(1),
          f.integer("max_sequence_length").value_or(0), scales};
}

bool Degrees::alone(const Class& c) const {
  const std::lock_guard lock(mutex_);
  const auto known = seconds_.find(c);
  if (known != seconds_.end()) return is_alone(known->second);
  return std::any_of(seconds_.begin(), seconds_.end(),
                     [&](const auto& other) { return other.first[0] >= c[0] && is_alone(other.second); });
}

void Degrees::observe(const Class& c, bool alone, double step_s) {
  const std::lock_guard lock(mutex_);
  double& best = seconds_.try_emplace(c, std::array<double, 2>{kNever, kNever}).first->second[alone];
  best = std::min(best, step_s);
}

}  // namespace ditfleet::worker
