// A loaded Wan model: the three stages of a generation.
#pragma once

#include <string>

#include "pipeline/engine/model_base.h"
#include "pipeline/engine/prompt_cache.h"
#include "pipeline/families/wan/folder.h"
#include "pipeline/families/wan/generation.h"
#include "pipeline/families/wan/prompts.h"

namespace ditfleet::pipeline {

class WanModel final : public ModelBase {
 public:
  WanModel(ModelInfo info, Placement placement, WanFolder folder, WanPrompts prompts, AdapterStore::Limits adapters);
  MemoryReport memory() const override { return {}; }  // weights stay on the device; nothing is predicted

 private:
  std::unique_ptr<Generation> run_encode(const GenerationRequest& request) override;
  Result<void> run_denoise(Generation& generation, const StepCallback& on_step,
                           const std::function<void()>& wait) override;
  Media run_decode(Generation& generation) override;
  bool uses_adapters(const Generation&) const override { return false; }
  void clear_adapter_columns() override {}

  WanText embed(const std::string& prompt, int max_sequence_length);

  WanFolder folder_;
  const WanPrompts prompts_;
  PromptCache<WanText> embeddings_;
};

}  // namespace ditfleet::pipeline
