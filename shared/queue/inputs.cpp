// Client: whose images are stored, and until when.
#include <algorithm>

#include "shared/queue/calls.h"
#include "shared/queue/records.h"
#include "shared/queue/reply_fields.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::queue {
namespace {

Error no_such_input(const std::string& sha256) { return not_found("[queue] the tenant has no image " + sha256); }

}  // namespace

asio::awaitable<Result<bool>> Client::keep_input(const std::string& tenant, const std::string& sha256,
                                                 std::int64_t bytes, std::int64_t keep_ms, InputQuota quota,
                                                 Deadline deadline) {
  constexpr std::int64_t kMost = 999'999'999'999'999;  // Functions take 15 digits
  redis::Command command = fcall("keep_input", 1);
  command << impl_->keys_.inputs() << tenant << sha256 << bytes << keep_ms << quota.images
          << std::min(quota.bytes, kMost);
  const auto reply = co_await impl_->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  const std::string& verdict = reply->text;
  if (verdict == "created" || verdict == "existed") co_return verdict == "created";
  if (verdict == "unknown") co_return no_such_input(sha256);
  const auto count = verdict.find(' '), used = verdict.rfind(' ');
  const std::string which = verdict.substr(0, count);
  static const telemetry::Counters refusals("ditfleet_quota_refusals_total");
  refusals({tenant, which}).Increment();
  co_return Error{
      .code = Code::kResourceExhausted,
      .message = "[queue] tenant '" + tenant + "' has stored" + verdict.substr(count, used - count) + " images of" +
                 verdict.substr(used) + " bytes and sends one of " + std::to_string(bytes) + "; " +
                 (which == "inputs" ? "quotas.inputs is " + std::to_string(quota.images)
                                    : "it may have " + std::to_string(quota.bytes) +
                                          " bytes (quotas.input_bytes, or a quarter of Redis' maxmemory if less)") +
                 "; remove images with DELETE /v1/uploads/{id} (GET /v1/uploads lists them), or wait until they expire",
      .retry_after = std::chrono::seconds(30)};
}

asio::awaitable<Result<bool>> Client::remove_input(const std::string& tenant, const std::string& sha256,
                                                   Deadline deadline) {
  redis::Command command = fcall("remove_input", 1);
  command << impl_->keys_.inputs() << tenant << sha256;
  const auto reply = co_await impl_->call(std::move(command), deadline);
  if (!reply) co_return reply.error();
  if (reply->text == "unknown") co_return no_such_input(sha256);
  if (!reply->text.starts_with("named ")) co_return reply->text == "gone";
  co_return Error{Code::kConflict,
                  "[queue] open jobs name the image " + sha256 + ": " + reply->text.substr(6) +
                      "; remove it when they have ended, or cancel them",
                  {}};
}

asio::awaitable<Result<std::vector<std::string>>> Client::expire_inputs(Deadline deadline) {
  const auto reply = co_await impl_->call(fcall("expire_inputs", 1) << impl_->keys_.inputs() << 500, deadline);
  if (!reply) co_return reply.error();
  std::vector<std::string> gone;
  for (const auto& sha256 : reply->elements) gone.push_back(sha256.text);
  co_return gone;
}

asio::awaitable<Result<std::map<std::string, std::int64_t>>> Client::inputs(const std::string& tenant,
                                                                            Deadline deadline) {
  const auto reply =
      co_await impl_->connection_->execute(redis::Command("HGETALL") << impl_->keys_.inputs_of(tenant), deadline);
  if (!reply) co_return reply.error();
  std::map<std::string, std::int64_t> out;
  for (const auto& [sha256, bytes] : fields_of(*reply)) out.emplace(sha256, to_int(bytes));
  co_return out;
}

asio::awaitable<Result<std::map<std::string, TenantUse>>> Client::use(Deadline deadline) {
  constexpr std::int64_t kOneUnit = 1 << 26;  // functions/base.lua
  std::vector<redis::Command> reads;
  for (const std::string& key : {impl_->keys_.use(), impl_->keys_.input_use()})
    reads.push_back(redis::Command("HGETALL") << key);
  const auto sums = co_await impl_->connection_->execute_all(std::move(reads), deadline);
  for (const auto& reply : sums)
    if (!reply) co_return reply.error();
  std::map<std::string, TenantUse> out;
  for (const auto& [tenant, sum] : fields_of(*sums[0]))
    out[std::string(tenant)] = {to_int(sum) / kOneUnit, to_int(sum) % kOneUnit * 1024};
  for (const auto& [field, sum] : fields_of(*sums[1])) {
    TenantUse& use = out[std::string(field.substr(0, field.find(':')))];
    (field.ends_with(':') ? use.inputs : use.input_bytes) = to_int(sum);
  }
  co_return out;
}

}  // namespace ditfleet::queue
