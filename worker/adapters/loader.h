// Loads the adapters of assigned units before the device needs them: into a local file, host memory and a slot.
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
#include "worker/models/model_set.h"

namespace ditfleet::worker {

struct AdapterOptions {
  std::shared_ptr<AdapterSource> source;  // null: this worker rejects units with adapters
  std::string cache_dir;
  std::int64_t cache_bytes = 0;
  std::vector<std::string> folders;  // where registered files may be
};

// Replaces paths of adapter files in the error message by the names of the adapters.
Error with_adapter_names(Error error, const std::vector<job::LoraUse>& uses,
                         const std::vector<pipeline::LoraRequest>& loras);

struct LoadedAdapters {
  std::vector<pipeline::LoraRequest> loras;
  std::vector<AdapterCopyPtr> copies;  // keep them while the unit may read them
};

// Call every function on the io thread. Files are read on separate threads, so units without adapters never wait for
// adapter files.
class AdapterLoader {
 public:
  AdapterLoader(asio::any_io_executor executor, AdapterOptions options);

  bool takes_adapters() const { return options_.source != nullptr; }
  void start();
  void stop();
  bool busy() const { return thread_.busy() || fetcher_.busy(); }  // a thread still reads an adapter

  struct Request {
    pipeline::Model* model = nullptr;
    std::vector<job::LoraUse> uses;
    pipeline::AdapterDrops drops;
    telemetry::SpanContext context;
    std::function<bool()> wanted;  // false: this worker no longer has the unit
  };
  // Errors, with param "loras": those of AdapterFetcher::fetch() and pipeline::Model::prefetch().
  asio::awaitable<Result<LoadedAdapters>> load(Request request);

  // Needs a source. Follows the registry until the coroutine is canceled. Within seconds it removes deleted adapters
  // from disk and models, and updates the models' pinned adapters. Calls `changed` after each change.
  asio::awaitable<void> watch(const ModelSet& models, std::function<void()> changed);

  // Sets the adapter fields of `info` for all models and updates the metrics. Reports the slots of the model with the
  // most slots, not the sum, because a unit uses one model. Does nothing without a source.
  void describe(const ModelSet& models, queue::WorkerInfo& info) const;

 private:
  asio::awaitable<void> forget(pipeline::Model& model,
                               std::string sha256);  // on the adapter thread, because the model may be busy
  asio::awaitable<Result<void>> fetch(const Request& request, LoadedAdapters& loaded, std::vector<AdapterTier>& tiers);
  void note_pin(const std::string& sha256, bool pinned);
  struct Review {
    bool complete = true;   // every look-up succeeded
    bool any_left = false;  // this worker still has adapters
  };
  asio::awaitable<Review> review_registry(const ModelSet& models);

  asio::any_io_executor executor_;
  AdapterOptions options_;
  AdapterCopies copies_;
  AdapterFetcher fetcher_;
  std::set<std::string> pinned_;  // of the adapters looked up so far
  double bytes_per_s_ = 0;        // smoothed rate from disk or source into host memory; 0: not measured yet
  NamedThread thread_{"adapters"};
};

}  // namespace ditfleet::worker
