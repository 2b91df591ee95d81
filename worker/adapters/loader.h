// Brings the adapters of assigned units to where their models will want them, ahead of the device: file, host memory,
// slot.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "pipeline/engine.h"
#include "shared/job/spec.h"
#include "shared/queue/types.h"
#include "shared/telemetry/spans.h"
#include "worker/adapters/copies.h"
#include "worker/adapters/fetcher.h"
#include "worker/adapters/metrics.h"
#include "worker/adapters/source.h"
#include "worker/model_set.h"

namespace ditfleet::worker {

struct AdapterOptions {
  std::shared_ptr<AdapterSource> source;  // null: this worker takes no units with adapters
  std::string cache_dir;
  std::int64_t cache_bytes = 0;
  std::vector<std::string> folders;  // that registered files may lie in
};

// An engine's error with the names of adapters where it has their files' paths.
Error with_names(Error error, const std::vector<job::LoraUse>& uses, const std::vector<pipeline::LoraRequest>& loras);

struct BroughtAdapters {
  std::vector<pipeline::LoraRequest> loras;
  std::vector<AdapterCopyPtr> copies;  // to be held while the unit may read them
};

// The io thread's. Files are read on threads of its own, so that units without adapters wait for nothing.
class AdapterLoader {
 public:
  AdapterLoader(asio::any_io_executor executor, AdapterOptions options);

  bool takes_adapters() const { return options_.source != nullptr; }
  void start();
  void stop();

  struct Wish {
    pipeline::Model* model = nullptr;
    std::vector<job::LoraUse> uses;
    pipeline::AdapterDrops drops;
    telemetry::SpanContext context;
    std::function<bool()> wanted;  // false: the unit is not this worker's any more
  };
  // Errors (param "loras"): those of AdapterFetcher::fetch and pipeline::Model::prefetch.
  asio::awaitable<Result<BroughtAdapters>> bring(Wish wish);

  // Forgets what is deleted from the registry, wherever it is, and tells the models what is pinned, within seconds.
  // Until it is canceled.
  asio::awaitable<void> watch(const ModelSet& models, std::function<void()> changed);

  // What this worker tells of its adapters, over all its models; also as metrics. Of slots one model's, not their sum:
  // no unit may need more. Nothing where it takes none.
  void describe(const ModelSet& models, queue::WorkerInfo& info) const;

 private:
  asio::awaitable<void> forget(pipeline::Model& model, std::string sha256);  // off the io thread: the model may be busy
  asio::awaitable<Result<void>> fetch(const Wish& wish, BroughtAdapters& brought, std::vector<AdapterTier>& tiers);
  void note_pin(const std::string& sha256, bool pinned);
  struct Review {
    bool complete = true;  // all was looked up
    bool left = false;     // something is held on
  };
  asio::awaitable<Review> forget_deleted(const ModelSet& models);

  asio::any_io_executor executor_;
  AdapterOptions options_;
  AdapterCopies copies_;
  AdapterFetcher fetcher_;
  std::set<std::string> pinned_;  // of what was looked up, as the registry had it last
  double bytes_per_s_ = 0;        // from disk or source to host memory, smoothed; 0: not yet
  NamedThread thread_{"adapters"};
};

}  // namespace ditfleet::worker
