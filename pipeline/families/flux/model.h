// A loaded FLUX folder: the three stages of a generation.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "pipeline/engine/model_base.h"
#include "pipeline/engine/prompt_cache.h"
#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/generation.h"
#include "pipeline/families/flux/memory.h"
#include "pipeline/families/flux/prompts.h"

namespace ditfleet::pipeline {

class FluxModel final : public ModelBase {
 public:
  // `needs`: null if nothing limits the device's memory.
  FluxModel(ModelInfo info, Placement placement, FluxFolder folder, Prompts prompts, AdapterStore::Limits adapters,
            std::shared_ptr<DeviceMemory> memory, std::shared_ptr<FluxNeeds> needs);
  MemoryReport memory() const override { return memory_.report(); }

 private:
  std::unique_ptr<Generation> run_encode(const GenerationRequest& request) override;
  Result<void> run_denoise(Generation& generation, const StepCallback& on_step,
                           const std::function<void()>& wait) override;
  Media run_decode(Generation& generation, const FrameCallback& on_frames) override;
  bool uses_adapters(const Generation& generation) const override;
  void clear_adapter_columns() override { folder_.transformer.clear_adapters(); }

  // The model's numbers overflow for this request. Looks for the weight once.
  [[noreturn]] void not_finite(const FluxRequest& request, const std::string& what);
  RequestSize size_of(const FluxRequest& request) const;

  TextEmbedding embed(const std::string& prompt, int max_sequence_length, const AdaptedModels* adapted);
  Schedule schedule_of(const FluxGeneration& generation) const;
  void condition(FluxGeneration& generation) const;

  FluxFolder folder_;
  const Prompts prompts_;
  PromptCache<TextEmbedding> embeddings_;
  ModelMemory memory_;
  std::optional<std::string> bad_weight_;  // as not_finite_weight()
};

}  // namespace ditfleet::pipeline
