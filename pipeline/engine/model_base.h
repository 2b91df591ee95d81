// The base class of all models: converts exceptions to errors, sets up stages, and manages adapters.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "pipeline/api/model.h"
#include "pipeline/device/device.h"
#include "pipeline/lora/adapter.h"
#include "pipeline/parallel/sequence.h"

namespace ditfleet::pipeline {

// A family derives from this class and implements the stages. They run in a StageScope and throw Failure or what
// LibTorch throws.
class ModelBase : public Model {
 public:
  const ModelInfo& info() const final { return info_; }
  Result<std::unique_ptr<Generation>> encode(const GenerationRequest& request) final;
  Result<void> denoise(Generation& generation, const StepCallback& on_step) final;
  Result<Media> decode(Generation& generation, const FrameCallback& on_frames) final;
  Result<void> prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops) final;
  void pin_adapters(const std::set<std::string>& ids) final { adapters_.pin(ids); }
  void forget_adapter(const std::string& id) final;
  AdapterHoldings adapters() const final { return adapters_.holdings(); }

 protected:
  // `team`: the ranks that denoise each request together.
  ModelBase(ModelInfo info, Placement placement, LoraBase linears, AdapterStore::Limits adapters,
            parallel::Team team = {})
      : info_(std::move(info)),
        placement_(placement),
        adapters_(std::move(linears), placement, adapters),
        team_(std::move(team)) {}

  virtual std::unique_ptr<Generation> run_encode(const GenerationRequest& request) = 0;
  // `wait` waits for the device.
  virtual Result<void> run_denoise(Generation& generation, const StepCallback& on_step,
                                   const std::function<void()>& wait) = 0;
  virtual Media run_decode(Generation& generation, const FrameCallback& on_frames) = 0;
  // Whether denoising uses the adapter columns, which all requests share. Such requests are denoised one at a time.
  virtual bool uses_adapters(const Generation& generation) const = 0;
  // Overwrites the adapters' columns beside the weights. Called while no request with adapters is denoised.
  virtual void clear_adapter_columns() = 0;

  Placement placement() const { return placement_; }
  AdapterStore& adapter_store() { return adapters_; }

 private:
  // `lap_us`: set to StageScope::lap_us() at the end, unless it is null.
  template <class Run>
  auto stage(const char* name, Run run, std::int64_t* lap_us = nullptr)
      -> Result<decltype(run(std::declval<StageScope&>()))>;
  void clear_if_asked();

  const ModelInfo info_;
  const Placement placement_;
  AdapterStore adapters_;
  const parallel::Team team_;
  std::mutex adapted_;                  // held while a request with adapters is denoised
  std::atomic<bool> clearing_ = false;  // the columns are to be cleared as soon as `adapted_` is free
};

}  // namespace ditfleet::pipeline
