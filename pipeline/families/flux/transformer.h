// The FLUX transformer: packed latents and text in, velocity out.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/families/flux/modulation.h"
#include "pipeline/nn/transformer/block_cache.h"
#include "pipeline/nn/transformer/transformer.h"

namespace ditfleet::region {
class Graphs;
}

namespace ditfleet::pipeline {

class FluxTransformer : public Transformer {
 public:
  // Reads config.json and the weights, which may have BFL's names. Throws what ConfigFile and Parameters throw.
  static FluxTransformer load(const TransformerSource& source, Placement placement);
  // Uses weights that are already loaded, which have flux_spec(), and compiles the blocks. For benches.
  FluxTransformer(FluxConfig config, TransformerWeights weights, Placement placement,
                  const std::shared_ptr<region::RegionHost>& regions, bool f8_attention = false);

  const FluxConfig& config() const { return config_; }

  // Prepares velocity() for a new size in the background (the plan of attention). Does not block. Thread-safe.
  void prewarm(std::int64_t text_tokens, std::int64_t image_tokens) const;

  // The modulation for `timesteps` ([n] fp32, on the device). See ModulationTable.
  ModulationTable modulation(const at::Tensor& timesteps, double guidance, const at::Tensor& pooled) const;
  // Converts text tokens [1, S_text, joint_attention_dim] to the blocks' input [1, S_text, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // `latents`: [batch, S_image, in_channels]. `text`: from embed_text(). `rope`: from rope_table(). Returns [batch,
  // S_image, in_channels]. `team`: the ranks that share the forward; each gets the whole result. `cache`: may skip all
  // blocks but the first; null: none is skipped. Thread-safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, const parallel::Team& team = {}, BlockCache* cache = nullptr) const;

 private:
  FluxTransformer(FluxConfig config, Placement placement)
      : Transformer(flux_spec(config), placement), config_(config) {}
  void compiled_blocks() override;
  void open_libraries(const region::RegionHost& host) const override;
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, region::Mode mode, const parallel::Team& team, BlockCache* cache) const;

  FluxConfig config_{};
  std::shared_ptr<region::Graphs> graphs_;  // null: not available on this device or in this build
};

}  // namespace ditfleet::pipeline
