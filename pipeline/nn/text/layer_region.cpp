#include "pipeline/nn/text/layer_region.h"

namespace ditfleet::pipeline {

std::optional<region::OpCode> activation_op(const std::shared_ptr<region::RegionHost>& host, const std::string& block,
                                            const std::string& name, const Parameters& parameters) {
  if (!host || !host->compiler || !host->options.text_encoders) return {};
  if (parameters.computes_in_other_type()) {
    host->fall_back(block, "unsupported_op", "[" + block + "] NF4 weights compute in another type than the layer");
    return {};
  }
  if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return region::OpCode::kGeluTanh;
  if (name == "quick_gelu") return region::OpCode::kQuickGelu;
  if (name == "silu" || name == "swish") return region::OpCode::kSilu;
  if (name == "gelu") return region::OpCode::kGeluErf;
  host->fall_back(block, "unsupported_op", "[" + block + "] no kernel for the activation \"" + name + "\"");
  return {};
}

LayerRegion::LayerRegion(const std::string& name, Make make, const region::TextLayerShape& shape,
                         const std::vector<Weights>& layers, Placement placement,
                         std::shared_ptr<region::RegionHost> host) {
  const auto recipe = [make, shape](region::ElementType type) {
    region::TextLayerShape typed = shape;
    typed.type = type;
    return make(typed);
  };
  region_ = std::make_unique<region::Region>(name, recipe, std::move(host));
  const auto names = region_->input_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == "hidden") hidden_ = i;
    if (names[i] == "position_bias") bias_ = i;
  }
  weights_ = BlockWeights(
      names, layers, [](const std::string& one) { return one == "hidden" || one == "position_bias"; },
      std::make_shared<WeightMemory>());
  region_->prepare(placement.dtype == c10::ScalarType::Float ? region::ElementType::kF32 : region::ElementType::kBF16,
                   placement.device);
}

void LayerRegion::run(std::size_t layer, at::Tensor& hidden, bool mine, const at::Tensor& bias) const {
  std::vector<at::Tensor> inputs = weights_.take(layer);
  inputs[hidden_] = hidden;
  if (bias_) inputs[*bias_] = bias;
  std::vector<at::Tensor> outputs{mine ? hidden : at::Tensor()};
  region_->run(inputs, outputs);
  hidden = std::move(outputs[0]);
}

}  // namespace ditfleet::pipeline
