// What a model needs of the device's memory, and how it is loaded into what there is.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "pipeline/engine/family.h"

namespace ditfleet::pipeline {

// Reads the settings of a request (read_settings()) and completes them (Network::complete()).
Settings settings_of(const Network& network, const GenerationRequest& request);
RequestSize size_of(const Network& network, const Settings& settings, int gpus);
// The same for a request of a model that these ranks denoise together.
RequestSize size_of(const Network& network, GenerationRequest request, const parallel::Team& team);

// Loads a folder on tensors without memory. Reads configuration and headers; compiles nothing. Thread-safe.
class Needs {
 public:
  // Throws what load_network() throws.
  Needs(const Family& family, const LoadContext& context);

  // Throws Failure (kInvalidArgument).
  RequestSize size_of(const GenerationRequest& request) const { return pipeline::size_of(*network_, request, team_); }
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

// Resolves quantize auto to the most precise format that keeps all blocks resident for a typical request. Else to fp8,
// if half of its blocks stay: the others are copied while those compute, and NF4 computes longer. Else to the most
// precise format that keeps all blocks resident for a small request; else for the smallest; else to the first format
// that fits. The formats: as stored; fp8, if the device has fp8 products; NF4. The last two put the last text encoder
// in NF4. Throws what Needs() throws.
Fit fit(const Family& family, LoadContext context, bool always);

// The placement for loading: host memory, unless all weights stay on the device for a typical request. Throws Failure
// (kOutOfMemory) if the smallest request does not fit.
Placement fitted_placement(const Family& family, const LoadContext& context, const Fit& fit);

}  // namespace ditfleet::pipeline
