#include "worker/adapters/loader.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <numeric>

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kWatchEvery = 2s;
constexpr auto kCallTimeout = 2s;
constexpr double kKeep = 0.7;  // of the measured rate, with each new measurement

bool contains(const std::vector<std::string>& all, const std::string& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

void add_new(const std::vector<std::string>& from, std::vector<std::string>& to) {
  for (const auto& one : from) {
    if (!contains(to, one)) to.push_back(one);
  }
}

AdapterTier tier_of(const pipeline::AdapterHoldings& held, const std::string& sha256, bool was_on_disk) {
  if (contains(held.in_slots, sha256)) return AdapterTier::kSlot;
  if (contains(held.in_host, sha256)) return AdapterTier::kHost;
  return was_on_disk ? AdapterTier::kDisk : AdapterTier::kSource;
}

// One that a request names twice is loaded for its first use.
bool is_again(const std::vector<pipeline::LoraRequest>& loras, std::size_t at) {
  return std::any_of(loras.begin(), loras.begin() + static_cast<std::ptrdiff_t>(at),
                     [&](const auto& before) { return before.id == loras[at].id; });
}

}  // namespace

Error with_names(Error error, const std::vector<job::LoraUse>& uses, const std::vector<pipeline::LoraRequest>& loras) {
  std::vector<std::size_t> order(std::min(loras.size(), uses.size()));
  std::iota(order.begin(), order.end(), std::size_t{0});
  // A path before one that it begins with: /proc/self/fd/31, /proc/self/fd/3.
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return loras[a].path.size() > loras[b].path.size(); });
  for (const std::size_t i : order) {
    const std::string& path = loras[i].path;
    for (auto at = error.message.find(path); at != std::string::npos;
         at = error.message.find(path, at + uses[i].name.size())) {
      error.message.replace(at, path.size(), uses[i].name);
    }
  }
  return error;
}

AdapterLoader::AdapterLoader(asio::any_io_executor executor, AdapterOptions options)
    : executor_(executor),
      options_(std::move(options)),
      copies_(options_.cache_dir, options_.cache_bytes),
      fetcher_(executor, options_.source.get(), copies_, options_.folders) {}

void AdapterLoader::start() {
  if (options_.source) options_.source->start();
}

void AdapterLoader::stop() {
  if (options_.source) options_.source->stop();
}

asio::awaitable<void> AdapterLoader::forget(pipeline::Model& model, std::string sha256) {
  const std::function<Result<bool>()> work = [&model, sha256 = std::move(sha256)]() -> Result<bool> {
    model.forget_adapter(sha256);
    return true;
  };
  co_await thread_.run<bool>(work, Deadline::never());
}

void AdapterLoader::note_pin(const std::string& sha256, bool pinned) {
  if (pinned)
    pinned_.insert(sha256);
  else
    pinned_.erase(sha256);
}

asio::awaitable<Result<void>> AdapterLoader::fetch(const Wish& wish, BroughtAdapters& brought,
                                                   std::vector<AdapterTier>& tiers) {
  const auto held = wish.model->adapters();
  for (const auto& use : wish.uses) {
    auto fetched = co_await fetcher_.fetch(use.sha256, use.name, wish.wanted);
    tiers.push_back(tier_of(held, use.sha256, fetched.ok() && fetched->was_here));
    if (!fetched) {
      if (fetched.error().code == Code::kNotFound) co_await forget(*wish.model, use.sha256);
      co_return fetched.error();
    }
    note_pin(use.sha256, fetched->pinned);
    brought.loras.push_back({.path = fetched->copy->path(), .scale = use.scale, .id = use.sha256});
    brought.copies.push_back(std::move(fetched->copy));
  }
  co_return Result<void>();
}

