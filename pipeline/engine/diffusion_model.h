// The model of all families: runs the stages of a generation on a family's networks, converts exceptions to errors, and
// manages adapters and memory.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "pipeline/engine/adapt.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/needs.h"
#include "pipeline/engine/prompt_cache.h"

namespace ditfleet::pipeline {

class DiffusionGeneration;

class DiffusionModel final : public Model {
 public:
  // Loads the folder's networks, tokenizers and programs. Throws Failure and what LibTorch throws.
  static std::unique_ptr<Model> load(const Family& family, const LoadContext& context);
  // How a request would run, before the model is loaded. Reads only configuration files and headers. Throws as load().
  static PlanReport plan(const Family& family, const LoadContext& context, const GenerationRequest& request);

  const ModelInfo& info() const override { return info_; }
  MemoryReport memory() const override { return memory_.report(); }
  Result<RequestSize> size_of(const GenerationRequest& request) const override;
  Result<std::unique_ptr<Generation>> encode(const GenerationRequest& request) override;
  Result<void> denoise(Generation& generation, const StepCallback& on_step) override;
  Result<Media> decode(Generation& generation, const FrameCallback& on_frames) override;
  Result<void> prefetch(const std::vector<LoraRequest>& loras, const AdapterDrops& drops) override;
  void pin_adapters(const std::set<std::string>& ids) override { adapters_.pin(ids); }
  void forget_adapter(const std::string& id) override;
  AdapterHoldings adapters() const override { return adapters_.holdings(); }

 private:
  DiffusionModel(const Family& family, const LoadContext& context, const Fit& fit, ModelInfo info,
                 std::unique_ptr<Network> network, std::unique_ptr<Tokenizers> tokenizers);

  // Runs a stage in a StageScope.
  template <class Run>
  auto stage(const char* name, Run run) -> Result<decltype(run(std::declval<StageScope&>()))>;
  std::unique_ptr<Generation> run_encode(StageScope& scope, const GenerationRequest& request);
  Result<at::Tensor> run_steps(DiffusionGeneration& generation, const StepCallback& on_step,
                               const std::function<void()>& wait);
  Media run_decode(StageScope& scope, DiffusionGeneration& generation, const FrameCallback& on_frames);

  EncodedPrompt embed(const Network& network, const std::string& prompt, const Settings& settings,
                      const std::string& text_key);
  // Throws the error of a request whose numbers overflow. Looks for a weight that is not finite once.
  [[noreturn]] void not_finite(const DiffusionGeneration& generation, const std::string& what);
  ModelMemory::Source memory_source(std::shared_ptr<Needs> needs);
  void clear_if_asked();

  const Family& family_;
  const ModelSource source_;
  const ModelInfo info_;
  const std::unique_ptr<Network> network_;
  const std::unique_ptr<Tokenizers> tokenizers_;
  const parallel::Team team_;  // the ranks that denoise each request together
  PromptCache<EncodedPrompt> prompts_;
  AdapterStore adapters_;
  PartSequence none_;  // empty
  ModelMemory memory_;
  std::optional<std::string> bad_weight_;  // as not_finite_weight()
  // Held while a request with adapters is denoised: all requests share the columns beside the weights.
  std::mutex adapted_;
  std::atomic<bool> clearing_ = false;  // the columns are to be cleared as soon as `adapted_` is free
};

}  // namespace ditfleet::pipeline
