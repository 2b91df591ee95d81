#include "pipeline/memory/plan_state.h"

#include <algorithm>
#include <cmath>

namespace ditfleet::pipeline {
namespace {

constexpr double kGoodEnough = 0.9;             // a plan that keeps this share of the best plan's blocks stays
constexpr std::chrono::seconds kCapped{60};     // how long a plan that ran out of memory is avoided
constexpr std::chrono::minutes kUsesDecay{10};  // uses count 1/e after this time

bool as_good(const MemoryPlan& plan, const MemoryPlan& best) {
  return plan.keep_encoders >= best.keep_encoders &&
         static_cast<double>(plan.keep_blocks) >= kGoodEnough * static_cast<double>(best.keep_blocks);
}

}  // namespace

PlanState::Known PlanState::of(const RequestSize& size) const {
  const auto known = sizes_.find(size);
  return known == sizes_.end() ? Known() : known->second;
}

void PlanState::begin(const RequestSize& size, const MemoryNeeds& own, Time now) {
  uses_ = use_rate(now) + 1;
  used_ = now;
  needs_ = needs_beside({}, size, own);
}

MemoryPlan PlanState::ran_out(const RequestSize& size, Time now) {
  MemoryPlan plan = candidates(needs_).front().plan;
  plan.bytes = plan_bytes(needs_, plan);
  plan = take_plan().value_or(plan);
  sizes_[size].cap = plan.bytes - plan.bytes / 16 - 1;
  sizes_[size].avoided_until = now + kCapped;
  return plan;
}

std::int64_t PlanState::observe(const RequestSize& size, const MemoryNeeds& own, std::int64_t left,
                                std::int64_t observed) {
  const std::int64_t ahead = plan_ && plan_->keep_blocks < own.blocks.bytes ? own.blocks.ahead : 0,
                     predicted = std::max(own.denoise + ahead, own.decode - left),
                     excess = std::max<std::int64_t>(0, observed - own.encode - predicted);
  std::int64_t& known = sizes_[size].excess;  // adapters make a difference, so it falls slowly
  known = excess >= known ? excess : (known + excess) / 2;
  return predicted;
}

double PlanState::use_rate(Time now) const {
  return uses_ * std::exp(-std::chrono::duration<double>(now - used_) / kUsesDecay);
}

MemoryNeeds PlanState::needs_beside(const Models& models, const RequestSize& size, MemoryNeeds own) const {
  own.denoise += of(size).excess;
  own.decode += of(size).excess;
  for (const Model& other : models) {
    if (other.state == this) continue;
    const MemoryNeeds& theirs = other.state->needs_;
    own.fixed += theirs.fixed;
    own.others_encode = std::max(own.others_encode, theirs.encode + theirs.encode_ahead());
  }
  return own;
}

std::int64_t PlanState::capped(const RequestSize& size, std::int64_t available, Time now) const {
  return now < of(size).avoided_until ? std::min(available, of(size).cap) : available;
}

PlanChoice PlanState::choose(const RequestSize& size, const MemoryNeeds& needs, std::int64_t available,
                             Time now) const {
  // Until a step is timed, nothing but the blocks in use stays with `block`.
  const std::int64_t hidden = of(size).hidden.value_or(needs.blocks.bytes);
  return choose_plan(needs, capped(size, available, now), offload_, hidden);
}

PlanState::Decision PlanState::decide(const RequestSize& size, const MemoryNeeds& needs, const Models& models,
                                      std::int64_t available, Time now) const {
  const PlanChoice best = choose(size, needs, available, now);
  if (!best.plan) return {best};
  // Bringing weights back costs in proportion to their bytes, which is also what they free: uses decide.
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (models[i].state == this || models[i].kept == 0) continue;
    others.push_back(i);
    available -= models[i].kept;
  }
  std::sort(others.begin(), others.end(), [&](std::size_t a, std::size_t b) {
    return models[a].state->use_rate(now) < models[b].state->use_rate(now);
  });
  Decision made{choose(size, needs, available, now)};
  for (const std::size_t i : others) {
    if (made.choice.plan && as_good(*made.choice.plan, *best.plan)) break;
    available += models[i].kept;
    made.leaving.push_back(i);
    made.choice = choose(size, needs, available, now);
  }
  made.applied = made.leaving.empty() && plan_ && as_good(*plan_, *made.choice.plan) &&
                 plan_bytes(needs, *plan_) <= capped(size, available, now);
  if (made.applied) {
    made.choice.plan = plan_;
    made.choice.plan->bytes = plan_bytes(needs, *plan_);
  }
  return made;
}

std::vector<MemoryReport::Limit> PlanState::limits(const Models& models, std::int64_t available) const {
  const std::int64_t least = small_.first.pixels();
  MemoryNeeds needs = needs_beside(models, {}, large_.second);  // denoise and decode are set below
  const auto fits = [&](const MemoryPlan& plan, std::int64_t pixels) {
    const double share = static_cast<double>(pixels - least) / static_cast<double>(large_.first.pixels() - least);
    const auto between = [&](std::int64_t from, std::int64_t to) {
      return static_cast<std::int64_t>(
          std::max(0.0, static_cast<double>(from) + share * static_cast<double>(to - from)));
    };
    needs.denoise = between(small_.second.denoise, large_.second.denoise);
    needs.decode = between(small_.second.decode, large_.second.decode);
    return plan_bytes(needs, plan) <= available;
  };
  std::vector<MemoryReport::Limit> limits;
  for (const auto& [plan, allowed_by] : candidates(large_.second)) {
    if (offload_ != "auto" && offload_ != allowed_by) continue;
    std::int64_t most = 0, too_many = std::int64_t{1} << 40;
    while (too_many - most > 1) {
      const std::int64_t pixels = most + (too_many - most) / 2;
      (fits(plan, pixels) ? most : too_many) = pixels;
    }
    if (!limits.empty() && limits.back().max_pixels == 0) limits.pop_back();
    limits.push_back({std::string(name_of(plan.kind)), most});  // 0 only if no plan holds anything
  }
  return limits;
}

}  // namespace ditfleet::pipeline
