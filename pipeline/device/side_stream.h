// A second stream of a GPU, for work whose result is needed soon but not yet.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace ditfleet::pipeline {

// Not thread-safe, but start() and join() may be called from different threads. On a CPU start() runs the work
// directly.
class SideStream {
 public:
  explicit SideStream(c10::Device device);
  ~SideStream();  // waits for work that was not joined
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  // Calls `work` with the side stream as the current stream. Its kernels run after everything that is already enqueued
  // on the caller's current stream, and after work that was not joined. Throws what `work` throws.
  void start(const std::function<void()>& work);
  // Makes the current stream wait for the work of start(), if any. Does not block.
  void join();

 private:
  struct Streams;
  std::unique_ptr<Streams> streams_;  // null on a CPU
  bool open_ = false;                 // started and not joined
};

}  // namespace ditfleet::pipeline
