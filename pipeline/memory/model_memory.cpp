#include "pipeline/memory/model_memory.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kGoodEnough = 0.9;             // a plan that keeps this share of the best plan's blocks stays
constexpr std::chrono::seconds kCapped{60};     // how long a plan that ran out of memory is avoided
constexpr std::chrono::minutes kUsesDecay{10};  // uses count 1/e after this time

bool as_good(const MemoryPlan& plan, const MemoryPlan& best) {
  return plan.keep_text >= best.keep_text && plan.keep_modulation >= best.keep_modulation &&
         static_cast<double>(plan.keep_blocks) >= kGoodEnough * static_cast<double>(best.keep_blocks);
}

}  // namespace

DeviceMemory::DeviceMemory(c10::Device device, MemoryOptions options) : device_(device), options_(std::move(options)) {}

bool DeviceMemory::limited() const {
  return !device_.is_cpu() || options_.limit > 0 || options_.reserve > 0 || options_.offload == "model" ||
         options_.offload == "block";
}

std::int64_t DeviceMemory::available() const {
  if (device_.is_cpu() && options_.limit == 0 && options_.reserve == 0) return kNoMemoryLimit;
  return available_memory(device_, options_.limit, options_.reserve);
}

MemoryNeeds DeviceMemory::beside_others(const ModelMemory* model, MemoryNeeds needs) const {
  for (const ModelMemory* other : models_) {
    if (other == model) continue;
    const MemoryNeeds& o = other->needs_;
    needs.fixed += o.fixed;
    needs.others_encode = std::max(needs.others_encode, o.encode + std::max(o.text.ahead, o.modulation.ahead));
  }
  return needs;
}

PlanReport DeviceMemory::plan(const MemoryNeeds& own) const {
  const std::lock_guard lock(mutex_);
  PlanReport report{.needs = beside_others(nullptr, own)};
  report.available = available();
  report.driver = driver_memory(device_);
  report.bandwidth = copy_bandwidth(device_);
  std::int64_t stay = 0;  // of other models
  for (const ModelMemory* other : models_)
    if (options_.offload == "none") stay += other->kept();
  // With `block` nothing is known of a step's time, so nothing but the blocks in use stays.
  const std::int64_t hidden = options_.offload == "block" ? own.blocks.bytes : 0;
  report.choice = choose_plan(report.needs, report.available - stay, options_.offload, hidden);
  return report;
}

bool DeviceMemory::fits_beside(const MemoryNeeds& needs) {
  const std::lock_guard lock(mutex_);
  std::int64_t kept = 0;
  for (const ModelMemory* other : models_) kept += other->kept();
  const PlanChoice choice = choose_plan(beside_others(nullptr, needs), available() - kept, options_.offload, 0);
  if (options_.offload == "none" || (choice.plan && choice.plan->kind == PlanKind::kResident)) return true;
  // Their first way to the host takes long, so it is not left to a request.
  for (ModelMemory* other : models_) other->leave();
  return false;
}

ModelMemory::ModelMemory(std::shared_ptr<DeviceMemory> device, std::string name, Source source)
    : device_(std::move(device)), name_(std::move(name)), source_(std::move(source)), used_(Clock::now()) {
  if (!device_->limited()) return;
  samples_ = {source_.needs(source_.small), source_.needs(source_.large)};
  const std::lock_guard lock(device_->mutex_);
  needs_ = samples_.second;
  update_report();
  device_->models_.push_back(this);
}

ModelMemory::~ModelMemory() {
  const std::lock_guard lock(device_->mutex_);
  std::erase(device_->models_, this);
}

std::int64_t ModelMemory::kept() const {
  std::int64_t bytes = source_.parts.modulation->kept_bytes() + kept_blocks();
  for (const PartSequence* text : source_.parts.text) bytes += text->kept_bytes();
  return bytes;
}

std::int64_t ModelMemory::kept_blocks() const {
  std::int64_t bytes = 0;
  for (const PartSequence* blocks : source_.parts.blocks) bytes += blocks->kept_bytes();
  return bytes;
}

// First what leaves, then what comes.
void ModelMemory::keep_blocks(std::int64_t of_used, bool others, bool wait) {
  for (PartSequence* sequence : source_.parts.blocks)
    if (sequence != &blocks() && !others) sequence->keep(0);
  blocks().keep(of_used, wait);
  for (PartSequence* sequence : source_.parts.blocks)
    if (sequence != &blocks() && others) sequence->keep(sequence->bytes(), wait);
}

double ModelMemory::use_rate(Clock::time_point now) const {
  return uses_ * std::exp(-std::chrono::duration<double>(now - used_) / kUsesDecay);
}

