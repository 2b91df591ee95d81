// Client: the desired states of workers, and the leader's forecast.
#include <algorithm>

#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr std::int64_t kForecastMs = 5'000;
constexpr std::int64_t kDesiredS = 7 * 86'400;
constexpr std::string_view kDraining = "draining", kStopped = "stopped ";  // the latter with a run id

}  // namespace

asio::awaitable<Result<void>> Client::publish(const FleetForecast& forecast, Deadline deadline) {
  const auto impl = impl_;
  co_return without_value(co_await impl->connection_->execute(
      redis::Command("SET") << impl->keys_.forecast() << forecast_json(forecast) << "PX" << kForecastMs, deadline));
}

asio::awaitable<Result<std::optional<FleetForecast>>> Client::forecast(Deadline deadline) {
  const auto impl = impl_;
  auto reply = co_await impl->connection_->execute(redis::Command("GET") << impl->keys_.forecast(), deadline);
  if (!reply) co_return reply.error();
  if (reply->is_nil()) co_return std::optional<FleetForecast>();
  auto parsed = parse_forecast(reply->text);
  if (!parsed) co_return parsed.error();
  co_return std::optional(std::move(*parsed));
}

asio::awaitable<Result<std::chrono::milliseconds>> Client::publish(const std::map<std::string, JobOutlook>& outlook,
                                                                   Deadline deadline) {
  constexpr std::int64_t kBytesPerSecond = 4096;
  const auto impl = impl_;
  std::string text;
  for (const auto& [id, job] : outlook)
    text += id + " " + std::to_string(job.position) + " " + std::to_string(job.eta_ms) + "\n";
  const auto period_ms = std::max<std::int64_t>(1000, static_cast<std::int64_t>(text.size()) * 1000 / kBytesPerSecond);
  const auto done = co_await impl->connection_->execute(
      redis::Command("SET") << impl->keys_.outlook() << text << "PX" << period_ms + kForecastMs, deadline);
  if (!done) co_return done.error();
  co_return std::chrono::milliseconds(period_ms);
}

asio::awaitable<Result<std::map<std::string, JobOutlook>>> Client::outlook(Deadline deadline) {
  const auto impl = impl_;
  const auto reply = co_await impl->connection_->execute(redis::Command("GET") << impl->keys_.outlook(), deadline);
  if (!reply) co_return reply.error();
  std::map<std::string, JobOutlook> out;
  for (std::string_view text = reply->text; !text.empty();) {
    const auto part = first_parts<3>(take_part(text, '\n'), ' ');
    out[std::string(part[0])] = {to_int(part[1]), to_int(part[2])};
  }
  co_return out;
}

asio::awaitable<Result<void>> Client::set_desired(const WorkerInfo& worker, Desired desired, Deadline deadline) {
  const auto impl = impl_;
  const std::string key = impl->keys_.desired(worker.name);
  std::vector<redis::Command> commands;
  if (desired == Desired::kReady) {
    commands.push_back(redis::Command("DEL") << key);
  } else {
    const std::string value =
        desired == Desired::kDraining ? std::string(kDraining) : std::string(kStopped) + worker.boot;
    commands.push_back(redis::Command("SET") << key << value << "EX" << kDesiredS);
  }
  // Without NOMKSTREAM, the mailbox of a worker that is gone would stay.
  commands.push_back(redis::Command("XADD") << impl->keys_.mailbox(worker.owner()) << "NOMKSTREAM"
                                            << "*"
                                            << "m"
                                            << "desired");
  const auto replies = co_await impl->connection_->execute_all(std::move(commands), deadline);
  if (!replies[0]) co_return replies[0].error();
  co_return Result<void>();
}

asio::awaitable<Result<Desired>> Client::desired(const std::string& name, const std::string& boot, Deadline deadline) {
  const auto impl = impl_;
  auto reply = co_await impl->connection_->execute(
      redis::Command("GETEX") << impl->keys_.desired(name) << "EX" << kDesiredS, deadline);
  if (!reply) co_return reply.error();
  if (reply->text == kDraining) co_return Desired::kDraining;
  co_return reply->text == std::string(kStopped) + boot ? Desired::kStopped : Desired::kReady;
}

}  // namespace ditfleet::queue
