#include "shared/redis/sentinel.h"

#include <array>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <memory>
#include <utility>

#include "shared/core/text.h"
#include "shared/redis/reply_reader.h"
#include "shared/redis/transport.h"

namespace ditfleet::redis {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr std::chrono::seconds kLimit{1};

Error no_answer(const std::string& why) {
  return {.code = Code::kUnavailable, .message = why, .source = Source::kRedisConnection};
}

// The replies of `count` commands in `wire`. Until the alarm closes the transport.
asio::awaitable<Result<std::vector<Reply>>> exchange(std::shared_ptr<Transport> transport, std::string wire,
                                                     std::size_t count) {
  const error_code refused = co_await transport->open();
  if (refused == asio::error::operation_aborted) co_return no_answer("no reply within a second");
  if (refused) co_return no_answer(refused.message());
  const auto sent = std::make_shared<std::string>(std::move(wire));
  transport->write(asio::buffer(*sent), [transport, sent](error_code) {});
  ReplyReader reader;
  std::array<char, 4096> buffer;
  std::vector<Reply> replies;
  while (replies.size() < count) {
    const auto [error, size] = co_await transport->read_some(asio::buffer(buffer));
    if (error == asio::error::operation_aborted) co_return no_answer("no reply within a second");
    if (error) co_return no_answer(error.message());
    reader.feed({buffer.data(), size});
    for (;;) {
      auto next = reader.next();
      if (!next) co_return next.error();
      if (!next->has_value()) break;
      replies.push_back(std::move(**next));
    }
  }
  co_return replies;
}

// `sentinel`: its address and log-in. Returns the address that it names.
asio::awaitable<Result<Endpoint::Node>> ask(asio::any_io_executor executor, Endpoint sentinel, std::string service) {
  std::string wire;
  std::size_t count = 1;
  if (!sentinel.password.empty()) {
    Command log_in("AUTH");
    if (!sentinel.user.empty()) log_in << sentinel.user;
    log_in << sentinel.password;
    log_in.append_to(wire);
    ++count;
  }
  Command question("SENTINEL");
  question << "get-master-addr-by-name" << service;
  question.append_to(wire);

  const std::shared_ptr<Transport> transport = Transport::create(executor, sentinel);
  asio::steady_timer alarm(executor, kLimit);
  alarm.async_wait([transport](error_code canceled) {
    if (!canceled) transport->close();
  });
  const auto replies = co_await exchange(transport, std::move(wire), count);
  alarm.cancel();
  transport->close();
  if (!replies) co_return replies.error();
  for (const Reply& reply : *replies)
    if (reply.type == Reply::Type::kError) co_return no_answer(reply.text);
  const Reply& named = replies->back();
  if (named.elements.size() != 2) co_return no_answer("it monitors no service '" + service + "'");
  const auto port = number_of(named.elements[1].text, 1, 65535);
  if (!port) co_return no_answer("its reply has no port");
  co_return Endpoint::Node{named.elements[0].text, *port};
}

}  // namespace

asio::awaitable<Result<Endpoint>> find_master(asio::any_io_executor executor, Endpoint endpoint, std::size_t first) {
  const std::vector<Endpoint::Node> sentinels = std::exchange(endpoint.sentinels, {});
  Endpoint sentinel = endpoint;
  sentinel.user = endpoint.sentinel_user;
  sentinel.password = endpoint.sentinel_password;
  sentinel.db = 0;
  std::string refusals;
  for (std::size_t i = 0; i < sentinels.size(); ++i) {
    sentinel.host = sentinels[(first + i) % sentinels.size()].host;
    sentinel.port = sentinels[(first + i) % sentinels.size()].port;
    auto master = co_await ask(executor, sentinel, endpoint.service);
    if (master) {
      endpoint.host = std::move(master->host);
      endpoint.port = master->port;
      co_return endpoint;
    }
    refusals += (refusals.empty() ? "" : "; ") + sentinel.display() + ": " + master.error().message;
  }
  co_return no_answer("no sentinel names the master (" + refusals + ")");
}

}  // namespace ditfleet::redis
