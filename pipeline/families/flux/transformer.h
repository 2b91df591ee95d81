// The FLUX transformer: packed latents and text in, velocity out.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/families/flux/modulation.h"
#include "pipeline/nn/transformer/transformer.h"

namespace ditfleet::region {
class Graphs;
}

namespace ditfleet::pipeline {

class FluxTransformer : public Transformer {
 public:
  // Reads config.json and the weights, which may have BFL's names, and compiles the blocks if the backend of
  // source.regions is not eager. Throws what ConfigFile, Parameters and Region throw.
  static FluxTransformer load(const TransformerSource& source, Placement placement);
  // The programs of the blocks, without and with adapters, that load() compiles. Reads configuration and headers.
  // `fp8_products`: see Parameters::set_fp8_products. Throws what load() throws.
  static std::vector<region::Program> programs(const TransformerSource& source, Placement placement, bool fp8_products);
  // Uses weights that are already loaded, which have flux_spec().
  FluxTransformer(FluxConfig config, TransformerWeights weights, Placement placement,
                  std::shared_ptr<region::RegionHost> regions);

  // A copy with these weights, which are this transformer's with terms of adapters added. If the columns of compiled
  // blocks are too few, the blocks run eagerly. Throws what RegionHost::fall_back throws.
  FluxTransformer adapted(TransformerWeights weights) const;

  const FluxConfig& config() const { return config_; }
  // Time in load() until the programs were available.
  std::chrono::microseconds compile_time() const { return compile_time_; }

  // Prepares velocity() for a new size in the background (the plan of attention). Does not block. Thread-safe.
  void prewarm(std::int64_t text_tokens, std::int64_t image_tokens) const;

  // The modulation for `timesteps` ([n] fp32, on the device). See ModulationTable.
  ModulationTable modulation(const at::Tensor& timesteps, double guidance, const at::Tensor& pooled) const;
  // Converts text tokens [1, S_text, joint_attention_dim] to the blocks' input [1, S_text, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // `latents`: [batch, S_image, in_channels]. `text`: from embed_text(). `rope`: from rope_table(). Returns [batch,
  // S_image, in_channels]. `team`: the ranks that share the forward; each gets the whole result. Thread-safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, const parallel::Team& team = {}) const;

 private:
  FluxTransformer(FluxConfig config, Placement placement)
      : Transformer(flux_spec(config), placement), config_(config) {}
  void compile(const std::shared_ptr<region::RegionHost>& regions);
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const StepModulation& modulation,
                      const at::Tensor& rope, region::Mode mode, const parallel::Team& team) const;
  void open_libraries(const region::RegionHost& host) const;

  FluxConfig config_{};
  std::shared_ptr<region::Graphs> graphs_;  // null: not available on this device or in this build
  std::chrono::microseconds compile_time_{0};
};

}  // namespace ditfleet::pipeline
