// Work beside the current stream of a GPU, for what is needed soon but not yet.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace ditfleet::pipeline {

// One caller at a time; `start` and `join` may come from different threads. On a CPU everything runs at once, where it
// is called.
class Aside {
 public:
  explicit Aside(c10::Device device);
  ~Aside();  // waits for what nobody has joined
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

  // Runs `work` with a stream of this object's own as the current one: what it puts there begins after all that the
  // current stream holds so far. Waits first for what nobody has joined. Throws what `work` throws.
  void start(const std::function<void()>& work);
  // What comes on the current stream from here on begins after that. Does not wait itself; nothing where that is so
  // already.
  void join();

 private:
  struct Streams;
  std::unique_ptr<Streams> streams_;  // null on a CPU
  bool open_ = false;                 // started, and nobody has joined
};

}  // namespace ditfleet::pipeline
