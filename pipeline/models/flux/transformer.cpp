#include "pipeline/models/flux/transformer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include <chrono>

#include "pipeline/models/flux/blocks.h"
#include "pipeline/models/flux/regions.h"

namespace ditfleet::pipeline {

FluxTransformer FluxTransformer::load(const std::string& dir, Placement placement, std::shared_ptr<region::RegionHost> regions) {
  FluxTransformer m;
  m.config_ = read_flux_config(ConfigFile(dir + "/config.json"));
  auto parameters = Parameters::open(dir, placement);
  m.slots_ = bind_flux_slots(m.config_, parameters);
  m.bytes_ = parameters.bytes();
  if (regions && regions->compiler && regions->options.transformer) {
    const auto begun = std::chrono::steady_clock::now();
    m.regions_ = std::make_shared<const FluxRegions>(m.config_, m.slots_, placement, std::move(regions));
    m.compile_us_ = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begun).count();
  }
  return m;
}

ModulationTable FluxTransformer::modulation(const at::Tensor& timesteps, double guidance, const at::Tensor& pooled) const {
  return ModulationTable(config_, slots_, timesteps, guidance, pooled);
}

at::Tensor FluxTransformer::embed_text(const at::Tensor& prompt_embeds) const {
  return at::linear(prompt_embeds, slots_.text_in.weight, slots_.text_in.bias);
}

at::Tensor FluxTransformer::velocity(const at::Tensor& latents, const at::Tensor& text_tokens,
                                     const StepModulation& modulation, const at::Tensor& rope) const {
  const BlockGeometry geometry{config_.heads, config_.head_dim};
  // Images have one frame.
  const FluxRegions* regions = regions_ && regions_->compiled_for(latents.size(1), 1) ? regions_.get() : nullptr;
  const at::Tensor rope_rows = regions ? FluxRegions::rope_rows(rope) : at::Tensor();
  at::Tensor image = at::linear(latents, slots_.image_in.weight, slots_.image_in.bias);
  at::Tensor text = text_tokens;
  for (std::size_t i = 0; i < slots_.double_blocks.size(); ++i) {
    // The first block's text is the caller's, who needs it for the next step.
    if (regions) regions->double_block(i, image, text, i > 0, modulation.double_blocks[i], rope_rows);
    else double_block(image, text, slots_.double_blocks[i], modulation.double_blocks[i], rope, geometry);
  }
  if (!slots_.single_blocks.empty()) {
    at::Tensor tokens = at::cat({text, image}, 1);
    for (std::size_t i = 0; i < slots_.single_blocks.size(); ++i) {
      if (regions) regions->single_block(i, tokens, modulation.single_blocks[i], rope_rows);
      else single_block(tokens, slots_.single_blocks[i], modulation.single_blocks[i], rope, geometry);
    }
    image = tokens.slice(1, text.size(1));
  }
  return at::linear(modulated_norm(image, modulation.final), slots_.image_out.weight, slots_.image_out.bias);
}

}  // namespace ditfleet::pipeline
