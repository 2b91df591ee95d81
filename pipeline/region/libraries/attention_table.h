// Which attention library is fastest for which sizes on this GPU. Measured once and shared by the fleet through the
// kernel cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/libraries/driver.h"
#include "shared/core/background_threads.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {
struct Entry;
}

namespace ditfleet::region {

// Measures on a GPU; tests replace it. See timing.h.
struct AttentionTimer {
  std::function<bool(std::uint64_t bytes)> room;
  std::function<std::optional<std::size_t>(std::size_t candidates, const std::function<void(std::size_t)>& start)>
      fastest;
};
AttentionTimer gpu_timer(int device);

// Thread-safe.
class AttentionTable : public DirectAttention {
 public:
  using Libraries = std::vector<std::shared_ptr<const DirectAttention>>;

  // `open` runs in the background and returns at least one library, the best guess first. `gpu`, `arch`, LibTorch's
  // version and the libraries' names are the key of a choice.
  AttentionTable(GpuIdentity gpu, std::string arch, std::shared_ptr<kernel_cache::KernelCache> cache,
                 std::function<Libraries()> open, AttentionTimer timer);

  std::string name() const override { return "auto"; }
  // The first call for batch, heads, head size and the powers of two of both lengths times every library with its own
  // operands, unless the kernel cache has the choice; other calls wait. Below 256 tokens, without memory for a trial,
  // and if only one library can do it, the first library that can do it runs.
  bool run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
           const at::Tensor& v_scales) const override;
  bool has_f8() const override;
  // Prewarms the chosen library; all of them if nothing is chosen yet.
  void prewarm(const AttentionShape& shape) const override;

 private:
  // Lengths of one power of two share a choice, so that a new length needs no measurement.
  struct Bucket {
    std::int64_t batch = 0, heads = 0, head_dim = 0;
    int tokens = 0, key_tokens = 0;  // bits of the numbers
    bool f8 = false;
    auto operator<=>(const Bucket&) const = default;
  };
  static Bucket bucket_of(const AttentionShape& shape);
  std::size_t choose(const AttentionShape& shape, std::uint64_t bytes,
                     const std::function<bool(std::size_t)>& start) const;
  std::optional<std::size_t> cached(const Bucket& bucket) const;
  std::optional<std::size_t> choice_of(const kernel_cache::Entry& entry) const;
  kernel_cache::Key key_of(const Bucket& bucket) const;

  const GpuIdentity gpu_;
  const std::string arch_;
  const std::shared_ptr<kernel_cache::KernelCache> cache_;
  const AttentionTimer timer_;
  std::shared_future<Libraries> libraries_;
  mutable std::mutex mutex_;
  mutable std::map<Bucket, std::size_t> chosen_;
  mutable BackgroundThreads threads_{"attention", 1};  // last: its work uses the other members
};

}  // namespace ditfleet::region
