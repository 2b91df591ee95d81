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

namespace {

// Everything but blocks, denoise() and decode().
std::int64_t bytes_beside_blocks(const MemoryNeeds& n, const MemoryPlan& plan) {
  const std::int64_t kept = n.fixed + (plan.keep_text ? n.text.bytes : 0) +
                            (plan.keep_modulation ? n.modulation.bytes : 0),
                     ahead = std::max(plan.keep_text ? 0 : n.text.ahead, plan.keep_modulation ? 0 : n.modulation.ahead);
  return kept + std::max(n.encode + ahead, n.others_encode);
}

}  // namespace

std::int64_t plan_bytes(const MemoryNeeds& n, const MemoryPlan& plan) {
  const std::int64_t blocks = plan.keep_blocks + (plan.keep_other_blocks ? n.other_blocks : 0),
                     blocks_ahead = plan.keep_blocks < n.blocks.bytes ? n.blocks.ahead : 0;
  return bytes_beside_blocks(n, plan) +
         std::max(blocks + n.denoise + blocks_ahead, (plan.leave_to_decode ? 0 : blocks) + n.decode);
}

std::int64_t blocks_beside_decode(const MemoryNeeds& n, const MemoryPlan& plan, std::int64_t available) {
  if (!plan.leave_to_decode) return plan.keep_blocks;
  return std::clamp<std::int64_t>(available - bytes_beside_blocks(n, plan) - n.decode, 0, plan.keep_blocks);
}

std::int64_t copied_per_request(const MemoryNeeds& n, const MemoryPlan& plan) {
  return (plan.keep_text ? 0 : n.text.bytes) + (plan.keep_modulation ? 0 : n.modulation.bytes) +
         (plan.keep_other_blocks ? 0 : n.other_blocks + plan.keep_blocks);
}

std::int64_t copied_per_step(const MemoryNeeds& n, const MemoryPlan& plan) {
  return n.passes * (n.blocks.bytes - plan.keep_blocks);
}

PlanChoice choose_plan(const MemoryNeeds& n, std::int64_t available, const std::string& offload, std::int64_t hidden) {
  PlanChoice choice;
  const auto try_plan = [&](const char* what, bool allowed, MemoryPlan plan) {
    if (choice.plan) return;
    plan.bytes = plan_bytes(n, plan);
    if (!allowed)
      choice.rejected.push_back({plan.name, "not allowed by memory.offload " + offload});
    else if (plan.bytes > available)
      choice.rejected.push_back({plan.name, std::string(what) + ", which needs " + bytes_text(plan.bytes)});
    else
      choice.plan = std::move(plan);
  };
  const bool automatic = offload == "auto";
  try_plan("all weights stay on the device", automatic || offload == "none", {"resident", true, true, n.blocks.bytes});
  try_plan("text encoders and modulation come and go", automatic || offload == "model",
           {"model", false, false, n.blocks.bytes});
  const bool leave = n.blocks_leave_to_decode;
  if (n.other_blocks > 0)
    try_plan("the blocks of one transformer stay on the device", automatic || offload == "model",
             {"expert", false, false, n.blocks.bytes, false, leave});
  MemoryPlan block{"block", false, false, 0, n.other_blocks == 0, leave};
  const std::int64_t room = available - plan_bytes(n, block);
  if (room >= 0)
    block.keep_blocks = std::min(n.blocks.bytes - 1,
                                 leave ? available - bytes_beside_blocks(n, block) - n.denoise - n.blocks.ahead : room);
  block.keep_blocks = std::max<std::int64_t>(0, block.keep_blocks);
  if (offload == "block")
    block.keep_blocks = std::min(block.keep_blocks, std::max<std::int64_t>(0, n.blocks.bytes - hidden));
  try_plan("no block stays on the device", automatic || offload == "block", std::move(block));
  return choice;
}

}  // namespace ditfleet::pipeline
