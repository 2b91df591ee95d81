// Random inputs for a region's program, for tests and benches.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region::testing {

struct InputStyle {
  bool strided = false;   // activations and weights are parts of larger tensors, tables broadcast over the batch
  bool outliers = false;  // a few channels of the activations are ×100
  c10::Device device =
      c10::Device(c10::DeviceType::CPU);  // where they are drawn: the same seed draws other numbers on another
};

// One tensor for each of Program::inputs(), drawn from `seed`, of the program's element types. Weights are
// scaled so that activations keep their size, norm weights and scales lie around 1, rope tables hold cosines and sines.
std::vector<at::Tensor> random_inputs(const Program& program, const Sizes& sizes, std::uint64_t seed,
                                      InputStyle style = {});

// The same in another element type.
std::vector<at::Tensor> converted(const std::vector<at::Tensor>& inputs, c10::ScalarType type);

// ‖got − reference‖ / ‖reference‖ in fp64.
double relative_error(const at::Tensor& got, const at::Tensor& reference);

}  // namespace ditfleet::region::testing
