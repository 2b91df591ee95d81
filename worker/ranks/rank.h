// Another rank as rank 0 sees it: a child process behind a socket.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/unique_fd.h"
#include "worker/ranks/messages.h"
#include "worker/ranks/pulse.h"

namespace ditfleet::worker {

// kDeviceFault: the worker must end.
Error rank_fault(std::string message);

// Thread-safe.
class Rank {
 public:
  // `wait`: how long it may take to end by itself.
  Rank(int number, pid_t process, UniqueFd socket, std::chrono::milliseconds wait);
  // Ends the process and waits for it, or ends this process if that one does not end: its driver hangs.
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // Reads replies on a thread of its own until the rank ends; then calls `broken`. Calls `failed` when the rank reports
  // that its device or its part in a step has failed.
  void start(std::function<void()> failed, std::function<void(const Error&)> broken);
  // Sends a call; the result is the reply's, or kDeviceFault if the rank ends before.
  std::future<Result<void>> ask(Message message);
  int number() const { return number_; }
  // With the number of the process, for messages.
  std::string name() const { return rank_name(number_, process_); }
  bool debugged() const { return is_debugged(process_); }
  // Ends the process at once. The rank's missing replies become `why`.
  void kill(const Error& why);
  // Whether the process has ended.
  bool reap();

 private:
  Error how_it_ended();

  const int number_;
  const pid_t process_;
  const UniqueFd socket_;
  const std::chrono::milliseconds wait_;
  std::thread reader_;
  std::atomic<bool> ending_ = false;
  std::mutex process_mutex_;  // not held while a message is sent, which may block
  std::optional<int> status_;
  std::optional<Error> killed_for_;
  std::mutex mutex_;
  std::int64_t last_id_ = 0;
  std::map<std::int64_t, std::promise<Result<void>>> waiting_;
  std::optional<Error> ended_;
};

// The replies of several ranks to one call.
class Replies {
 public:
  void add(int rank, std::future<Result<void>> reply) { replies_.emplace_back(rank, std::move(reply)); }
  // Waits for all. Returns the first error, with the rank's number; errors caused by another rank's failure rank
  // lowest. kDeviceFault: a rank has not replied at the deadline.
  Result<void> wait(Deadline limit = Deadline::never());

 private:
  std::vector<std::pair<int, std::future<Result<void>>>> replies_;
};

}  // namespace ditfleet::worker
