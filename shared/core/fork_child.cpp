#include "shared/core/fork_child.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

namespace ditfleet {
namespace {

pid_t fork_here(const std::function<void()>& child) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    child();
    ::_exit(127);
  }
  return pid < 0 ? -errno : pid;
}

// Never destroyed: its thread is there until the process is not.
class LastingThread {
 public:
  LastingThread() {
    sigset_t all, before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for those who wait for them
    std::thread([this] { work(); }).detach();
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  pid_t fork(const std::function<void()>& child) {
    const std::lock_guard one_at_a_time(callers_);
    std::unique_lock lock(mutex_);
    child_ = &child;
    changed_.notify_all();
    changed_.wait(lock, [&] { return child_ == nullptr; });
    return pid_;
  }

 private:
  [[noreturn]] void work() {
    ::pthread_setname_np(::pthread_self(), "fork");
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return child_ != nullptr; });
      pid_ = fork_here(*child_);
      child_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex callers_, mutex_;
  std::condition_variable changed_;
  const std::function<void()>* child_ = nullptr;  // asked for; null: done
  pid_t pid_ = 0;
};

}  // namespace

pid_t fork_child(const std::function<void()>& child) {
  if (::syscall(SYS_gettid) == ::getpid()) return fork_here(child);
  static auto& lasting = *new LastingThread;
  return lasting.fork(child);
}

}  // namespace ditfleet