PlanChoice ModelMemory::choose(const RequestSize& size, const MemoryNeeds& needs, std::int64_t available) const {
  // Until the time of a step is known, nothing but the blocks in use stays with `block`.
  const auto step = step_s_.find(size);
  const std::int64_t hidden = step == step_s_.end()
                                  ? needs.blocks.bytes
                                  : static_cast<std::int64_t>(step->second * copy_bandwidth(device_->device_));
  return choose_plan(needs, capped(size, available), device_->options_.offload, hidden);
}

std::int64_t ModelMemory::capped(const RequestSize& size, std::int64_t available) const {
  const auto cap = caps_.find(size);
  return cap != caps_.end() && Clock::now() < cap->second.until ? std::min(available, cap->second.bytes) : available;
}

void ModelMemory::leave() {
  for (PartSequence* text : source_.parts.text) text->keep(0);
  source_.parts.modulation->keep(0);
  keep_blocks(0, false);
  if (plan_) spdlog::info("memory: {}: all weights leave the device for another model's", name_);
  plan_.reset();
  update_report();
}

// First what leaves, then what comes: the blocks before what only the next request's encoding needs.
void ModelMemory::apply(const MemoryPlan& plan) {
  plan_.reset();
  const Parts& parts = source_.parts;
  const bool fewer = plan.keep_blocks + (plan.keep_other_blocks ? needs_.other_blocks : 0) < kept_blocks();
  if (fewer) keep_blocks(plan.keep_blocks, plan.keep_other_blocks);
  std::vector<PartSequence*> coming;
  const auto leave_or_come = [&](PartSequence* sequence, bool stays) {
    if (stays)
      coming.push_back(sequence);
    else
      sequence->keep(0);
  };
  for (PartSequence* text : parts.text) leave_or_come(text, plan.keep_text);
  leave_or_come(parts.modulation, plan.keep_modulation);
  if (plan.keep_blocks < blocks().bytes() || !plan.keep_other_blocks) release_cached_memory(device_->device_);
  if (!fewer) keep_blocks(plan.keep_blocks, plan.keep_other_blocks);
  for (PartSequence* sequence : coming) sequence->keep(sequence->bytes(), /*wait=*/false);
  plan_ = plan;
}

void ModelMemory::add_excess(const RequestSize& size, MemoryNeeds& needs) const {
  const auto excess = excess_.find(size);
  if (excess == excess_.end()) return;
  needs.denoise += excess->second;
  needs.decode += excess->second;
}

void ModelMemory::start_steps(const RequestSize& size) {
  {
    const std::lock_guard lock(device_->mutex_);
    if (std::exchange(used_blocks_, 0) != 0 && plan_ && !plan_->keep_other_blocks) plan_.reset();
  }
  place(size);
}

void ModelMemory::use_blocks(std::size_t transformer) {
  const std::lock_guard lock(device_->mutex_);
  if (std::exchange(used_blocks_, transformer) == transformer || !plan_ || plan_->keep_other_blocks) return;
  const MemoryPlan plan = *std::exchange(plan_, std::nullopt);  // an error leaves the weights somewhere
  keep_blocks(plan.keep_blocks, false, /*wait=*/false);
  plan_ = plan;
}

void ModelMemory::make_room_to_decode(const RequestSize& size) {
  if (!device_->limited()) return;
  MemoryNeeds needs = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  if (!plan_ || !plan_->leave_to_decode) return;
  add_excess(size, needs);
  needs = device_->beside_others(this, needs);
  const std::int64_t bytes = blocks_beside_decode(needs, *plan_, capped(size, device_->available()));
  if (bytes >= kept_blocks()) return;
  keep_blocks(bytes, false);
  release_cached_memory(device_->device_);
  plan_->keep_blocks = bytes;  // so that the next request applies its plan
}

void ModelMemory::check(const RequestSize& size) const {
  if (!device_->limited() || device_->options_.offload == "none") return;
  MemoryNeeds needs = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  add_excess(size, needs);
  needs = device_->beside_others(this, needs);
  const std::int64_t available = device_->available();
  const PlanChoice choice = choose(size, needs, available);
  if (!choice.plan) fail(Code::kOutOfMemory, budget_text(needs, choice, available));
}

