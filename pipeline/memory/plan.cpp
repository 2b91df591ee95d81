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
  for (const auto& [plan, reason] : choice.rejected) text += "; " + std::string(name_of(plan)) + ": " + reason;
  return text;
}

namespace {

// Everything but blocks, denoise() and decode().
std::int64_t bytes_beside_blocks(const MemoryNeeds& n, const MemoryPlan& plan) {
  const std::int64_t kept = n.fixed + (plan.keep_encoders ? n.text.bytes + n.modulation.bytes : 0);
  return kept + std::max(n.encode + (plan.keep_encoders ? 0 : n.encode_ahead()), n.others_encode);
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
  return (plan.keep_encoders ? 0 : n.text.bytes + n.modulation.bytes) +
         (plan.keep_other_blocks ? 0 : n.other_blocks + plan.keep_blocks);
}

std::int64_t copied_per_step(const MemoryNeeds& n, const MemoryPlan& plan) {
  return n.passes * (n.blocks.bytes - plan.keep_blocks);
}

std::string_view name_of(PlanKind kind) {
  constexpr std::string_view kNames[] = {"resident", "model", "expert", "block"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::vector<Candidate> candidates(const MemoryNeeds& n) {
  std::vector<Candidate> all{{{PlanKind::kResident, true, n.blocks.bytes}, "none"},
                             {{PlanKind::kModel, false, n.blocks.bytes}, "model"}};
  if (n.other_blocks > 0)
    all.push_back({{PlanKind::kExpert, false, n.blocks.bytes, false, /*leave_to_decode=*/true}, "model"});
  all.push_back({{PlanKind::kBlock, false, 0, n.other_blocks == 0, /*leave_to_decode=*/true}, "block"});
  return all;
}

PlanChoice choose_plan(const MemoryNeeds& n, std::int64_t available, const std::string& offload, std::int64_t hidden) {
  constexpr std::string_view kMeanings[] = {
      "all weights stay on the device", "text encoders and modulation come and go",
      "the blocks of one transformer stay on the device", "no block stays on the device"};
  PlanChoice choice;
  for (auto& [plan, allowed_by] : candidates(n)) {
    if (plan.kind == PlanKind::kBlock) {
      plan.keep_blocks = std::clamp<std::int64_t>(available - bytes_beside_blocks(n, plan) - n.denoise - n.blocks.ahead,
                                                  0, std::max<std::int64_t>(0, n.blocks.bytes - 1));
      if (offload == "block")
        plan.keep_blocks = std::min(plan.keep_blocks, std::max<std::int64_t>(0, n.blocks.bytes - hidden));
    }
    plan.bytes = plan_bytes(n, plan);
    if (offload != "auto" && offload != allowed_by)
      choice.rejected.push_back({plan.kind, "not allowed by memory.offload " + offload});
    else if (plan.bytes > available)
      choice.rejected.push_back({plan.kind, std::string(kMeanings[static_cast<std::size_t>(plan.kind)]) +
                                                ", which needs " + bytes_text(plan.bytes)});
    else {
      choice.plan = plan;
      break;
    }
  }
  return choice;
}

}  // namespace ditfleet::pipeline
