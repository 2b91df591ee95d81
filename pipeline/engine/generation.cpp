#include "pipeline/engine/generation.h"

#include <ATen/ops/from_blob.h>

#include "pipeline/device/failure.h"
#include "pipeline/nn/tensor_entries.h"

namespace ditfleet::pipeline {
namespace {

at::Tensor tensor_of(const std::vector<float>& values) {
  return at::from_blob(const_cast<float*>(values.data()), {static_cast<std::int64_t>(values.size())}).clone();
}

at::Tensor tensor_of(const std::vector<std::int32_t>& ids) {
  return at::from_blob(const_cast<std::int32_t*>(ids.data()), {1, static_cast<std::int64_t>(ids.size())},
                       at::TensorOptions().dtype(c10::ScalarType::Int))
      .to(c10::ScalarType::Long);
}

}  // namespace

Result<void> DiffusionGeneration::dump(const std::string& path) const {
  return result_of("dump", [&] {
    std::map<std::string, at::Tensor> tensors{{"noise", conditions.noise},
                                              {"sigmas", tensor_of(schedule.sigmas)},
                                              {"timesteps", tensor_of(schedule.timesteps)},
                                              {"condition", conditions.image},
                                              {"image_embeds", conditions.image_embeds},
                                              {"latents", latents},
                                              {"image", image}};
    const auto add = [&](const std::string& prefix, const EncodedPrompt& prompt) {
      for (const auto& [name, ids] : prompt.ids.ids) tensors[prefix + name] = tensor_of(ids);
      for (const auto& [name, tensor] : prompt.tensors) tensors[prefix + name] = tensor;
    };
    add("", conditions.prompt);
    if (conditions.negative) add("negative_", *conditions.negative);
    std::erase_if(tensors, [](const auto& one) { return !one.second.defined(); });
    for (auto& [name, tensor] : tensors) tensor = tensor.to(c10::DeviceType::CPU).contiguous();
    unwrap(write_safetensors(path, entries_of(tensors),
                             {{"noise", "as drawn, before it is packed"},
                              {"latents", "diffusers' output_type=\"latent\""},
                              {"image", "decoded, in 0…1: [1, 3, height, width]"}}));
  });
}

}  // namespace ditfleet::pipeline
