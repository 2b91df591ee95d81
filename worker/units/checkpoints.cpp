#include "worker/units/checkpoints.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "shared/core/json.h"
#include "shared/results/checkpoint.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kCallTimeout = 2s, kStoreTimeout = 10s;

// The parts of receipt_of_model() that decide whether a checkpoint fits, and whether the rest has the same bits.
json::value part_of(const std::string& receipt, const char* name) {
  const auto parsed = parse_json(receipt);
  const json::value* part = parsed && parsed->is_object() ? parsed->get_object().if_contains(name) : nullptr;
  return part ? *part : json::value(nullptr);
}

}  // namespace

asio::awaitable<Result<std::string>> Checkpoints::find(std::shared_ptr<Unit> unit) {
  // A branch draws another picture without its checkpoint.
  const bool branch = !unit->spec.resume_from.empty();
  const Error gone = invalid_argument("the checkpoint of job '" + unit->spec.resume_from +
                                          "' is not stored with this job; submit the job by POST /v1/jobs while that "
                                          "job is paused, and do not let it wait longer than queue.retention_ms",
                                      "resume_from");
  const auto none = [&](const Error& why) {
    return branch ? Result<std::string>(why) : Result<std::string>(std::string());
  };
  if (unit->receipt_of_model.empty()) co_return none(gone);
  const auto known = co_await queue_.checkpoint(unit->entry.ref, Deadline::after(kCallTimeout));
  if (!known) co_return none(known.error());
  if (known->empty()) co_return none(gone);
  auto found = results::Checkpoint::parse(*known);
  if (!found) co_return none(found.error());
  if (part_of(found->of, "model") != part_of(unit->receipt_of_model, "model")) {
    co_return none(Error{Code::kNotFound,
                         "job '" + unit->spec.resume_from + "' was drawn with other weights than this worker has",
                         "resume_from"});  // another worker may have them
  }
  auto state = co_await store_.get(found->manifest, Deadline::after(kStoreTimeout));
  if (!state) {
    if (branch) co_return state.error().code == Code::kNotFound ? gone : state.error();
    unit->log(spdlog::level::warn, "begins again: the checkpoint of an earlier attempt cannot be read: {}",
              state.error().message);
    co_return std::string();
  }
  unit->checkpoints.push_back(std::move(found->manifest));
  unit->went_on_from = found->step;
  unit->log(spdlog::level::info, "goes on from the checkpoint after step {}", unit->went_on_from);
  const auto here = parse_json(unit->receipt_of_model), there = parse_json(found->of);
  if (here && there && *here != *there) unit->begun_by = found->of;
  co_return std::move(*state);
}

asio::awaitable<void> Checkpoints::store(std::shared_ptr<Unit> unit, int step, std::string state) {
  const results::ResultKey key{unit->entry.ref.job, unit->entry.ref.unit,
                               unit->entry.nonce + "-" + std::to_string(step), unit->entry.tenant};
  auto manifest =
      co_await store_.put(key, std::move(state), "application/octet-stream", Deadline::after(kStoreTimeout));
  Result<void> stored = manifest ? Result<void>() : Result<void>(manifest.error());
  if (manifest) {
    const std::string record = results::Checkpoint{step, *manifest, unit->receipt_of_model}.to_json();
    stored = co_await queue_.store_checkpoint(unit->attempt(), record, Deadline::after(kCallTimeout));
  }
  if (!stored) {
    // Without an answer, the record may name this state or one before.
    if (manifest && stored.error().source == Source::kRedisConnection) {
      unit->checkpoints.push_back(std::move(*manifest));
    } else if (manifest) {
      (void)co_await store_.remove(*manifest, Deadline::after(kCallTimeout));
    }
    if (const auto more = log_.admit())
      unit->log(spdlog::level::warn, "the checkpoint after step {} is not stored: {}{}", step, stored.error().message,
                *more);
    co_return;
  }
  log_.reset();
  const auto before = std::exchange(unit->checkpoints, {});
  unit->checkpoints.push_back(std::move(*manifest));
  for (const auto& one : before) (void)co_await store_.remove(one, Deadline::after(kCallTimeout));
}

asio::awaitable<void> Checkpoints::drop(std::shared_ptr<Unit> unit) {
  const auto states = std::exchange(unit->checkpoints, {});
  if (states.empty()) co_return;
  // Otherwise they expire.
  (void)co_await queue_.drop_checkpoint(unit->entry.ref, Deadline::after(kCallTimeout));
  for (const auto& one : states) (void)co_await store_.remove(one, Deadline::after(kCallTimeout));
}

asio::awaitable<void> Checkpoints::drop_if_ended(std::shared_ptr<Unit> unit) {
  const auto open = co_await queue_.is_open(unit->entry.ref, Deadline::after(kCallTimeout));
  if (open && !*open) co_await drop(unit);
}

}  // namespace ditfleet::worker
