// Which device the pipeline runs on, and the surroundings of one stage there.
//
// The programs link LibTorch's CPU part alone. Where a GPU is wanted, load_device() opens LibTorch's CUDA part
// from beside the CPU part at run time, so that one binary serves a slim install and a GPU host.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>

namespace ditfleet::pipeline {

// Where tensors live and what their elements are.
struct Placement {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  c10::ScalarType dtype = c10::ScalarType::Float;  // Float or BFloat16
};

struct DeviceChoice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::string name;  // "NVIDIA H200", the processor's name
};

// `wanted`: auto | cpu | cuda | cuda:N. Throws Failure: kInvalidArgument for another word or an N that is not
// there; kUnavailable when a GPU is asked for by name and there is none, or LibTorch's CUDA part does not load
// (the message says which file is missing). auto falls back to the CPU. Must be called before any other use
// of LibTorch in the process that may touch a device. Thread safe; blocks while libraries load.
DeviceChoice load_device(const std::string& wanted);

// "cpu", "cuda:0"
std::string device_text(c10::Device device);

// Ends all work in flight on the device. Throws what the device reports.
void synchronize(c10::Device device);

// The same for the calling thread's current stream alone.
void synchronize_current(c10::Device device);

// The calling thread's current stream on a GPU, as CUDA's own functions take it.
void* current_stream(c10::Device device);

// Gives cached device memory back after an allocation failed. Does nothing on the CPU; never throws.
void release_cached_memory(c10::Device device) noexcept;

// The surroundings of one stage on the calling thread: inference mode, the device made current, and on a GPU a
// stream of the thread's own, so that the stages of different units overlap. The stage must call finish(), which waits
// for the stream: what was computed may then be used from any stream. Not for sharing between threads.
class StageScope {
 public:
  explicit StageScope(c10::Device device);
  ~StageScope();  // restores the stream and device that were current
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;
  void finish();  // throws what the device reports

 private:
  struct Guards;
  Guards* guards_;
};

}  // namespace ditfleet::pipeline
