#include "pipeline/models/flux/transformer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>

#include "pipeline/models/flux/blocks.h"

namespace ditfleet::pipeline {

FluxTransformer FluxTransformer::load(const std::string& dir, Placement placement) {
  FluxTransformer m;
  m.config_ = read_flux_config(ConfigFile(dir + "/config.json"));
  auto parameters = Parameters::open(dir, placement);
  m.slots_ = bind_flux_slots(m.config_, parameters);
  m.bytes_ = parameters.bytes();
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
  at::Tensor image = at::linear(latents, slots_.image_in.weight, slots_.image_in.bias);
  at::Tensor text = text_tokens;
  for (std::size_t i = 0; i < slots_.double_blocks.size(); ++i)
    double_block(image, text, slots_.double_blocks[i], modulation.double_blocks[i], rope, geometry);
  if (!slots_.single_blocks.empty()) {
    at::Tensor tokens = at::cat({text, image}, 1);
    for (std::size_t i = 0; i < slots_.single_blocks.size(); ++i)
      single_block(tokens, slots_.single_blocks[i], modulation.single_blocks[i], rope, geometry);
    image = tokens.slice(1, text.size(1));
  }
  return at::linear(modulated_norm(image, modulation.final), slots_.image_out.weight, slots_.image_out.bias);
}

}  // namespace ditfleet::pipeline