void ModelMemory::place(const RequestSize& size) {
  if (!device_->limited()) return;
  if (device_->options_.offload == "none") {
    const std::lock_guard lock(device_->mutex_);
    return start_peak(size);
  }
  MemoryNeeds own = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  const auto now = Clock::now();
  uses_ = use_rate(now) + 1;
  used_ = now;
  add_excess(size, own);
  needs_ = own;
  std::vector<ModelMemory*> others;
  std::copy_if(device_->models_.begin(), device_->models_.end(), std::back_inserter(others),
               [&](const ModelMemory* model) { return model != this && model->kept() > 0; });
  // Bringing weights back costs in proportion to their bytes, which is also what they free: uses decide.
  std::sort(others.begin(), others.end(),
            [&](const ModelMemory* a, const ModelMemory* b) { return a->use_rate(now) < b->use_rate(now); });
  const MemoryNeeds needs = device_->beside_others(this, own);
  for (bool first = true;; first = false) {
    const std::int64_t available = device_->available();
    const PlanChoice best = choose(size, needs, available);
    if (!best.plan) fail(Code::kOutOfMemory, budget_text(needs, best, available));
    std::int64_t left = available;
    for (const ModelMemory* other : others) left -= other->kept();
    PlanChoice chosen = choose(size, needs, left);
    std::size_t leaving = 0;
    for (; leaving < others.size() && (!chosen.plan || !as_good(*chosen.plan, *best.plan)); ++leaving) {
      left += others[leaving]->kept();
      chosen = choose(size, needs, left);
    }
    if (first && leaving == 0 && plan_ && as_good(*plan_, *chosen.plan) &&
        plan_bytes(needs, *plan_) <= capped(size, left)) {
      plan_->bytes = plan_bytes(needs, *plan_);
    } else {
      for (std::size_t i = 0; i < leaving; ++i) others[i]->leave();
      const std::int64_t had = kept();
      try {
        apply(*chosen.plan);
      } catch (const c10::OutOfMemoryError&) {  // less is free than the device reports
        release_cached_memory(device_->device_);
        caps_[size] = {chosen.plan->bytes - chosen.plan->bytes / 16 - 1, Clock::now() + kCapped};
        continue;
      }
      const bool loaded = kept() > had;
      spdlog::info("memory: {}: plan {}: {} predicted of {}, {} of {} of the blocks stay", name_, name_of(plan_->kind),
                   bytes_text(plan_->bytes), available < kNoMemoryLimit ? bytes_text(available) : "any number",
                   bytes_text(plan_->keep_blocks), bytes_text(needs.blocks.bytes));
      const std::lock_guard report_lock(report_mutex_);
      report_.loads += loaded;
    }
    break;
  }
  update_report();
  kept_in_steps_ = kept();
  start_peak(size);
}

void ModelMemory::start_peak(const RequestSize& size) {
  device_->peak_of_ = {this, size};
  reset_memory_peak(device_->device_);
}

std::string ModelMemory::memory_problem() {
  const Error error = error_in_flight("memory");
  return error.code == Code::kOutOfMemory ? error.message : "";
}

void ModelMemory::fail_without_plan(const RequestSize& size, const std::string& problem) const {
  if (!device_->limited()) fail(Code::kOutOfMemory, problem);
  PlanChoice choice;
  if (device_->options_.offload == "none")
    choice.rejected.push_back({PlanKind::kResident, "all weights stay on the device (memory.offload none)"});
  fail(Code::kOutOfMemory, budget_text(source_.needs(size), choice, device_->available(), problem));
}

void ModelMemory::step_down(const RequestSize& size, const std::string& problem) {
  for (PartSequence* blocks : source_.parts.blocks) blocks->finish();
  release_cached_memory(device_->device_);
  if (!device_->limited() || device_->options_.offload == "none") fail_without_plan(size, problem);
  {
    const std::lock_guard lock(device_->mutex_);
    device_->peak_of_ = {};  // the peak is all that there was
    const std::int64_t bytes =
        plan_ ? plan_->bytes : plan_bytes(needs_, {PlanKind::kResident, true, true, needs_.blocks.bytes});
    spdlog::warn("memory: {}: out of memory with plan {}; the request runs again with the next one ({})", name_,
                 name_of(plan_ ? plan_->kind : PlanKind::kResident), problem);
    caps_[size] = {bytes - bytes / 16 - 1, Clock::now() + kCapped};
    plan_.reset();
    const std::lock_guard report_lock(report_mutex_);
    ++report_.step_downs;
  }
  try {
    place(size);
  } catch (const Failure& failure) {  // no plan is left: the next request of this size begins anew
    const std::lock_guard lock(device_->mutex_);
    caps_.erase(size);
    fail(failure.error().code, problem + "; no plan is left for this request: " + failure.error().message);
  }
}

void ModelMemory::free_encoders(const RequestSize& size, const std::string& problem) {
  release_cached_memory(device_->device_);
  if (!device_->limited() || device_->options_.offload == "none") fail_without_plan(size, problem);
  const std::lock_guard lock(device_->mutex_);
  device_->peak_of_ = {};
  spdlog::warn("memory: {}: out of memory while encoding; text encoders and modulation leave ({})", name_, problem);
  for (PartSequence* text : source_.parts.text) text->keep(0);
  source_.parts.modulation->keep(0);
  if (plan_) plan_->keep_text = plan_->keep_modulation = false;
  update_report();
  const std::lock_guard report_lock(report_mutex_);
  ++report_.step_downs;
}

