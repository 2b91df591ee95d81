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

PlanChoice choose_plan(const MemoryNeeds& n, std::int64_t available, const std::string& offload, std::int64_t hidden) {
  const auto peak = [&](bool keep_text, bool keep_modulation, std::int64_t kept_blocks, std::int64_t ahead) {
    const std::int64_t kept =
        n.fixed + (keep_text ? n.text.bytes : 0) + (keep_modulation ? n.modulation.bytes : 0) + kept_blocks;
    const std::int64_t encode =
        n.encode + std::max(keep_text ? 0 : n.text.ahead, keep_modulation ? 0 : n.modulation.ahead);
    return kept + encode + std::max(n.denoise + ahead, n.decode);
  };
  PlanChoice choice;
  const auto try_plan = [&](const char* name, const char* what, bool allowed, bool keep, std::int64_t kept_blocks,
                            std::int64_t ahead) {
    if (choice.plan) return;
    MemoryPlan plan{name, keep, keep, kept_blocks, peak(keep, keep, kept_blocks, ahead)};
    if (!allowed)
      choice.rejected.push_back(std::string(name) + ": not allowed by memory.offload " + offload);
    else if (plan.bytes > available)
      choice.rejected.push_back(std::string(name) + ": " + what + ", which needs " + bytes_text(plan.bytes));
    else
      choice.plan = std::move(plan);
  };
  const bool automatic = offload == "auto";
  try_plan("resident", "all weights stay on the device", automatic || offload == "none", true, n.blocks.bytes, 0);
  try_plan("model", "text encoders and modulation come and go", automatic || offload == "model", false, n.blocks.bytes,
           0);
  const std::int64_t room = available - peak(false, false, 0, n.blocks.ahead);
  std::int64_t kept = std::clamp<std::int64_t>(room, 0, n.blocks.bytes);
  if (offload == "block") kept = std::min(kept, std::max<std::int64_t>(0, n.blocks.bytes - hidden));
  try_plan("block", "no block stays on the device", automatic || offload == "block", false, kept, n.blocks.ahead);
  return choice;
}

}  // namespace ditfleet::pipeline
