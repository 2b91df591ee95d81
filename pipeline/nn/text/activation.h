// The activation functions and the norm of text encoders. Each runs the same operators as in transformers, so that bf16
// is rounded in the same places.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "pipeline/nn/config_file.h"

namespace ditfleet::pipeline {

using Activation = at::Tensor (*)(const at::Tensor&);

// Finds the function by its name in a configuration. Null for an unknown name; known_activations() lists all names.
Activation find_activation(const std::string& name);
std::string known_activations();
// The function that a field names. Throws Failure (kDataCorrupt) for an unknown name.
Activation read_activation(const ConfigFile& file, const std::string& key, const std::string& fallback);

// Qwen's norm: x / RMS(x) over the last dimension, rounded to x's type before the weight.
at::Tensor qwen_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

}  // namespace ditfleet::pipeline
