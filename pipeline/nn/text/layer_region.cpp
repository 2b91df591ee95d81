#include "pipeline/nn/text/layer_region.h"

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {

std::optional<region::OpCode> activation_op(const std::shared_ptr<region::RegionHost>& host, const std::string& block,
                                            const std::string& name) {
  if (!host || !host->compiler || !host->options.text_encoders) return {};
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return region::OpCode::kGeluTanh;
  if (name == "quick_gelu") return region::OpCode::kQuickGelu;
  if (name == "silu" || name == "swish") return region::OpCode::kSilu;
  if (name == "gelu") return region::OpCode::kGeluErf;
  host->fall_back(block, "unsupported_op", "[" + block + "] no kernel for the activation \"" + name + "\"");
  return {};
}

LayerRegion::LayerRegion(const std::string& name, region::Region::Recipe recipe, const std::vector<Slots>& layers,
                         Placement placement, std::shared_ptr<region::RegionHost> host)
    : region_(std::make_unique<region::Region>(name, std::move(recipe), std::move(host))) {
  const auto names = region_->input_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == "hidden") hidden_ = i;
    if (names[i] == "position_bias") bias_ = i;
  }
  for (const Slots& slots : layers) {
    auto& row = rows_.emplace_back();
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto at = slots.find(names[i]);
      const bool given = i == hidden_ || i == bias_;
      if (at == slots.end() && !given) fail(Code::kInternal, "[" + name + "] no parameter has the name " + names[i]);
      row.push_back(given ? at::Tensor() : at->second);
    }
  }
  region_->prepare(placement.dtype == c10::ScalarType::Float ? region::ElementType::kF32 : region::ElementType::kBF16,
                   placement.device);
}

void LayerRegion::run(std::size_t layer, at::Tensor& hidden, bool mine, const at::Tensor& bias) const {
  std::vector<at::Tensor> inputs = rows_[layer];
  inputs[hidden_] = hidden;
  if (bias_) inputs[*bias_] = bias;
  std::vector<at::Tensor> outputs{mine ? hidden : at::Tensor()};
  region_->run(inputs, outputs);
  hidden = std::move(outputs[0]);
}

}  // namespace ditfleet::pipeline
