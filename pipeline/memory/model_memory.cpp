#include "pipeline/memory/model_memory.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <new>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"

namespace ditfleet::pipeline {
namespace {

using Clock = std::chrono::steady_clock;

std::int64_t kept_of(const std::vector<PartSequence*>& sequences) {
  std::int64_t bytes = 0;
  for (const PartSequence* one : sequences) bytes += one->kept_bytes();
  return bytes;
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

PlanState::Models DeviceMemory::models() const {
  PlanState::Models all;
  for (const ModelMemory* model : models_) all.push_back({&model->state_, model->kept()});
  return all;
}

PlanReport DeviceMemory::plan(const MemoryNeeds& own) const {
  const std::lock_guard lock(mutex_);
  PlanReport report{.needs = PlanState(options_.offload).needs_beside(models(), {}, own)};
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

bool DeviceMemory::fits_beside(const MemoryNeeds& own) {
  const std::lock_guard lock(mutex_);
  std::int64_t left = available();
  for (const ModelMemory* other : models_) left -= other->kept();
  const MemoryNeeds needs = PlanState(options_.offload).needs_beside(models(), {}, own);
  const PlanChoice choice = choose_plan(needs, left, options_.offload, 0);
  if (options_.offload == "none" || (choice.plan && choice.plan->kind == PlanKind::kResident)) return true;
  // Their first way to the host takes long, so it is not left to a request.
  for (ModelMemory* other : models_) other->leave();
  return false;
}

ModelMemory::ModelMemory(std::shared_ptr<DeviceMemory> device, std::string name, Source source)
    : device_(std::move(device)), name_(std::move(name)), source_(std::move(source)) {
  if (!device_->limited()) return;
  state_ = PlanState(device_->options_.offload, {source_.small, source_.needs(source_.small)},
                     {source_.large, source_.needs(source_.large)});
  const std::lock_guard lock(device_->mutex_);
  update_report();
  device_->models_.push_back(this);
}

ModelMemory::~ModelMemory() {
  const std::lock_guard lock(device_->mutex_);
  std::erase(device_->models_, this);
}

std::int64_t ModelMemory::kept() const { return kept_of(source_.parts.encoders) + kept_of(source_.parts.blocks); }

// First what leaves, then what comes.
void ModelMemory::keep_blocks(std::int64_t of_used, bool others, bool wait) {
  for (PartSequence* sequence : source_.parts.blocks)
    if (sequence != &blocks() && !others) sequence->keep(0);
  blocks().keep(of_used, wait);
  for (PartSequence* sequence : source_.parts.blocks)
    if (sequence != &blocks() && others) sequence->keep(sequence->bytes(), wait);
}

void ModelMemory::leave() {
  for (PartSequence* one : source_.parts.encoders) one->keep(0);
  keep_blocks(0, false);
  if (state_.take_plan()) spdlog::info("memory: {}: all weights leave the device for another model's", name_);
  update_report();
}

// First what leaves, then what comes: the blocks before what only the next request's encoding needs.
void ModelMemory::apply(const MemoryPlan& plan) {
  state_.take_plan();
  const Parts& parts = source_.parts;
  const std::int64_t others = plan.keep_other_blocks ? state_.needs().other_blocks : 0;
  const bool fewer = plan.keep_blocks + others < kept_of(parts.blocks);
  if (fewer) keep_blocks(plan.keep_blocks, plan.keep_other_blocks);
  if (!plan.keep_encoders)
    for (PartSequence* one : parts.encoders) one->keep(0);
  if (plan.keep_blocks < blocks().bytes() || !plan.keep_other_blocks) release_cached_memory(device_->device_);
  if (!fewer) keep_blocks(plan.keep_blocks, plan.keep_other_blocks);
  if (plan.keep_encoders)
    for (PartSequence* one : parts.encoders) one->keep(one->bytes(), /*wait=*/false);
  state_.set_plan(plan);
}

void ModelMemory::start_steps(const RequestSize& size) {
  {
    const std::lock_guard lock(device_->mutex_);
    if (std::exchange(used_blocks_, 0) != 0 && state_.plan() && !state_.plan()->keep_other_blocks) state_.take_plan();
    times_step_ = device_->options_.offload == "block" && !state_.is_timed(size);
  }
  place(size);
}

void ModelMemory::use_blocks(std::size_t transformer) {
  const std::lock_guard lock(device_->mutex_);
  if (std::exchange(used_blocks_, transformer) == transformer || !state_.plan() || state_.plan()->keep_other_blocks)
    return;
  const MemoryPlan plan = *state_.take_plan();  // an error leaves the weights somewhere
  keep_blocks(plan.keep_blocks, false, /*wait=*/false);
  state_.set_plan(plan);
}

// The first step sets things up, so the second one is measured. From the third one on the plan is the right one.
void ModelMemory::after_step(const RequestSize& size, std::int64_t steps) {
  if (times_step_ && steps == 1) blocks().measure();
  if (!times_step_ || steps != 2) return;
  const double hidden = blocks().measured_s() * copy_bandwidth(device_->device_);
  {
    const std::lock_guard lock(device_->mutex_);
    state_.set_hidden(size, static_cast<std::int64_t>(hidden));
  }
  place(size);
}

void ModelMemory::make_room_to_decode(const RequestSize& size) {
  if (!device_->limited()) return;
  const MemoryNeeds own = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  std::optional<MemoryPlan> plan = state_.plan();
  if (!plan || !plan->leave_to_decode) return;
  const MemoryNeeds needs = state_.needs_beside(device_->models(), size, own);
  const std::int64_t bytes =
      blocks_beside_decode(needs, *plan, state_.capped(size, device_->available(), Clock::now()));
  if (bytes >= kept_of(source_.parts.blocks)) return;
  keep_blocks(bytes, false);
  release_cached_memory(device_->device_);
  plan->keep_blocks = bytes;  // so that the next request applies its plan
  state_.set_plan(*plan);
}

void ModelMemory::check(const RequestSize& size) const {
  if (!device_->plans()) return;
  const MemoryNeeds own = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  const MemoryNeeds needs = state_.needs_beside(device_->models(), size, own);
  const std::int64_t available = device_->available();
  const PlanChoice choice = state_.choose(size, needs, available, Clock::now());
  if (!choice.plan) fail(Code::kOutOfMemory, budget_text(needs, choice, available));
}

void ModelMemory::place(const RequestSize& size) {
  if (!device_->limited()) return;
  const MemoryNeeds own = device_->plans() ? source_.needs(size) : MemoryNeeds();
  const std::lock_guard lock(device_->mutex_);
  if (device_->plans()) choose(size, own);
  device_->peak_of_ = {this, size};
  reset_memory_peak(device_->device_);
}

void ModelMemory::choose(const RequestSize& size, const MemoryNeeds& own) {
  state_.begin(size, own, Clock::now());
  const MemoryNeeds needs = state_.needs_beside(device_->models(), size, own);
  for (;;) {
    const std::int64_t available = device_->available();
    const auto [choice, applied, leaving] = state_.decide(size, needs, device_->models(), available, Clock::now());
    if (!choice.plan) fail(Code::kOutOfMemory, budget_text(needs, choice, available));
    const MemoryPlan& plan = *choice.plan;
    if (applied) {
      state_.set_plan(plan);
      break;
    }
    for (const std::size_t i : leaving) device_->models_[i]->leave();
    const std::int64_t had = kept();
    try {
      apply(plan);
    } catch (const c10::OutOfMemoryError&) {  // less is free than the device reports
      release_cached_memory(device_->device_);
      state_.set_plan(plan);
      state_.ran_out(size, Clock::now());
      continue;
    }
    const bool loaded = kept() > had;
    spdlog::info("memory: {}: plan {}: {} predicted of {}, {} of {} of the blocks stay", name_, name_of(plan.kind),
                 bytes_text(plan.bytes), available < kNoMemoryLimit ? bytes_text(available) : "any number",
                 bytes_text(plan.keep_blocks), bytes_text(needs.blocks.bytes));
    const std::lock_guard report_lock(report_mutex_);
    report_.loads += loaded;
    break;
  }
  update_report();
  kept_in_steps_ = kept();
}

std::string ModelMemory::memory_problem() {
  try {
    throw;
  } catch (const Failure&) {
    throw;
  } catch (const std::bad_alloc&) {  // of the host
    throw;
  } catch (...) {
    const Error error = error_in_flight("memory");
    if (error.code != Code::kOutOfMemory) throw;
    return error.message;
  }
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
  if (!device_->plans()) fail_without_plan(size, problem);
  {
    const std::lock_guard lock(device_->mutex_);
    device_->peak_of_ = {};  // the peak is all that there was
    const MemoryPlan plan = state_.ran_out(size, Clock::now());
    spdlog::warn("memory: {}: out of memory with plan {}; the request runs again with the next one ({})", name_,
                 name_of(plan.kind), problem);
    const std::lock_guard report_lock(report_mutex_);
    ++report_.step_downs;
  }
  try {
    place(size);
  } catch (const Failure& failure) {  // no plan is left: the next request of this size begins anew
    const std::lock_guard lock(device_->mutex_);
    state_.forget_ran_out(size);
    fail(failure.error().code, problem + "; no plan is left for this request: " + failure.error().message);
  }
}

void ModelMemory::free_encoders(const RequestSize& size, const std::string& problem, bool again) {
  if (again) fail_without_plan(size, problem);
  release_cached_memory(device_->device_);
  if (!device_->plans()) fail_without_plan(size, problem);
  const std::lock_guard lock(device_->mutex_);
  device_->peak_of_ = {};
  spdlog::warn("memory: {}: out of memory while encoding; text encoders and modulation leave ({})", name_, problem);
  for (PartSequence* one : source_.parts.encoders) one->keep(0);
  if (std::optional<MemoryPlan> plan = state_.plan()) {
    plan->keep_encoders = false;
    state_.set_plan(*plan);
  }
  update_report();
  const std::lock_guard report_lock(report_mutex_);
  ++report_.step_downs;
}

void ModelMemory::trim() {
  for (const auto* sequences : {&source_.parts.encoders, &source_.parts.blocks})
    for (const PartSequence* one : *sequences)
      if (!one->all_stay()) return release_cached_memory(device_->device_);
}

void ModelMemory::observe(const RequestSize& size) {
  if (!device_->limited()) return;
  const MemoryNeeds own = source_.needs(size);
  const std::lock_guard lock(device_->mutex_);
  if (device_->peak_of_ != std::pair<const ModelMemory*, RequestSize>(this, size)) return;
  std::int64_t weights = state_.needs_beside(device_->models(), size, own).fixed;
  for (const ModelMemory* model : device_->models_) {
    weights += model == this ? kept_in_steps_ : model->kept();
    if (model->source_.unallocated) weights -= model->source_.unallocated();
  }
  const std::int64_t observed = memory_use(device_->device_).peak - weights,
                     predicted = state_.observe(size, own, kept_in_steps_ - kept(), observed);
  const std::lock_guard report_lock(report_mutex_);
  report_.predicted_bytes = predicted;
  report_.observed_bytes = observed;
}

void ModelMemory::update_report() {
  const std::int64_t available = device_->available(), bytes = state_.needs().weight_bytes() - state_.needs().fixed;
  std::vector<MemoryReport::Limit> limits = state_.limits(device_->models(), available);
  const double bandwidth = device_->options_.offload == "none" ? 0 : copy_bandwidth(device_->device_);
  const std::optional<MemoryPlan>& plan = state_.plan();
  const std::lock_guard report_lock(report_mutex_);
  report_.limits = std::move(limits);
  report_.available_bytes = available;
  report_.bytes = bytes;
  report_.resident = !plan ? kept() == bytes : kept() > 0 || plan->keep_blocks == 0;
  report_.load_time = std::chrono::microseconds(
      bandwidth > 0 ? static_cast<std::int64_t>(1e6 * static_cast<double>(bytes) / bandwidth) : 0);
  report_.plan = plan ? std::string(name_of(plan->kind)) : "";
}

MemoryReport ModelMemory::report() const {
  const std::lock_guard lock(report_mutex_);
  return report_;
}

}  // namespace ditfleet::pipeline
