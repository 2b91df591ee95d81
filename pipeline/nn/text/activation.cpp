#include "pipeline/nn/text/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>

#include <cmath>
#include <utility>

namespace ditfleet::pipeline {
namespace {

// "gelu_new": written out in transformers (NewGELUActivation), not the fused tanh GELU.
at::Tensor gelu_new(const at::Tensor& x) {
  const double k = std::sqrt(2.0 / M_PI);
  return 0.5 * x * (1.0 + at::tanh(k * (x + 0.044715 * at::pow(x, 3.0))));
}

at::Tensor gelu_fast(const at::Tensor& x) {
  return 0.5 * x * (1.0 + at::tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)));
}

at::Tensor quick_gelu(const at::Tensor& x) { return x * at::sigmoid(1.702 * x); }
at::Tensor gelu(const at::Tensor& x) { return at::gelu(x); }
at::Tensor gelu_tanh(const at::Tensor& x) { return at::gelu(x, "tanh"); }
at::Tensor relu(const at::Tensor& x) { return at::relu(x); }
at::Tensor relu_squared(const at::Tensor& x) {
  const at::Tensor r = at::relu(x);
  return r * r;
}
at::Tensor silu(const at::Tensor& x) { return at::silu(x); }
at::Tensor mish(const at::Tensor& x) { return at::mish(x); }
at::Tensor tanh(const at::Tensor& x) { return at::tanh(x); }
at::Tensor sigmoid(const at::Tensor& x) { return at::sigmoid(x); }
at::Tensor linear(const at::Tensor& x) { return x; }

constexpr std::pair<const char*, Activation> kActivations[] = {
    {"gelu", gelu},
    {"gelu_fast", gelu_fast},
    {"gelu_new", gelu_new},
    {"gelu_pytorch_tanh", gelu_tanh},
    {"linear", linear},
    {"mish", mish},
    {"quick_gelu", quick_gelu},
    {"relu", relu},
    {"relu2", relu_squared},
    {"sigmoid", sigmoid},
    {"silu", silu},
    {"swish", silu},
    {"tanh", tanh},
};

}  // namespace

at::Tensor qwen_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return weight * at::rms_norm(x, {x.size(-1)}, /*weight=*/{}, eps);
}

Activation find_activation(const std::string& name) {
  for (const auto& [known, function] : kActivations)
    if (name == known) return function;
  return nullptr;
}

std::string known_activations() {
  std::string list;
  for (const auto& [known, function] : kActivations) list += (list.empty() ? "" : ", ") + std::string(known);
  return list;
}

Activation read_activation(const ConfigFile& file, const std::string& key, const std::string& fallback) {
  const std::string name = file.text(key, fallback);
  const Activation found = find_activation(name);
  if (!found) file.refuse(key + " is \"" + name + "\"; it must be one of " + known_activations());
  return found;
}

}  // namespace ditfleet::pipeline
