// Selects the device and sets up the execution of a stage on it.
//
// The programs link only LibTorch's CPU part. For a GPU, load_device() opens LibTorch's CUDA part at run time, so that
// one binary serves CPU-only installs and GPU hosts.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace ditfleet::pipeline {

// The device and element type of tensors.
struct Placement {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  c10::ScalarType dtype = c10::ScalarType::Float;  // Float or BFloat16
  // Weights that can leave the device are moved to host memory as soon as they are loaded.
  bool on_host = false;
  // Identifies the weights and their layout, so that processes of this host share the copies in host memory. Empty:
  // they do not.
  std::string host_key = {};
  // Of tensors without memory (`device` is meta): the device that they stand for. See pipeline/memory/dry_run.h.
  std::optional<c10::Device> stands_for = {};

  c10::Device real_device() const { return stands_for.value_or(device); }
};

// The placement of a VAE: fp32 on a CPU without AVX-512, where LibTorch's convolutions in bf16 take ten times as long,
// and nine times the memory of their input.
Placement for_convolutions(Placement placement);

// The folder of the libtorch_cpu.so that this process uses.
std::filesystem::path libtorch_folder();
// Why dlopen() failed last on this thread.
std::string last_dl_error();

struct DeviceChoice {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::string name;  // "NVIDIA H200", the processor's name
};

// `wanted`: auto | cpu | cuda | cuda:N. auto falls back to the CPU. Throws Failure: kInvalidArgument for any other text
// or an unknown N; kUnavailable if a GPU is requested but none is found, or if LibTorch's CUDA part cannot be loaded
// (the message contains the missing file). With a GPU, returns the one that is `ahead` GPUs behind it. Call it before
// anything else in the process uses LibTorch on a device. Blocks while libraries load. Thread-safe.
DeviceChoice load_device(const std::string& wanted, int ahead = 0);

// "cpu", "cuda:0"
std::string device_text(c10::Device device);

// Waits for all work on the device. Throws what the device reports.
void synchronize(c10::Device device);

// Waits for the calling thread's current stream. Throws what the device reports.
void synchronize_current(c10::Device device);

// The calling thread's current stream on a GPU, as a CUstream.
void* current_stream(c10::Device device);

// Releases cached device memory after an allocation failed. Does nothing on the CPU; never throws.
void release_cached_memory(c10::Device device) noexcept;

// Sets up the calling thread for one stage: inference mode, the current device, and on a GPU a stream per thread, so
// that stages of different units overlap. The stage must call finish(), which waits for the stream; afterwards its
// results may be used on any stream. Not thread-safe.
class StageScope {
 public:
  explicit StageScope(c10::Device device);
  ~StageScope();  // restores the previous stream and device
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;
  void finish();  // throws what the device reports
  // Microseconds between the last two calls of finish(), or from the start to the first one: on a GPU in its stream, by
  // events.
  std::int64_t lap_us() const;

 private:
  struct Guards;
  std::unique_ptr<Guards> guards_;
};

}  // namespace ditfleet::pipeline
