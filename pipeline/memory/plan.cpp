#include "pipeline/memory/plan.h"

#include <algorithm>
#include <cstdio>

namespace ditfleet::pipeline {

std::string bytes_text(std::int64_t bytes) {
  char text[32];
  const bool small = bytes < 1 << 30;
  std::snprintf(text, sizeof text, small ? "%.1f MiB" : "%.2f GiB",
                static_cast<double>(bytes) / (small ? 1 << 20 : 1 << 30));
  return text;
}

std::string budget_text(const MemoryNeeds& needs, const PlanChoice& choice, std::int64_t available,
                        const std::string& problem) {
  std::string text = problem.empty()
                         ? "a request of this size does not fit into " + bytes_text(available) + " of device memory"
                         : "the device is out of memory (" + problem + "); " + bytes_text(available) + " are available";
  text += ": weights " + bytes_text(needs.weight_bytes()) + ", encoding " + bytes_text(needs.encode) + ", denoising " +
          bytes_text(needs.denoise) + ", decoding " + bytes_text(needs.decode);
  for (const auto& [plan, reason] : choice.rejected) text += "; " + plan + ": " + reason;
  return text;
}

std::int64_t plan_bytes(const MemoryNeeds& n, const MemoryPlan& plan) {
  const std::int64_t kept = n.fixed + (plan.keep_text ? n.text.bytes : 0) +
                            (plan.keep_modulation ? n.modulation.bytes : 0) + plan.keep_blocks,
                     ahead = std::max(plan.keep_text ? 0 : n.text.ahead, plan.keep_modulation ? 0 : n.modulation.ahead),
                     blocks_ahead = plan.keep_blocks < n.blocks.bytes ? n.blocks.ahead : 0;
  return kept + std::max(n.encode + ahead, n.others_encode) + std::max(n.denoise + blocks_ahead, n.decode);
}

std::int64_t copied_per_request(const MemoryNeeds& n, const MemoryPlan& plan) {
  return (plan.keep_text ? 0 : n.text.bytes) + (plan.keep_modulation ? 0 : n.modulation.bytes);
}

std::int64_t copied_per_step(const MemoryNeeds& n, const MemoryPlan& plan) {
  return n.passes * (n.blocks.bytes - plan.keep_blocks);
}

PlanChoice choose_plan(const MemoryNeeds& n, std::int64_t available, const std::string& offload, std::int64_t hidden) {
  PlanChoice choice;
  const auto try_plan = [&](const char* name, const char* what, bool allowed, bool keep, std::int64_t kept_blocks) {
    if (choice.plan) return;
    MemoryPlan plan{name, keep, keep, kept_blocks};
    plan.bytes = plan_bytes(n, plan);
    if (!allowed)
      choice.rejected.push_back({name, "not allowed by memory.offload " + offload});
    else if (plan.bytes > available)
      choice.rejected.push_back({name, std::string(what) + ", which needs " + bytes_text(plan.bytes)});
    else
      choice.plan = std::move(plan);
  };
  const bool automatic = offload == "auto";
  try_plan("resident", "all weights stay on the device", automatic || offload == "none", true, n.blocks.bytes);
  try_plan("model", "text encoders and modulation come and go", automatic || offload == "model", false, n.blocks.bytes);
  const std::int64_t room = available - plan_bytes(n, {"", false, false, 0});
  std::int64_t kept = std::clamp<std::int64_t>(room, 0, std::max<std::int64_t>(0, n.blocks.bytes - 1));
  if (offload == "block") kept = std::min(kept, std::max<std::int64_t>(0, n.blocks.bytes - hidden));
  try_plan("block", "no block stays on the device", automatic || offload == "block", false, kept);
  return choice;
}

}  // namespace ditfleet::pipeline
