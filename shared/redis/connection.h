// A pipelined Redis connection (RESP2) with deadlines. It reconnects automatically, with back-off.
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

// A reply. kError occurs only as an element of an array: an error reply to a command becomes an Error instead.
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
  std::chrono::milliseconds backoff_first{50}, backoff_max{2000};  // doubles with each attempt; with jitter
  std::size_t max_pending_bytes = 64u << 20;  // of unsent commands; above it execute() fails with kUnavailable
};

// Not thread-safe: call every function on `executor`, which must be single-threaded or a strand.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  static std::shared_ptr<Connection> create(asio::any_io_executor executor, ConnectionOptions options);
  ~Connection();

  // Connects, and reconnects until stop(). Until the first connection is established, commands wait up to their
  // deadline.
  void start();
  void stop();
  bool connected() const;
  // Closes an established connection, for example because its server is silent, and connects again. `why` is logged.
  void drop(std::string why);
  // Increases with every established connection. A caller that sees the number change must read its state again.
  std::uint64_t generation() const;
  asio::any_io_executor executor() const;
  const ConnectionOptions& options() const;

  // Sends the command and waits for the reply. Concurrent calls are pipelined; Redis runs their commands in order.
  // An error reply becomes an Error with source kRedis; README.md lists the codes.
  // kUnavailable with source kRedisConnection: there is no connection, or it was lost. The command may have run; it is
  // not sent again. kDeadlineExceeded: no reply until the deadline. A late reply is dropped.
  asio::awaitable<Result<Reply>> execute(Command command, Deadline deadline);
  // Sends the commands in one write. Result i belongs to command i.
  asio::awaitable<std::vector<Result<Reply>>> execute_all(std::vector<Command> commands, Deadline deadline);

  // Sets the handler for messages of subscriptions. Call it before start().
  void on_push(std::function<void(Reply)> handler);

 private:
  class Impl;
  explicit Connection(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace ditfleet::redis