void ModelMemory::trim() {
  const Parts& parts = source_.parts;
  const auto all_stay = [](const std::vector<PartSequence*>& sequences) {
    return std::all_of(sequences.begin(), sequences.end(), [](const PartSequence* one) { return one->all_stay(); });
  };
  const bool stay = parts.modulation->all_stay() && all_stay(parts.blocks) && all_stay(parts.text);
  if (!stay) release_cached_memory(device_->device_);
}

bool ModelMemory::wants_step_time(const RequestSize& size) const {
  const std::lock_guard lock(device_->mutex_);
  return device_->options_.offload == "block" && !step_s_.contains(size);
}

void ModelMemory::set_step_time(const RequestSize& size, double seconds) {
  const std::lock_guard lock(device_->mutex_);
  step_s_[size] = seconds;
}

void ModelMemory::observe(const RequestSize& size) {
  if (!device_->limited()) return;
  const MemoryNeeds needs = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  if (device_->peak_of_ != std::pair<const ModelMemory*, RequestSize>(this, size)) return;
  std::int64_t weights = device_->beside_others(this, needs).fixed;
  for (const ModelMemory* model : device_->models_) {
    weights += model == this ? kept_in_steps_ : model->kept();
    if (model->source_.unallocated) weights -= model->source_.unallocated();
  }
  const std::int64_t ahead = plan_ && plan_->keep_blocks < needs.blocks.bytes ? needs.blocks.ahead : 0,
                     predicted = std::max(needs.denoise + ahead, needs.decode - (kept_in_steps_ - kept())),
                     observed = memory_use(device_->device_).peak - weights,
                     excess = std::max<std::int64_t>(0, observed - needs.encode - predicted);
  std::int64_t& known = excess_[size];  // adapters make a difference, so it falls slowly
  known = excess >= known ? excess : (known + excess) / 2;
  const std::lock_guard report_lock(report_mutex_);
  report_.predicted_bytes = predicted;
  report_.observed_bytes = observed;
}

void ModelMemory::update_report() {
  const std::int64_t available = device_->available();
  const auto& [small, large] = samples_;
  const auto needs_of = [&](std::int64_t pixels) {
    const std::int64_t from_pixels = source_.small.pixels();
    const double share =
        static_cast<double>(pixels - from_pixels) / static_cast<double>(source_.large.pixels() - from_pixels);
    const auto between = [&](std::int64_t from, std::int64_t to) {
      return static_cast<std::int64_t>(
          std::max(0.0, static_cast<double>(from) + share * static_cast<double>(to - from)));
    };
    MemoryNeeds needs = device_->beside_others(this, large);
    needs.denoise = between(small.denoise, large.denoise);
    needs.decode = between(small.decode, large.decode);
    return needs;
  };
  std::vector<MemoryReport::Limit> limits;
  const std::string& offload = device_->options_.offload;
  for (const auto& [plan, allowed_by] : candidates(large)) {
    if (offload != "auto" && offload != allowed_by) continue;
    std::int64_t fits = 0, too_many = std::int64_t{1} << 40;
    while (too_many - fits > 1) {
      const std::int64_t pixels = fits + (too_many - fits) / 2;
      (plan_bytes(needs_of(pixels), plan) <= available ? fits : too_many) = pixels;
    }
    if (!limits.empty() && limits.back().max_pixels == 0) limits.pop_back();
    limits.push_back({std::string(name_of(plan.kind)), fits});  // 0 only if no plan holds anything
  }
  const std::int64_t bytes = large.weight_bytes() - large.fixed;
  const double bandwidth = device_->options_.offload == "none" ? 0 : copy_bandwidth(device_->device_);
  const std::lock_guard report_lock(report_mutex_);
  report_.limits = std::move(limits);
  report_.available_bytes = available;
  report_.bytes = bytes;
  report_.resident = !plan_ ? kept() == bytes : kept() > 0 || plan_->keep_blocks == 0;
  report_.load_time = std::chrono::microseconds(
      bandwidth > 0 ? static_cast<std::int64_t>(1e6 * static_cast<double>(bytes) / bandwidth) : 0);
  report_.plan = plan_ ? std::string(name_of(plan_->kind)) : "";
}

MemoryReport ModelMemory::report() const {
  const std::lock_guard lock(report_mutex_);
  return report_;
}

}  // namespace ditfleet::pipeline
