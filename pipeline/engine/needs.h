// What a model needs of the device's memory, and how it is loaded into what there is.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "pipeline/engine/family.h"

namespace ditfleet::pipeline {

// A folder on tensors without memory. It reads configuration and headers, and compiles nothing. Thread-safe.
class Needs {
 public:
  // Throws what load_network() throws.
  Needs(const Family& family, const LoadContext& context);

  // Throws Failure (kInvalidArgument).
  RequestSize size_of(const GenerationRequest& request) const;
  RequestSize smallest() const;
  RequestSize size_of(const Family::Extent& extent) const;
  // Runs the model's stages for a new size, which takes some 10 ms, and remembers the result.
  MemoryNeeds of(const RequestSize& size);
  const job::ModelEntry& entry() const { return network_->entry; }

 private:
  Settings example(int width, int height, int frames) const;
  MemoryNeeds measure(const RequestSize& size) const;

  MemoryNeeds weights_;  // without the bytes of a request
  const std::unique_ptr<Network> network_;
  const parallel::Team team_;
  std::mutex mutex_;
  std::map<RequestSize, MemoryNeeds> known_;
};

// How a model is loaded.
struct Fit {
  ModelSource source;            // with `quantize` resolved
  std::shared_ptr<Needs> needs;  // null if nothing limits the device's memory, unless `always`
};

// With quantize auto, picks the most precise format (as stored, fp8 where the device multiplies in it, NF4; with the
// last two the last text encoder is in NF4) that keeps all blocks resident for a typical request; otherwise for a small
// one; otherwise for the smallest; otherwise the first that fits at all. Throws what Needs() throws.
Fit fit(const Family& family, LoadContext context, bool always);

// Where the weights are loaded to: host memory if a typical request does not leave them all on the device. Throws
// Failure (kOutOfMemory) if the smallest request does not fit.
Placement fitted_placement(const Family& family, const LoadContext& context, const Fit& fit);

// Settings as read_settings() and Network::complete() make them, and what their memory depends on.
Settings settings_of(const Network& network, const GenerationRequest& request);
RequestSize size_of(const Network& network, const Settings& settings, int gpus);

}  // namespace ditfleet::pipeline
