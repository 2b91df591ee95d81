#include "pipeline/region/libraries/timed_attention.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <spdlog/spdlog.h>
#include <torch/headeronly/version.h>

#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/driver.h"
#include "pipeline/region/libraries/plan_key.h"
#include "pipeline/region/libraries/timing.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

class CachedChoice : public TimedAttention {
 public:
  CachedChoice(int device, std::string arch, bool direct, std::shared_ptr<kernel_cache::KernelCache> cache)
      : device_(static_cast<c10::DeviceIndex>(device)),
        arch_(std::move(arch)),
        direct_(direct),
        cache_(std::move(cache)),
        gpu_(pipeline::unwrap(gpu_identity(device))) {}

  AttentionBackend choose(const AttentionShape& shape, std::uint64_t bytes,
                          const std::function<void(AttentionBackend)>& start) const override {
    std::lock_guard lock(mutex_);  // held while timing: concurrent timings would disturb each other
    if (const auto known = chosen_.find(shape); known != chosen_.end()) return known->second;
    return chosen_[shape] = look_up(shape, bytes, start);
  }

 private:
  AttentionBackend look_up(const AttentionShape& shape, std::uint64_t bytes,
                           const std::function<void(AttentionBackend)>& start) const {
    const auto key = plan_key(shape);
    // Without enough memory for a trial only the cache's choice counts.
    const auto found =
        !memory_for_trial(bytes)
            ? cache_->find(key, arch_)
            : cache_->get_or_compile(
                  key, "attention", arch_,
                  [&]() -> Result<kernel_cache::Entry> {
                    const auto best = measure(start);
                    if (!best) return Error{Code::kNotFound, "only one attention backend supports these sizes", {}};
                    kernel_cache::Entry entry{.region = "attention", .arch = arch_, .kind = kernel_cache::Kind::kPlan};
                    const std::string_view name = name_of(*best);
                    entry.code.assign(name.begin(), name.end());
                    return entry;
                  },
                  [](const kernel_cache::Entry& entry) {
                    return choice_of(entry)
                               ? Result<void>()
                               : Error{Code::kDataCorrupt, "the entry does not contain an attention backend", {}};
                  });
    const auto made = found ? choice_of(**found) : std::nullopt;
    return made.value_or(AttentionBackend::kAuto);
  }

  static std::optional<AttentionBackend> choice_of(const kernel_cache::Entry& entry) {
    if (entry.kind != kernel_cache::Kind::kPlan) return {};
    return parse_attention(std::string(entry.code.begin(), entry.code.end()));
  }

  std::optional<AttentionBackend> measure(const std::function<void(AttentionBackend)>& start) const {
    std::vector<AttentionBackend> able{AttentionBackend::kAuto};
    for (const AttentionBackend backend : {AttentionBackend::kFlash, AttentionBackend::kCudnn}) {
      if (direct_ && backend == AttentionBackend::kCudnn) continue;  // the same as kAuto
      try {
        start(backend);
        able.push_back(backend);
      } catch (const std::exception& e) {
        spdlog::debug("attention by {} is not timed: {}", name_of(backend), e.what());
      }
    }
    const auto best = fastest(able.size(), pipeline::current_stream(c10::Device(c10::DeviceType::CUDA, device_)),
                              [&](std::size_t i) { start(able[i]); });
    return best ? std::optional(able[*best]) : std::nullopt;
  }

  // Everything that the measurement may depend on.
  kernel_cache::Key plan_key(const AttentionShape& s) const {
    auto key = plan_key_of("attention choice", 2, gpu_);
    key.add("torch", TORCH_VERSION)
        .add("cudnn", static_cast<std::int64_t>(at::detail::getCUDAHooks().versionRuntimeCuDNN()))
        .add("direct", direct_ ? 1 : 0);
    add_shape(key, s);
    return key.finish();
  }

  const c10::DeviceIndex device_;
  const std::string arch_;
  const bool direct_;
  const std::shared_ptr<kernel_cache::KernelCache> cache_;
  const GpuIdentity gpu_;
  mutable std::mutex mutex_;
  mutable std::map<AttentionShape, AttentionBackend> chosen_;
};

}  // namespace

std::shared_ptr<const TimedAttention> make_timed_attention(int device, std::string arch, bool direct,
                                                           std::shared_ptr<kernel_cache::KernelCache> cache) {
  return std::make_shared<CachedChoice>(device, std::move(arch), direct, std::move(cache));
}

}  // namespace ditfleet::region
