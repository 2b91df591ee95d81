// The activation functions that text encoders' configurations name, op by op as transformers computes them, so
// that bf16 rounds in the same places.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace ditfleet::pipeline {

using Activation = at::Tensor (*)(const at::Tensor&);

// Null for a name that is not known; known_activations() lists the others.
Activation find_activation(const std::string& name);
std::string known_activations();

}  // namespace ditfleet::pipeline
