#include "pipeline/region/libraries/attention_table.h"

#include <spdlog/spdlog.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "pipeline/device/device.h"
#include "pipeline/region/libraries/plan_key.h"
#include "pipeline/region/libraries/timing.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

constexpr std::int64_t kLeastTokens = 256;  // less is a matter of microseconds, which timing does not resolve

}  // namespace

AttentionTimer gpu_timer(int device) {
  return {.room = memory_for_trial, .fastest = [device](std::size_t candidates, const auto& start) {
            const c10::Device gpu(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
            return fastest(candidates, pipeline::current_stream(gpu), start);
          }};
}

AttentionTable::AttentionTable(GpuIdentity gpu, std::string arch, std::shared_ptr<kernel_cache::KernelCache> cache,
                               std::function<Libraries()> open, AttentionTimer timer)
    : gpu_(std::move(gpu)), arch_(std::move(arch)), cache_(std::move(cache)), timer_(std::move(timer)) {
  libraries_ = threads_.run(std::move(open)).share();
}

bool AttentionTable::run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                         const at::Tensor& v_scales) const {
  if (q.dim() != 4 || q.numel() == 0 || k.numel() == 0) return false;
  const Libraries& all = libraries_.get();
  const auto start = [&](std::size_t i) { return all[i]->run(q, k, v, out, v_scales); };
  const std::size_t chosen = choose(attention_shape(q, k, v, out), 2 * (q.nbytes() + k.nbytes()), start);
  if (start(chosen)) return true;
  for (std::size_t i = 0; i < all.size(); ++i)
    if (i != chosen && start(i)) return true;
  return false;
}

bool AttentionTable::has_f8() const {
  const Libraries& all = libraries_.get();
  return std::any_of(all.begin(), all.end(), [](const auto& one) { return one->has_f8(); });
}

void AttentionTable::prewarm(const AttentionShape& shape) const {
  threads_.run([this, shape] {
    const Bucket bucket = bucket_of(shape);
    std::optional<std::size_t> chosen;
    {
      const std::lock_guard lock(mutex_);
      if (const auto known = chosen_.find(bucket); known != chosen_.end()) chosen = known->second;
    }
    if (!chosen && (chosen = cached(bucket))) {  // without the lock, because the cache may ask Redis
      const std::lock_guard lock(mutex_);
      chosen_.emplace(bucket, *chosen);
    }
    const Libraries& all = libraries_.get();
    for (std::size_t i = 0; i < all.size(); ++i)
      if (i == chosen.value_or(i)) all[i]->prewarm(shape);
  });
}

AttentionTable::Bucket AttentionTable::bucket_of(const AttentionShape& s) {
  const auto bits = [](std::int64_t n) { return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(n))); };
  return {s.batch, s.heads, s.head_dim, bits(s.tokens), bits(s.key_tokens), s.f8};
}

std::size_t AttentionTable::choose(const AttentionShape& shape, std::uint64_t bytes,
                                   const std::function<bool(std::size_t)>& start) const {
  const Libraries& all = libraries_.get();
  if (all.size() == 1 || shape.tokens < kLeastTokens) return 0;
  const Bucket bucket = bucket_of(shape);
  std::lock_guard lock(mutex_);  // held while timing: concurrent timings would disturb each other
  if (const auto known = chosen_.find(bucket); known != chosen_.end()) return known->second;
  const auto measure = [&]() -> Result<kernel_cache::Entry> {
    std::vector<std::size_t> able;
    for (std::size_t i = 0; i < all.size(); ++i) {
      try {
        if (start(i)) able.push_back(i);
      } catch (const std::exception& e) {
        spdlog::debug("attention by {} is not timed: {}", all[i]->name(), e.what());
      }
    }
    const auto best =
        able.size() < 2 ? std::nullopt : timer_.fastest(able.size(), [&](std::size_t i) { start(able[i]); });
    if (!best) return Error{Code::kNotFound, "only one attention library supports these sizes", {}};
    const std::string name = all[able[*best]]->name();
    spdlog::info("attention with {} heads of {} from {} to {} tokens: {} is the fastest", shape.heads, shape.head_dim,
                 shape.tokens, shape.key_tokens, name);
    kernel_cache::Entry entry{.region = "attention", .arch = arch_, .kind = kernel_cache::Kind::kPlan};
    entry.code.assign(name.begin(), name.end());
    return entry;
  };
  const auto usable = [&](const kernel_cache::Entry& entry) -> Result<void> {
    if (choice_of(entry)) return {};
    return Error{Code::kDataCorrupt, "the entry does not name an attention library", {}};
  };
  std::optional<std::size_t> chosen;
  if (!timer_.room(bytes))
    chosen = cached(bucket);
  else if (const auto found = cache_->get_or_compile(key_of(bucket), "attention", arch_, measure, usable))
    chosen = choice_of(**found);
  return chosen_[bucket] = chosen.value_or(0);
}

std::optional<std::size_t> AttentionTable::cached(const Bucket& bucket) const {
  const auto found = cache_->find(key_of(bucket), arch_);
  return found ? choice_of(**found) : std::nullopt;
}

std::optional<std::size_t> AttentionTable::choice_of(const kernel_cache::Entry& entry) const {
  const std::string name(entry.code.begin(), entry.code.end());
  const Libraries& all = libraries_.get();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (entry.kind == kernel_cache::Kind::kPlan && all[i]->name() == name) return i;
  return {};
}

kernel_cache::Key AttentionTable::key_of(const Bucket& b) const {
  auto key = plan_key_of("attention choice", 3, gpu_);
  key.add("torch", TORCH_VERSION);
  for (const auto& one : libraries_.get()) key.add("library", one->name());
  key.add("batch", b.batch).add("heads", b.heads).add("head_dim", b.head_dim);
  key.add("tokens", b.tokens).add("key_tokens", b.key_tokens).add("f8", b.f8 ? 1 : 0);
  return key.finish();
}

}  // namespace ditfleet::region
