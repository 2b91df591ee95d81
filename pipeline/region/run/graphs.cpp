#include "pipeline/region/run/graphs.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/driver.h"

namespace ditfleet::region {
namespace {

constexpr int kRelaxed = 2;        // CU_STREAM_CAPTURE_MODE_RELAXED: lets the allocator request memory
constexpr unsigned kNoTiming = 2;  // CU_EVENT_DISABLE_TIMING

// A recording and the memory that it reads and writes.
struct Recording {
  std::vector<at::Tensor> inputs;
  at::Tensor output;
  void* executable = nullptr;
};

struct Bucket {
  std::vector<std::int64_t> key;
  bool seen = false, refused = false;
  Recording recording;
};

class CudaGraphs : public Graphs {
 public:
  CudaGraphs(c10::Device device, std::size_t most, const Driver& cuda)
      : device_(device), most_(most), cuda_(cuda), pool_{0, next_pool()} {
    pipeline::unwrap(enter_device(cuda_, device.index()));
    cuda_.event_create(&done_, kNoTiming);
  }
  ~CudaGraphs() override {
    for (Bucket& bucket : buckets_) {
      try {
        drop(bucket);
      } catch (...) {  // the device has failed, and its memory with it
      }
    }
    if (done_) cuda_.event_destroy(done_);
  }

  at::Tensor run(const std::vector<std::int64_t>& key, const std::vector<at::Tensor>& inputs,
                 const Body& body) override {
    std::unique_lock lock(mutex_);
    Bucket& bucket = find(key);
    if (!bucket.seen || bucket.refused) {
      bucket.seen = true;
      lock.unlock();
      return body(inputs);
    }
    const c10::impl::VirtualGuardImpl guard(device_.type());
    void* stream = guard.getStream(device_).native_handle();
    if (!bucket.recording.executable && !record(bucket, inputs, body, guard)) {
      bucket.refused = true;
      lock.unlock();
      return body(inputs);
    }
    Recording& recording = bucket.recording;
    cuda_.stream_wait(stream, done_, 0);
    for (std::size_t i = 0; i < inputs.size(); ++i) recording.inputs[i].copy_(inputs[i]);
    if (const int e = cuda_.graph_launch(recording.executable, stream); e != 0)
      pipeline::fail(Code::kDeviceFault, "[graphs] a recorded step cannot be launched: " + cuda_.name_of(e));
    at::Tensor result = recording.output.clone();
    cuda_.event_record(done_, stream);
    return result;
  }

 private:
  // LibTorch uses the first number for its own graphs and pools. Ours differ in the second number, far from its users'.
  static std::uint64_t next_pool() {
    static std::atomic<std::uint64_t> next{std::uint64_t{0xd1f} << 32};
    return next++;
  }
  static c10::cuda::CUDACachingAllocator::CUDAAllocator& allocator() {
    return *static_cast<c10::cuda::CUDACachingAllocator::CUDAAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
  }

  Bucket& find(const std::vector<std::int64_t>& key) {
    const auto known = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& b) { return b.key == key; });
    if (known != buckets_.end()) {
      buckets_.splice(buckets_.begin(), buckets_, known);
      return buckets_.front();
    }
    buckets_.push_front({.key = key});
    if (buckets_.size() > most_) {
      pipeline::synchronize(device_);  // it may be running
      drop(buckets_.back());
      buckets_.pop_back();
    }
    return buckets_.front();
  }

  void drop(Bucket& bucket) {
    if (!bucket.recording.executable) return;
    cuda_.graph_executable_destroy(bucket.recording.executable);
    bucket.recording = {};
    allocator().releasePool(device_.index(), pool_);
  }

  // Logs and returns false if the body cannot be recorded.
  bool record(Bucket& bucket, const std::vector<at::Tensor>& inputs, const Body& body,
              const c10::impl::VirtualGuardImpl& guard) {
    Recording made;
    for (const at::Tensor& t : inputs) made.inputs.push_back(t.clone());
    // Recording needs a stream of its own. The allocator's cache is released, since these sizes now come from the pool.
    pipeline::synchronize(device_);
    pipeline::release_cached_memory(device_);
    const c10::Stream before = guard.exchangeStream(guard.getNewStream(device_));
    const c10::Stream own = guard.getStream(device_);
    void* stream = own.native_handle();
    std::string problem;
    void* graph = nullptr;
    allocator().beginAllocateToPool(device_.index(), pool_,
                                    [stream](cudaStream_t asking) { return static_cast<void*>(asking) == stream; });
    if (int e = cuda_.capture_begin(stream, kRelaxed); e != 0) {
      problem = cuda_.name_of(e);
    } else {
      try {
        made.output = body(made.inputs);
      } catch (...) {
        problem = pipeline::error_in_flight("graphs").message;
      }
      e = cuda_.capture_end(stream, &graph);
      if (e != 0 && problem.empty()) problem = cuda_.name_of(e);
    }
    allocator().endAllocateToPool(device_.index(), pool_);
    guard.exchangeStream(before);
    if (problem.empty())
      if (const int e = cuda_.graph_instantiate(&made.executable, graph, 0); e != 0) problem = cuda_.name_of(e);
    if (graph) cuda_.graph_destroy(graph);
    if (!problem.empty()) {
      made = {};
      allocator().releasePool(device_.index(), pool_);
      spdlog::warn("a step cannot be recorded as a CUDA graph and runs without one: {}", problem);
      return false;
    }
    bucket.recording = std::move(made);
    return true;
  }

  const c10::Device device_;
  const std::size_t most_;
  const Driver& cuda_;
  const c10::MempoolId_t pool_;
  void* done_ = nullptr;  // event: after it the next recording may use the pool's memory
  std::mutex mutex_;
  std::list<Bucket> buckets_;  // most recently used first
};

}  // namespace

std::unique_ptr<Graphs> make_graphs(c10::Device device, std::size_t most) {
  return std::make_unique<CudaGraphs>(device, most, *pipeline::unwrap(driver()));
}

}  // namespace ditfleet::region
