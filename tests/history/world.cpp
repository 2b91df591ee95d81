#include "tests/history/world.h"

#include <sodium.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstring>
#include <map>

namespace ditfleet::history {
namespace {

World* world = nullptr;
Fiber* running = nullptr;

constexpr std::size_t kStack = 256 << 10;
constexpr int kFirstFd = 1'000'000;  // descriptors of replaced functions
constexpr int kMostRunsAnInstant = 100'000;

// An io_context's epoll, with its timer.
struct Reactor {
  int epoll = 0, timer = 0;
  void* timer_data = nullptr;
  std::int64_t due_us = kNever;
};
std::vector<Reactor> reactors;
int next_fd = kFirstFd;

Reactor* reactor_of(int fd) {
  for (auto& one : reactors)
    if (one.epoll == fd || one.timer == fd) return &one;
  return nullptr;
}

const char* random_name() { return "history"; }
std::uint32_t random_number() { return static_cast<std::uint32_t>(World::get().random().next()); }
void random_fill(void* out, std::size_t size) {
  auto* bytes = static_cast<unsigned char*>(out);
  while (size > 0) {
    const std::uint64_t drawn = World::get().random().next();
    const std::size_t part = std::min(size, sizeof drawn);
    std::memcpy(bytes, &drawn, part);
    bytes += part;
    size -= part;
  }
}

}  // namespace

// What the replaced functions need of the world.
struct Hooks {
  static std::int64_t monotonic_us() { return world ? kSecond + world->now_us_ : kSecond; }
  static Process* current() { return world ? world->current_ : nullptr; }
  // A process that looks at its clock twice sees it go on.
  static void tick() {
    if (world && world->current_) ++world->now_us_;
  }
  static int wait(Reactor& reactor, epoll_event* out, int timeout) {
    if (reactor.due_us <= monotonic_us()) {
      reactor.due_us = kNever;
      out->events = EPOLLIN;
      out->data.ptr = reactor.timer_data;
      return 1;
    }
    if (timeout == 0) return 0;
    Process* process = current();
    process->timer_us_ = reactor.due_us == kNever ? kNever : reactor.due_us - kSecond;
    process->io_.stop();
    return 0;
  }
};

Process* current_process() { return Hooks::current(); }

std::uint64_t Random::next() {
  std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

World::World(std::uint64_t seed) : random_(seed) {
  world = this;
  static randombytes_implementation random{random_name, random_number, nullptr, nullptr, random_fill, nullptr};
  randombytes_set_implementation(&random);
}
World& World::get() { return *world; }

Process& World::add(std::string name) { return *processes_.emplace_back(std::make_unique<Process>(std::move(name))); }

void World::at(std::int64_t time_us, std::function<void()> event) {
  events_.push({std::max(time_us, now_us_), events_made_++, std::move(event)});
}

void World::step(Process& process) {
  process.ready_ = false;
  process.timer_us_ = kNever;
  current_ = &process;
  process.io_.restart();
  process.io_.run();
  current_ = nullptr;
}

bool World::run_until(std::int64_t time_us, const std::function<bool()>& done) {
  int at_once = 0;
  while (!done()) {
    std::int64_t next = events_.empty() ? kNever : events_.top().time_us;
    Process* turn = nullptr;
    for (const auto& process : processes_) {
      if (!process->alive) continue;
      std::int64_t due = process->ready_ ? now_us_ : process->timer_us_;
      if (due != kNever) due = std::max(due, process->stopped_until);
      if (due < next) {
        next = due;
        turn = process.get();
      }
    }
    if (next > time_us || next == kNever) {
      now_us_ = time_us;
      return done();
    }
    at_once = next > now_us_ ? 0 : at_once + 1;
    if (at_once > kMostRunsAnInstant) {
      hangs = true;
      return false;
    }
    now_us_ = std::max(now_us_, next);
    ++runs;
    if (turn != nullptr) {
      step(*turn);
    } else {
      const auto event = std::move(const_cast<Event&>(events_.top()).run);  // pop() does not look at it
      events_.pop();
      event();
    }
  }
  return true;
}

// ---- fibers

void Fiber::enter() {
  running->work_();
  running->ended_ = true;
  swapcontext(&running->own_, &running->caller_);
}

void Fiber::start(std::function<void()> work) {
  auto* fiber = new Fiber;  // lives as long as its process
  fiber->work_ = std::move(work);
  fiber->process_ = current_process();
  fiber->stack_.reset(new char[kStack]);
  getcontext(&fiber->own_);
  fiber->own_.uc_stack.ss_sp = fiber->stack_.get();
  fiber->own_.uc_stack.ss_size = kStack;
  makecontext(&fiber->own_, &Fiber::enter, 0);
  asio::post(fiber->process_->io(), [fiber] { fiber->resume(); });
  fiber->process_->wake();
}

void Fiber::resume() {
  Fiber* before = running;
  running = this;
  swapcontext(&caller_, &own_);
  running = before;
  if (ended_) delete this;
}

void World::sleep(std::int64_t us) {
  Fiber* fiber = running;
  auto timer = std::make_shared<asio::steady_timer>(fiber->process_->io(), std::chrono::microseconds(us));
  timer->async_wait([timer, fiber](const boost::system::error_code&) { fiber->resume(); });
  swapcontext(&fiber->own_, &fiber->caller_);
}

}  // namespace ditfleet::history

// ---- the replaced functions

using namespace ditfleet::history;

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  Hooks::tick();
  const std::int64_t us = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? (world ? world->wall_us() : 0)
                                                                                    : Hooks::monotonic_us();
  time->tv_sec = us / kSecond;
  time->tv_nsec = us % kSecond * 1000;
  return 0;
}

int epoll_create1(int) noexcept {
  reactors.push_back({.epoll = next_fd++});
  return reactors.back().epoll;
}
int epoll_create(int) noexcept { return epoll_create1(0); }
int eventfd(unsigned, int) noexcept { return next_fd++; }
int timerfd_create(clockid_t, int) noexcept {
  reactors.back().timer = next_fd++;  // an io_context creates it after its epoll
  return reactors.back().timer;
}

int timerfd_settime(int fd, int flags, const itimerspec* time, itimerspec*) noexcept {
  const std::int64_t us = time->it_value.tv_sec * kSecond + (time->it_value.tv_nsec + 999) / 1000;
  // A timer of 1 ns is how Asio asks to be called at once.
  reactor_of(fd)->due_us = time->it_value.tv_sec == 0 && time->it_value.tv_nsec == 0 ? kNever
                           : (flags & TFD_TIMER_ABSTIME) != 0                        ? us
                                                                                     : Hooks::monotonic_us() + us;
  return 0;
}

int epoll_ctl(int epoll, int, int fd, epoll_event* event) noexcept {
  Reactor* reactor = reactor_of(epoll);
  if (reactor && reactor->timer == fd && event) reactor->timer_data = event->data.ptr;
  return 0;
}

int epoll_wait(int epoll, epoll_event* events, int, int timeout) {
  return Hooks::wait(*reactor_of(epoll), events, timeout);
}

}  // extern "C"
