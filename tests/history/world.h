// Virtual time. Everything of a history runs on one thread: the io_context of each process, the fibers that stand for
// its threads, and the events of the world. When nothing is left to do at an instant, time jumps to the next one.
//
// The processes are the product's own objects. They read clocks, wait and draw random numbers through the functions of
// the C library and libsodium that world.cpp replaces in this program.
#pragma once

#include <ucontext.h>

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <string>
#include <vector>

namespace ditfleet::history {

namespace asio = boost::asio;

inline constexpr std::int64_t kMs = 1'000, kSecond = 1'000'000;  // in microseconds, the unit of all times here
inline constexpr std::int64_t kNever = INT64_MAX;

// splitmix64: its whole state is one number.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  std::int64_t below(std::int64_t bound) {
    return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(bound));
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }

 private:
  std::uint64_t state_;
};

// A process: what it executes, and when it must go on.
class Process {
 public:
  explicit Process(std::string name) : name_(std::move(name)) {}
  const std::string& name() const { return name_; }
  asio::io_context& io() { return io_; }
  void wake() { ready_ = true; }  // there are handlers to run
  bool alive = true;              // a dead process is left as it is: nothing of it runs or is destroyed
  std::int64_t stopped_until = 0;

 private:
  friend class World;
  friend struct Hooks;
  const std::string name_;
  asio::io_context io_{1};
  bool ready_ = true;
  std::int64_t timer_us_ = kNever;  // of its reactor
};

class World {
 public:
  // One for a process of the host, which ends with it: nothing is destroyed.
  explicit World(std::uint64_t seed);
  static World& get();

  std::int64_t now() const { return now_us_; }
  // Since 1970, by a host without a fault.
  std::int64_t wall_us() const { return kEpochUs + now_us_; }
  Random& random() { return random_; }
  Process& add(std::string name);
  void at(std::int64_t time_us, std::function<void()> event);
  void after(std::int64_t us, std::function<void()> event) { at(now_us_ + us, std::move(event)); }
  // Runs until `done` holds, which it asks after each event, or until the time. False: it does not hold.
  bool run_until(std::int64_t time_us, const std::function<bool()>& done);
  // Called on a fiber.
  void sleep(std::int64_t us);
  bool hangs = false;  // too much happened at one instant
  std::int64_t runs = 0;

 private:
  friend struct Hooks;
  static constexpr std::int64_t kEpochUs = 1'790'000'000 * kSecond;
  struct Event {
    std::int64_t time_us;
    std::uint64_t number;
    std::function<void()> run;
    bool operator<(const Event& other) const {
      return time_us != other.time_us ? time_us > other.time_us : number > other.number;
    }
  };
  void step(Process& process);

  std::int64_t now_us_ = 0;
  Random random_;
  std::uint64_t events_made_ = 0;
  std::priority_queue<Event> events_;
  std::vector<std::unique_ptr<Process>> processes_;
  Process* current_ = nullptr;
};

// What runs on a thread of its own in the product. It runs on its process's io_context until it sleeps.
class Fiber {
 public:
  // Starts `work` at the next turn of the current process.
  static void start(std::function<void()> work);

 private:
  friend class World;
  static void enter();
  void resume();
  ucontext_t own_{}, caller_{};
  std::function<void()> work_;
  std::unique_ptr<char[]> stack_;
  Process* process_ = nullptr;
  bool ended_ = false;
};

// The process whose handlers run now; null between them.
Process* current_process();

}  // namespace ditfleet::history
