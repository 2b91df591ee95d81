// Client: the history of ended jobs.
#include <algorithm>

#include "shared/queue/calls.h"
#include "shared/queue/records.h"
#include "shared/queue/reply_fields.h"

namespace ditfleet::queue {
namespace {

constexpr std::size_t kAdapterDigits = 12;

bool is_cursor(std::string_view text) {
  const auto dash = text.find('-');
  return number_of<std::int64_t>(text.substr(0, dash), 0) &&
         (dash == text.npos || number_of<std::int64_t>(text.substr(dash + 1), 0));
}

}  // namespace

asio::awaitable<Result<void>> Client::append_history(std::span<const HistoryJob> jobs, Deadline deadline) {
  const auto impl = impl_;
  const std::string key = impl->keys_.history();
  const auto now_ms = co_await impl->redis_time(deadline);
  if (!now_ms) co_return now_ms.error();
  std::vector<redis::Command> commands;
  for (const HistoryJob& job : jobs) {
    // Redis stores the names of fields once per node of the stream.
    commands.push_back(redis::Command("XADD")
                       << key << "*"
                       << "created" << job.created_ms << "tenant" << job.tenant << "class" << job.class_key << "steps"
                       << job.steps << "units" << job.units << "adapter"
                       << std::string_view(job.adapter).substr(0, kAdapterDigits) << "state"
                       << job::state_name(job.state) << "attempts" << job.attempts << "total" << job.total_ms << "run"
                       << job.run_ms << "worker" << job.worker);
  }
  commands.push_back(redis::Command("XTRIM") << key << "MINID"
                                             << "~" << std::max<std::int64_t>(0, *now_ms - impl->options_.history_ms));
  commands.push_back(redis::Command("XTRIM") << key << "MAXLEN"
                                             << "~" << impl->options_.history_jobs);
  for (auto& reply : co_await impl->connection_->execute_all(std::move(commands), deadline)) {
    if (!reply) co_return reply.error();
  }
  co_return Result<void>();
}

asio::awaitable<Result<HistoryPage>> Client::history(const std::string& after, int limit, Deadline deadline) {
  const auto impl = impl_;
  if (!is_cursor(after)) {
    co_return Error{Code::kInvalidArgument,
                    "after must be a next_cursor or a time in milliseconds since 1970, such as 1763726400000", "after"};
  }
  auto reply =
      co_await impl->connection_->execute(redis::Command("XRANGE") << impl->keys_.history() << "(" + after << "+"
                                                                   << "COUNT" << limit,
                                          deadline);
  if (!reply) co_return reply.error();
  HistoryPage page;
  for (const redis::Reply& entry : reply->elements) {
    if (entry.elements.size() != 2) continue;
    const Fields fields = fields_of(entry.elements[1]);
    const auto number = [&](std::string_view name) { return std::max<std::int64_t>(0, to_int(text_of(fields, name))); };
    page.jobs.push_back({.created_ms = number("created"),
                         .total_ms = number("total"),
                         .run_ms = number("run"),
                         .tenant = text_of(fields, "tenant"),
                         .class_key = text_of(fields, "class"),
                         .worker = text_of(fields, "worker"),
                         .adapter = text_of(fields, "adapter"),
                         .state = job::state_from_name(text_of(fields, "state")).value_or(job::State::kFailed),
                         .steps = static_cast<int>(number("steps")),
                         .units = static_cast<int>(number("units")),
                         .attempts = static_cast<int>(number("attempts"))});
  }
  if (static_cast<int>(reply->elements.size()) == limit) page.next_cursor = reply->elements.back().elements.at(0).text;
  co_return page;
}

}  // namespace ditfleet::queue
