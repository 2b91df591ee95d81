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

asio::awaitable<Result<void>> Client::append_history(std::span<const HistoryJob> jobs, std::int64_t now_ms,
                                                     Deadline deadline) {
  const auto impl = impl_;
  const std::string key = impl->keys_.history();
  std::vector<redis::Command> commands;
  for (const HistoryJob& job : jobs) {
    // The names are short because each node of the stream stores them, and a node has only a few entries.
    commands.push_back(redis::Command("XADD")
                       << key << "*"
                       << "c" << job.created_ms << "t" << job.tenant << "k" << job.class_key << "s" << job.steps << "u"
                       << job.units << "l" << std::string_view(job.adapter).substr(0, kAdapterDigits) << "e"
                       << job::state_name(job.state) << "a" << job.attempts << "d" << job.total_ms << "r" << job.run_ms
                       << "w" << job.worker);
  }
  commands.push_back(redis::Command("XTRIM") << key << "MINID"
                                             << "~" << std::max<std::int64_t>(0, now_ms - impl->options_.history_ms));
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
    page.jobs.push_back({.created_ms = number("c"),
                         .total_ms = number("d"),
                         .run_ms = number("r"),
                         .tenant = text_of(fields, "t"),
                         .class_key = text_of(fields, "k"),
                         .worker = text_of(fields, "w"),
                         .adapter = text_of(fields, "l"),
                         .state = job::state_from_name(text_of(fields, "e")).value_or(job::State::kFailed),
                         .steps = static_cast<int>(number("s")),
                         .units = static_cast<int>(number("u")),
                         .attempts = static_cast<int>(number("a"))});
  }
  if (static_cast<int>(reply->elements.size()) == limit) page.next_cursor = reply->elements.back().elements.at(0).text;
  co_return page;
}

}  // namespace ditfleet::queue
