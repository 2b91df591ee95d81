// `quantize` of a model's source: the format of each component.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pipeline/api/model.h"

namespace ditfleet::pipeline {

// The components that a family quantizes while it loads them, with their formats.
using QuantizeFormats = std::vector<std::pair<std::string, std::vector<std::string>>>;

// Throws Failure (kInvalidArgument) if `source.quantize` has another component or format.
void check_quantize(const ModelSource& source, const QuantizeFormats& formats);

// The format of the component; empty if it is loaded as it is stored.
std::string quantize_of(const ModelSource& source, const std::string& component);

}  // namespace ditfleet::pipeline
