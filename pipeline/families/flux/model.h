// A loaded FLUX folder: the three stages of a generation.
#pragma once

#include <map>
#include <mutex>
#include <optional>

#include "pipeline/engine/model_base.h"
#include "pipeline/engine/prompt_cache.h"
#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/generation.h"
#include "pipeline/families/flux/memory.h"
#include "pipeline/families/flux/prompts.h"

namespace ditfleet::pipeline {

class FluxModel final : public ModelBase {
 public:
  FluxModel(ModelInfo info, Placement placement, FluxFolder folder, Prompts prompts, AdapterStore::Limits adapters,
            MemoryOptions memory);

 private:
  std::unique_ptr<Generation> run_encode(const GenerationRequest& request) override;
  Result<void> run_denoise(Generation& generation, const StepCallback& on_step,
                           const std::function<void()>& wait) override;
  Media run_decode(Generation& generation) override;
  bool uses_adapters(const Generation& generation) const override;
  void clear_adapter_columns() override { folder_.transformer.clear_adapters(); }

  // Runs a stage for a request of this size. If it runs out of memory, moves the model's weights to the next plan and
  // runs it again. Throws Failure (kOutOfMemory) if no plan is left; the message contains the bytes.
  template <class Run>
  auto in_memory(const FluxSize& size, const Run& run);
  // Applies the plan for this size. Throws as above.
  void place(const FluxSize& size);
  void withhold(const FluxSize& size, const MemoryPlan& plan);
  FluxSize size_of(const FluxRequest& request) const;

  TextEmbedding embed(const std::string& prompt, int max_sequence_length, const AdaptedModels* adapted);
  Schedule schedule_of(const FluxGeneration& generation) const;
  void condition(FluxGeneration& generation) const;

  const MemoryOptions memory_;
  std::mutex planning_;
  std::optional<MemoryPlan> plan_;             // that is applied
  std::map<FluxSize, double> step_s_;          // that the blocks compute in a step, without waiting for copies
  std::map<FluxSize, std::int64_t> withheld_;  // bytes that plans for a size turned out to need beyond the prediction
  FluxFolder folder_;
  const Prompts prompts_;
  PromptCache<TextEmbedding> embeddings_;
};

}  // namespace ditfleet::pipeline
