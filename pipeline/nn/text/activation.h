// The activation functions of text encoders. Each runs the same operators as in transformers, so that bf16 is rounded
// in the same places.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace ditfleet::pipeline {

using Activation = at::Tensor (*)(const at::Tensor&);

// Finds the function by its name in a configuration. Null for an unknown name; known_activations() lists all names.
Activation find_activation(const std::string& name);
std::string known_activations();

}  // namespace ditfleet::pipeline