asio::awaitable<Result<BroughtAdapters>> AdapterLoader::bring(Wish wish) {
  const auto begun = std::chrono::steady_clock::now();
  telemetry::SpanTimer span("adapter_load", wish.context);
  span.attribute("ditfleet.adapters", static_cast<std::int64_t>(wish.uses.size()));
  BroughtAdapters brought;
  std::vector<AdapterTier> tiers;
  auto done = co_await fetch(wish, brought, tiers);
  wish.model->pin_adapters(pinned_);
  const bool resident =
      std::all_of(tiers.begin(), tiers.end(), [](AdapterTier tier) { return tier == AdapterTier::kSlot; });
  if (done && !resident) {
    using Tiers = std::vector<AdapterTier>;
    const std::function<Result<Tiers>()> work = [model = wish.model, loras = brought.loras, drops = wish.drops,
                                                 tiers]() mutable -> Result<Tiers> {
      // A unit before this one may have brought them since this one came.
      const auto held = model->adapters();
      for (std::size_t i = 0; i < loras.size(); ++i) {
        tiers[i] =
            is_again(loras, i) ? AdapterTier::kSlot : tier_of(held, loras[i].id, tiers[i] != AdapterTier::kSource);
      }
      auto loaded = model->prefetch(loras, drops);
      if (!loaded) return loaded.error();
      return tiers;
    };
    auto loaded = co_await thread_.run<Tiers>(work, Deadline::never());
    if (loaded) tiers = std::move(*loaded);
    if (!loaded) done = with_names(loaded.error(), wish.uses, brought.loras);
  }
  // Of a unit that failed all are counted but those it did not come to.
  for (const AdapterTier tier : tiers) count_adapter_load(tier, done ? "ok" : code_name(done.error().code));
  const AdapterTier furthest = tiers.empty() ? AdapterTier::kSlot : *std::max_element(tiers.begin(), tiers.end());
  span.attribute("ditfleet.adapter_tier", std::string(tier_name(furthest)));
  if (!done) {
    span.failed(done.error().message);
    co_return done.error();
  }
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun);
  observe_adapter_load(furthest, took);
  if (furthest >= AdapterTier::kDisk) {
    std::int64_t bytes = 0;
    for (std::size_t i = 0; i < tiers.size(); ++i)
      bytes += tiers[i] >= AdapterTier::kDisk ? brought.copies[i]->bytes() : 0;
    const double rate = static_cast<double>(bytes) * 1e6 / static_cast<double>(std::max<std::int64_t>(1, took.count()));
    bytes_per_s_ = bytes_per_s_ > 0 ? kKeep * bytes_per_s_ + (1 - kKeep) * rate : rate;
  }
  co_return brought;
}

asio::awaitable<AdapterLoader::Review> AdapterLoader::forget_deleted(const ModelSet& models) {
  Review review;
  std::vector<std::string> digests;
  for (const auto& [name, model] : models.models) {
    const auto held = model->adapters();
    add_new(held.in_slots, digests);
    add_new(held.in_host, digests);
  }
  const std::function<Result<std::vector<std::string>>()> list = [this]() -> Result<std::vector<std::string>> {
    show_adapter_cache(copies_.bytes());
    return copies_.digests();
  };
  auto on_disk = co_await thread_.run<std::vector<std::string>>(list, Deadline::never());
  if (on_disk) add_new(*on_disk, digests);
  for (const std::string& sha256 : digests) {
    auto found = co_await options_.source->lookup(sha256, Deadline::after(kCallTimeout));
    review.left |= found.ok();
    if (found) note_pin(sha256, found->pinned);
    if (found) continue;
    if (found.error().code != Code::kNotFound) {
      review.complete = false;
      continue;
    }
    spdlog::info("adapters: {} is registered no more, and forgotten", sha256.substr(0, 12));
    for (const auto& [name, model] : models.models) co_await forget(*model, sha256);
    copies_.remove(sha256);
    note_pin(sha256, false);
  }
  for (const auto& [name, model] : models.models) model->pin_adapters(pinned_);
  co_return review;
}

asio::awaitable<void> AdapterLoader::watch(const ModelSet& models, std::function<void()> changed) {
  if (!options_.source) co_return;
  std::int64_t seen = -1;
  bool any = true;  // a process before this one may have left copies
  asio::steady_timer timer(executor_);
  while (true) {
    timer.expires_after(kWatchEvery);
    co_await timer.async_wait(asio::use_awaitable);
    // Who has none asks nothing.
    any |= std::any_of(models.models.begin(), models.models.end(), [](const auto& entry) {
      const auto held = entry.second->adapters();
      return !held.in_slots.empty() || !held.in_host.empty();
    });
    if (!any) continue;
    auto version = co_await options_.source->version(Deadline::after(kCallTimeout));
    if (!version || *version == seen) continue;
    const Review review = co_await forget_deleted(models);
    if (review.complete) {
      seen = *version;
      any = review.left;
    }
    changed();
  }
}

void AdapterLoader::describe(const ModelSet& models, queue::WorkerInfo& info) const {
  if (!options_.source) return;
  for (const auto& [name, model] : models.models) {
    const auto held = model->adapters();
    show_adapters(name, held);
    info.adapter_slots = std::max(info.adapter_slots, held.slots);
    info.host_adapter_bytes += held.host_bytes;
    add_new(held.in_slots, info.adapters);
    add_new(held.in_host, info.host_adapters);
    info.adapter_load_bytes_per_s = std::max(info.adapter_load_bytes_per_s, held.load_bytes_per_s);
    info.adapter_swap_us = std::max(info.adapter_swap_us, held.swap_us);
  }
  // The engine knows the last part of the way alone.
  if (bytes_per_s_ > 0) info.adapter_load_bytes_per_s = static_cast<std::int64_t>(bytes_per_s_);
}

}  // namespace ditfleet::worker
