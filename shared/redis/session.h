// The state machine of a Redis connection, without I/O or a clock. Each event function returns the next step, which
// connection.cpp performs.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"
#include "shared/redis/connection.h"
#include "shared/redis/reply_reader.h"

namespace ditfleet::redis {

// The next action of connection.cpp. The comments name the function to call afterwards.
struct Step {
  enum class Do {
    kConnect,  // open the socket; then connected() or connect_failed()
    kRead,     // write take_output() and wait for bytes; then received() or disconnected()
    kClose,    // close the socket because of close_reason(); then closed()
    kWait,     // sleep for `wait`; then waited()
    kEnd,      // close the socket; the session has stopped
  };
  Do what = Do::kEnd;
  std::chrono::milliseconds wait{0};
};

// Not thread-safe.
class Session {
 public:
  using Id = std::uint64_t;
  struct Done {
    Id id;
    std::vector<Result<Reply>> replies;  // one per command of the request
  };

  // `jitter` returns a number in [0, 1).
  Session(const ConnectionOptions& options, std::function<double()> jitter);

  Step start();
  Step connected();
  Step connect_failed(const std::string& why);
  Step received(std::string_view bytes);
  Step disconnected(const std::string& why);
  Step closed();
  Step waited();
  Step stop();
  const Error& close_reason() const { return last_error_; }

  // Adds a request. If the session is not ready, the request waits. Before the first connection, it waits until its
  // caller abandons it; later, until an attempt to reconnect fails.
  // kUnavailable: the session has stopped, or too many bytes are waiting.
  Result<Id> submit(const std::vector<Command>& commands);
  // Ends a request whose deadline has passed. Returns the error for its caller: kDeadlineExceeded or, if the request
  // was never sent, the reason why there is no connection. Late replies are dropped.
  Error abandon(Id id);
  // True if several requests in a row were abandoned and no byte was received: the server does not respond.
  bool looks_dead() const { return silent_timeouts_ >= kSilentTimeouts; }

  // Returns the bytes to write. The result may reuse the memory of `spare`.
  std::string take_output(std::string spare = {});
  bool has_output() const { return !out_.empty(); }
  std::vector<Done> take_done();
  std::vector<Reply> take_pushes();
  void accept_pushes() { pushes_wanted_ = true; }

  bool ready() const { return phase_ == Phase::kReady; }
  bool stopped() const { return phase_ == Phase::kStopped; }
  std::uint64_t generation() const { return generation_; }

 private:
  enum class Phase { kIdle, kWaiting, kConnecting, kGreeting, kReady, kStopped };
  struct Request {
    Id id = 0;
    std::string wire;
    std::size_t commands = 0;
    bool abandoned = false;
    std::vector<Result<Reply>> replies;
  };
  static constexpr int kSilentTimeouts = 3;

  std::string greeting();
  Error read_only() const;
  Error clustered() const;
  Step greeted(const Reply& reply);
  void take_reply(Reply reply);
  void become_ready();
  void fail(std::deque<Request>& requests, const Error& error);
  Step retry_later();

  ConnectionOptions options_;
  std::function<double()> jitter_;
  Phase phase_ = Phase::kIdle;
  std::unique_ptr<ReplyReader> reader_;
  std::deque<Request> waiting_, in_flight_;
  std::size_t waiting_bytes_ = 0;
  std::string out_;
  std::vector<Done> done_;
  std::vector<Reply> pushes_;
  bool pushes_wanted_ = false;
  int greetings_left_ = 0;
  int failures_ = 0;  // in a row
  int silent_timeouts_ = 0;
  Id next_id_ = 1;
  std::uint64_t generation_ = 0;
  Error last_error_;
};

}  // namespace ditfleet::redis
