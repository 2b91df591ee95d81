#include "worker/adapters/loader.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <numeric>

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr auto kWatchEvery = 2s;
constexpr auto kCallTimeout = 2s;
constexpr double kSmoothing = 0.7;  // weight of the previous rate

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

// Whether the request names the same adapter at an earlier position.
bool is_repeated(const std::vector<pipeline::LoraRequest>& loras, std::size_t at) {
  return std::any_of(loras.begin(), loras.begin() + static_cast<std::ptrdiff_t>(at),
                     [&](const auto& before) { return before.id == loras[at].id; });
}

}  // namespace

Error with_adapter_names(Error error, const std::vector<job::LoraUse>& uses,
                         const std::vector<pipeline::LoraRequest>& loras) {
  std::vector<std::size_t> order(std::min(loras.size(), uses.size()));
  std::iota(order.begin(), order.end(), std::size_t{0});
  // Longer paths first: /proc/7/fd/3 is a prefix of /proc/7/fd/31.
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
  const std::function<Result<void>()> work = [&model, sha256 = std::move(sha256)]() -> Result<void> {
    model.forget_adapter(sha256);
    return {};
  };
  co_await thread_.run<void>(work, Deadline::never());
}

void AdapterLoader::note_pin(const std::string& sha256, bool pinned) {
  if (pinned)
    pinned_.insert(sha256);
  else
    pinned_.erase(sha256);
}

asio::awaitable<Result<void>> AdapterLoader::fetch(const Request& request, LoadedAdapters& loaded,
                                                   std::vector<AdapterTier>& tiers) {
  const auto held = request.model->adapters();
  for (const auto& use : request.uses) {
    auto fetched = co_await fetcher_.fetch(use.sha256, use.name, request.wanted);
    tiers.push_back(tier_of(held, use.sha256, fetched.ok() && fetched->was_on_disk));
    if (!fetched) {
      if (fetched.error().code == Code::kNotFound) co_await forget(*request.model, use.sha256);
      co_return fetched.error();
    }
    note_pin(use.sha256, fetched->pinned);
    loaded.loras.push_back(
        {.path = fetched->copy->path(), .scale = use.scale, .id = use.sha256, .expert = use.expert, .name = use.name});
    loaded.copies.push_back(std::move(fetched->copy));
  }
  co_return Result<void>();
}

asio::awaitable<Result<LoadedAdapters>> AdapterLoader::load(Request request) {
  const auto begun = std::chrono::steady_clock::now();
  telemetry::SpanTimer span("adapter_load", request.context);
  span.attribute("ditfleet.adapters", static_cast<std::int64_t>(request.uses.size()));
  LoadedAdapters result;
  std::vector<AdapterTier> tiers;
  auto done = co_await fetch(request, result, tiers);
  request.model->pin_adapters(pinned_);
  const bool resident =
      std::all_of(tiers.begin(), tiers.end(), [](AdapterTier tier) { return tier == AdapterTier::kSlot; });
  if (done && !resident) {
    using Tiers = std::vector<AdapterTier>;
    const std::function<Result<Tiers>()> work = [model = request.model, loras = result.loras, drops = request.drops,
                                                 tiers]() mutable -> Result<Tiers> {
      // Other units may have loaded some of them since the fetch began.
      const auto held = model->adapters();
      for (std::size_t i = 0; i < loras.size(); ++i) {
        tiers[i] =
            is_repeated(loras, i) ? AdapterTier::kSlot : tier_of(held, loras[i].id, tiers[i] != AdapterTier::kSource);
      }
      auto loaded = model->prefetch(loras, drops);
      if (!loaded) return loaded.error();
      return tiers;
    };
    auto loaded = co_await thread_.run<Tiers>(work, Deadline::never());
    if (loaded) tiers = std::move(*loaded);
    if (!loaded) done = with_adapter_names(loaded.error(), request.uses, result.loras);
  }
  // A failed unit counts the adapters up to the one that failed.
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
      bytes += tiers[i] >= AdapterTier::kDisk ? result.copies[i]->bytes() : 0;
    const double rate = static_cast<double>(bytes) * 1e6 / static_cast<double>(std::max<std::int64_t>(1, took.count()));
    bytes_per_s_ = bytes_per_s_ > 0 ? kSmoothing * bytes_per_s_ + (1 - kSmoothing) * rate : rate;
  }
  co_return result;
}

asio::awaitable<AdapterLoader::Review> AdapterLoader::review_registry(const ModelSet& models) {
  Review review;
  std::vector<std::string> digests;
  for (const auto& [name, model] : models.models) {
    const auto held = model->adapters();
    add_new(held.in_slots, digests);
    add_new(held.in_host, digests);
  }
  const std::function<Result<std::vector<std::string>>()> list = [this]() -> Result<std::vector<std::string>> {
    set_adapter_cache_bytes(copies_.bytes());
    return copies_.digests();
  };
  auto on_disk = co_await thread_.run<std::vector<std::string>>(list, Deadline::never());
  if (on_disk) add_new(*on_disk, digests);
  for (const std::string& sha256 : digests) {
    auto found = co_await options_.source->lookup(sha256, Deadline::after(kCallTimeout));
    review.any_left |= found.ok();
    if (found) note_pin(sha256, found->pinned);
    if (found) continue;
    if (found.error().code != Code::kNotFound) {
      review.complete = false;
      continue;
    }
    spdlog::info("adapters: removing {}, which is no longer registered", sha256.substr(0, 12));
    for (const auto& [name, model] : models.models) co_await forget(*model, sha256);
    copies_.remove(sha256);
    note_pin(sha256, false);
  }
  for (const auto& [name, model] : models.models) model->pin_adapters(pinned_);
  co_return review;
}

asio::awaitable<void> AdapterLoader::watch(const ModelSet& models, std::function<void()> changed) {
  std::int64_t seen = -1;
  bool any = true;  // an earlier process may have left copies
  asio::steady_timer timer(executor_);
  while (true) {
    timer.expires_after(kWatchEvery);
    co_await timer.async_wait(asio::use_awaitable);
    any |= std::any_of(models.models.begin(), models.models.end(), [](const auto& entry) {
      const auto held = entry.second->adapters();
      return !held.in_slots.empty() || !held.in_host.empty();
    });
    if (!any) continue;
    auto version = co_await options_.source->version(Deadline::after(kCallTimeout));
    if (!version || *version == seen) continue;
    const Review review = co_await review_registry(models);
    if (review.complete) {
      seen = *version;
      any = review.any_left;
    }
    changed();
  }
}

void AdapterLoader::describe(const ModelSet& models, queue::WorkerInfo& info) const {
  if (!options_.source) return;
  for (const auto& [name, model] : models.models) {
    const auto held = model->adapters();
    set_adapter_residency(name, held);
    info.adapter_slots = std::max(info.adapter_slots, held.slots);
    info.host_adapter_bytes += held.host_bytes;
    add_new(held.in_slots, info.adapters);
    add_new(held.in_host, info.host_adapters);
    info.adapter_load_bytes_per_s = std::max(info.adapter_load_bytes_per_s, held.load_bytes_per_s);
    info.adapter_swap_us = std::max(info.adapter_swap_us, held.swap_us);
  }
  // The engine measures only the last part of the way.
  if (bytes_per_s_ > 0) info.adapter_load_bytes_per_s = static_cast<std::int64_t>(bytes_per_s_);
}

}  // namespace ditfleet::worker
