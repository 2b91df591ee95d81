// A loaded Wan model: the three stages of a generation.
#pragma once

#include <memory>
#include <string>

#include "pipeline/engine/model_base.h"
#include "pipeline/engine/prompt_cache.h"
#include "pipeline/families/wan/folder.h"
#include "pipeline/families/wan/generation.h"
#include "pipeline/families/wan/memory.h"
#include "pipeline/families/wan/prompts.h"

namespace ditfleet::pipeline {

class WanModel final : public ModelBase {
 public:
  // `needs`: null if nothing limits the device's memory.
  WanModel(ModelInfo info, Placement placement, WanFolder folder, WanPrompts prompts, AdapterStore::Limits adapters,
           std::shared_ptr<DeviceMemory> memory, std::shared_ptr<WanNeeds> needs);
  MemoryReport memory() const override { return memory_.report(); }

 private:
  std::unique_ptr<Generation> run_encode(const GenerationRequest& request) override;
  Result<void> run_denoise(Generation& generation, const StepCallback& on_step,
                           const std::function<void()>& wait) override;
  Media run_decode(Generation& generation, const FrameCallback& on_frames) override;
  bool uses_adapters(const Generation& generation) const override;
  void clear_adapter_columns() override;

  RequestSize size_of(const WanRequest& request) const;
  Media decode_frames(const WanGeneration& generation, const FrameCallback& on_frames) const;
  WanText embed(const std::string& prompt, int max_sequence_length);

  WanFolder folder_;
  const WanPrompts prompts_;
  PromptCache<WanText> embeddings_;
  PartSequence no_modulation_;  // empty
  ModelMemory memory_;
};

}  // namespace ditfleet::pipeline
