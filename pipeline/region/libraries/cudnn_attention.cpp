#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <spdlog/spdlog.h>

#include <cmath>
#include <future>
#include <map>
#include <mutex>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/cudnn.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/libraries/driver.h"
#include "pipeline/region/libraries/plan_key.h"
#include "shared/core/background_threads.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

class CudnnAttention : public DirectAttention {
 public:
  CudnnAttention(int device, std::string arch, std::shared_ptr<kernel_cache::KernelCache> cache)
      : device_(static_cast<c10::DeviceIndex>(device)), arch_(std::move(arch)), cache_(std::move(cache)) {}

  std::string name() const override {
    return "cudnn " + std::to_string(at::detail::getCUDAHooks().versionRuntimeCuDNN());
  }

  bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
           const at::Tensor&) const override {
    for (const at::Tensor* t : {&q, &k, &v, &out})
      if (!is_operand(*t)) return false;
    const auto plan = plan_for(attention_shape(q, k, v, out));
    if (!plan) return false;
    const c10::Device device(c10::DeviceType::CUDA, device_);
    const at::Tensor workspace =
        at::empty({Cudnn::workspace_bytes(*plan)}, at::TensorOptions(c10::ScalarType::Byte).device(device));
    pipeline::unwrap(library_->run(*plan,
                                   {q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(), out.mutable_data_ptr()},
                                   static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(3)))),
                                   workspace.mutable_data_ptr(), pipeline::current_stream(device)));
    return true;
  }

  // Does nothing until the library is open: opening it costs the first call half a second anyway.
  void prewarm(const AttentionShape& shape) const override {
    std::lock_guard lock(mutex_);
    if (!library_ || shape.f8 || plans_.contains(shape)) return;
    plans_[shape] = threads_
                        .run([this, shape] {
                          const c10::DeviceGuard guard(c10::Device(c10::DeviceType::CUDA, device_));
                          return from_cache(shape);
                        })
                        .share();
  }

 private:
  using PlanPointer = std::shared_ptr<const Cudnn::Plan>;

  // The first caller makes the plan unless prewarm() did; callers for the same shape wait for it.
  PlanPointer plan_for(const AttentionShape& shape) const {
    std::shared_future<PlanPointer> plan;
    std::packaged_task<PlanPointer()> make([this, &shape] { return from_cache(shape); });
    bool first = false;
    {
      std::lock_guard lock(mutex_);
      if (!library_ && !open()) return nullptr;
      auto& known = plans_[shape];
      first = !known.valid();
      if (first) known = make.get_future().share();
      plan = known;
    }
    if (first) make();
    return plan.get();
  }

  // After kDeviceFault the next call tries again.
  bool open() const {
    if (missing_) return false;
    auto library = Cudnn::open();
    if (!library && library.error().code != Code::kUnavailable) {  // LibTorch's cached memory may help
      pipeline::release_cached_memory(c10::Device(c10::DeviceType::CUDA, device_));
      library = Cudnn::open();
    }
    if (!library) {
      missing_ = library.error().code == Code::kUnavailable;
      spdlog::log(missing_ ? spdlog::level::info : spdlog::level::warn, "{}; another attention runs instead{}",
                  library.error().message, missing_ ? "" : " this time");
      return false;
    }
    gpu_ = pipeline::unwrap(gpu_identity(device_));
    library_ = std::move(*library);
    return true;
  }

  PlanPointer from_cache(const AttentionShape& shape) const {
    PlanPointer made, restored;
    bool refused = false;
    const auto usable = [&](const kernel_cache::Entry& entry) -> Result<void> {
      if (made && !refused) return {};
      auto plan = library_->restore(entry.code);
      if (!plan) {
        refused = true;
        return plan.error();
      }
      restored = *plan;
      return {};
    };
    const auto found = cache_->get_or_compile(
        plan_key(shape), "attention", arch_,
        [&]() -> Result<kernel_cache::Entry> {
          auto plan = library_->plan(shape);
          if (!plan) return plan.error();
          made = *plan;
          auto text = library_->save(*made);
          if (!text) return text.error();
          kernel_cache::Entry entry{.region = "attention", .arch = arch_, .kind = kernel_cache::Kind::kPlan};
          entry.code.assign(text->begin(), text->end());
          return entry;
        },
        usable);
    if (made || !found) return made;  // even if it could not be saved
    if (restored) return restored;
    if (auto plan = library_->restore((*found)->code)) return *plan;  // made by another thread
    auto plan = library_->plan(shape);
    return plan ? *plan : nullptr;
  }

  // Everything that a serialized plan depends on; it contains the kernel.
  kernel_cache::Key plan_key(const AttentionShape& s) const {
    auto key = plan_key_of("attention", 2, gpu_);
    key.add("arch", arch_).add("library", "cudnn").add("version", static_cast<std::int64_t>(library_->version()));
    add_shape(key, s);
    return key.finish();
  }

  const c10::DeviceIndex device_;
  const std::string arch_;
  const std::shared_ptr<kernel_cache::KernelCache> cache_;
  mutable std::mutex mutex_;
  mutable bool missing_ = false;                  // permanently
  mutable std::shared_ptr<const Cudnn> library_;  // null until open()
  mutable GpuIdentity gpu_;
  mutable std::map<AttentionShape, std::shared_future<PlanPointer>> plans_;  // null: cuDNN has none
  mutable BackgroundThreads threads_{"attention-plans", 2};                  // last: its work uses the other members
};

}  // namespace

std::shared_ptr<const DirectAttention> make_cudnn_attention(int device, const std::string& arch,
                                                            std::shared_ptr<kernel_cache::KernelCache> cache) {
  return std::make_shared<CudnnAttention>(device, arch, std::move(cache));
}

}  // namespace ditfleet::region
