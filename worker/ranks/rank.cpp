#include "worker/ranks/rank.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <csignal>
#include <cstdlib>
#include <cstring>

#include "shared/core/missing_peer.h"

namespace ditfleet::worker {
namespace {

constexpr std::chrono::seconds kEnds{5};  // how long a rank may take to end by itself

}  // namespace

Error rank_fault(std::string message) { return {Code::kDeviceFault, std::move(message), {}}; }

Rank::Rank(int number, pid_t process, UniqueFd socket, std::chrono::milliseconds wait)
    : number_(number), process_(process), socket_(std::move(socket)), wait_(wait) {}

Rank::~Rank() {
  ending_ = true;
  ::shutdown(socket_.get(), SHUT_RDWR);  // ends the reader here, and the other process
  if (reader_.joinable()) reader_.join();
  const auto ends = std::min<std::chrono::milliseconds>(kEnds, wait_);
  const Deadline limit = Deadline::after(ends), hopeless = Deadline::after(2 * ends);
  while (!reap()) {
    if (limit.passed()) kill({});
    if (hopeless.passed()) {
      spdlog::error("[ranks] rank {} (process {}) does not end although it was killed: its driver hangs", number_,
                    process_);
      spdlog::shutdown();
      std::_Exit(EXIT_FAILURE);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Rank::start(std::function<void()> failed, std::function<void(const Error&)> broken) {
  reader_ = std::thread([this, failed = std::move(failed), broken = std::move(broken)] {
    while (auto reply = receive_message(socket_.get())) {
      const std::lock_guard lock(mutex_);
      const auto found = waiting_.find(reply->id);
      if (found == waiting_.end()) continue;
      std::optional<Error> error;
      unpack(reply->bytes, error);
      Result<void> result = error ? Result<void>(std::move(*error)) : Result<void>();
      if (!result && result.error().code == Code::kDeviceFault) failed();
      found->second.set_value(std::move(result));
      waiting_.erase(found);
    }
    if (ending_) return;
    const Error error = how_it_ended();
    {
      const std::lock_guard lock(mutex_);
      ended_ = error;
      for (auto& [id, promise] : waiting_) promise.set_value(error);
      waiting_.clear();
    }
    broken(error);
  });
}

std::future<Result<void>> Rank::ask(Message message) {
  std::promise<Result<void>> promise;
  auto reply = promise.get_future();
  const std::lock_guard lock(mutex_);
  if (ended_) {
    promise.set_value(*ended_);
    return reply;
  }
  message.id = ++last_id_;
  waiting_.emplace(last_id_, std::move(promise));
  (void)send_message(socket_.get(), message);  // if it fails, the reader finds that the rank has ended
  return reply;
}

void Rank::kill(const Error& why) {
  const std::lock_guard lock(process_mutex_);
  if (!killed_for_) killed_for_ = why;
  if (!status_) ::kill(process_, SIGKILL);
}

bool Rank::reap() {
  const std::lock_guard lock(process_mutex_);
  int status = 0;
  if (!status_ && ::waitpid(process_, &status, WNOHANG) == process_) status_ = status;
  return status_.has_value();
}

Error Rank::how_it_ended() {
  for (const Deadline limit = Deadline::after(kEnds); !reap() && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  const std::lock_guard lock(process_mutex_);
  if (killed_for_) return *killed_for_;
  if (!status_) return rank_fault(name() + " has closed its socket");
  if (WIFSIGNALED(*status_)) return rank_fault(name() + " was ended by SIG" + ::sigabbrev_np(WTERMSIG(*status_)));
  return rank_fault(name() + " has ended with exit status " + std::to_string(WEXITSTATUS(*status_)));
}

Result<void> Replies::wait(Deadline limit) {
  Result<void> first;
  for (auto& [rank, reply] : replies_) {
    Result<void> one = rank_fault("it does not do what rank 0 has done: its file system or driver hangs");
    if (reply.wait_until(limit.time_point()) == std::future_status::ready) one = reply.get();
    if (one || (!first && !is_missing_peer(first.error()))) continue;
    Error error = one.error();
    if (!error.message.starts_with("[ranks]")) error.message = "rank " + std::to_string(rank) + ": " + error.message;
    first = std::move(error);
  }
  return first;
}

}  // namespace ditfleet::worker
