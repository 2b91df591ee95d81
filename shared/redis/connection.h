// A Redis connection on Asio with hiredis as parser (RESP2): pipelined, with deadlines, reconnecting with back-off.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/redis/endpoint.h"

namespace ditfleet::redis {

namespace asio = boost::asio;

// A reply as a value. Errors of the server inside a reply (an array element) are kError.
struct Reply {
  enum class Type { kNil, kString, kInteger, kArray, kError, kStatus };
  Type type = Type::kNil;
  std::string text;             // kString, kStatus, kError
  std::int64_t integer = 0;     // kInteger
  std::vector<Reply> elements;  // kArray

  bool is_nil() const { return type == Type::kNil; }
  bool is_array() const { return type == Type::kArray; }
};

// The arguments of one command, formatted as they are added.
class Command {
 public:
  Command() = default;
  explicit Command(std::string_view name) { *this << name; }
  Command& operator<<(std::string_view argument);
  Command& operator<<(const char* argument) { return *this << std::string_view(argument); }
  Command& operator<<(const std::string& argument) { return *this << std::string_view(argument); }
  Command& operator<<(std::int64_t argument);
  Command& operator<<(int argument) { return *this << static_cast<std::int64_t>(argument); }
  int size() const { return count_; }
  void append_to(std::string& wire) const;  // as a RESP array

 private:
  std::string body_;
  int count_ = 0;
};

struct ConnectionOptions {
  Endpoint endpoint;
  std::chrono::milliseconds connect_timeout{3000};
  std::chrono::milliseconds backoff_first{50}, backoff_max{2000};  // doubled, with jitter
  std::size_t max_pending_bytes = 64u << 20;  // unsent commands; above it execute() is kUnavailable
};

// Threads: every call from `executor`, which is single threaded or a strand.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  static std::shared_ptr<Connection> create(asio::any_io_executor executor, ConnectionOptions options);
  ~Connection();

  // Connects, and reconnects until stop(). Commands before the first connection wait for it until their deadline.
  void start();
  void stop();
  bool connected() const;
  // Increases with every established connection: a caller that sees it change must read its state again.
  std::uint64_t generation() const;
  asio::any_io_executor executor() const;
  const ConnectionOptions& options() const;

  // Sends the command and waits for the reply. Calls do not wait for each other; Redis runs their commands in order.
  // An error reply becomes an Error with source kRedis: kUnavailable for LOADING, MASTERDOWN, READONLY, CLUSTERDOWN;
  // kResourceExhausted for OOM; kPermissionDenied for NOAUTH, NOPERM, WRONGPASS; else kInternal.
  // kUnavailable with source kRedisConnection: no connection, or lost (the command may have run and is not sent again).
  // kDeadlineExceeded: a late reply is dropped.
  asio::awaitable<Result<Reply>> execute(Command command, Deadline deadline);
  // Pipelined in one write; the i-th result belongs to the i-th command.
  asio::awaitable<std::vector<Result<Reply>>> execute_all(std::vector<Command> commands, Deadline deadline);

  // Receives the messages of subscriptions. Set it before start().
  void on_push(std::function<void(Reply)> handler);

 private:
  class Impl;
  explicit Connection(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace ditfleet::redis
