#include "tests/parity/region_inputs.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>

#include <cmath>

#include "pipeline/region/libraries/fp8.h"
#include "pipeline/region/run/sizes.h"

namespace ditfleet::region::testing {
namespace {

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

std::vector<at::Tensor> random_inputs(const Program& program, const Sizes& sizes, std::uint64_t seed,
                                      InputStyle style) {
  at::Generator generator = style.device.is_cpu() ? at::detail::createCPUGenerator(seed)
                                                  : at::globalContext().defaultGenerator(style.device).clone();
  generator.set_current_seed(seed);
  const auto draw = [&](const std::vector<std::int64_t>& shape) {
    return at::randn(shape, generator, at::TensorOptions(c10::ScalarType::Float).device(style.device));
  };
  std::vector<at::Tensor> inputs;
  for (int index : program.inputs()) {
    const Value& value = program.values[static_cast<std::size_t>(index)];
    const auto type = scalar_type(value.type);
    std::vector<std::int64_t> shape;
    for (const Dim& d : value.shape) shape.push_back(d.evaluate(sizes));
    at::Tensor t;
    if (value.type == ElementType::kF8) {  // codes up to about 448
      t = fp8_codes(draw(shape), at::full({1}, 0.01, at::TensorOptions(c10::ScalarType::Float).device(style.device)));
    } else if (value.kind == ValueKind::kParameter && ends_with(value.name, ".scale")) {
      t = (draw(shape) * 0.1 + 1) * (0.01 / std::sqrt(64.0));
    } else if (value.kind == ValueKind::kActivation) {
      std::vector<std::int64_t> larger = shape;
      if (style.strided) {
        larger.back() += 5;  // rows no longer aligned, nor one behind another
        larger[larger.size() - 2] += 3;
      }
      t = draw(larger);
      if (style.outliers)
        for (std::int64_t channel = 0; channel < shape.back(); channel += 37) t.select(-1, channel).mul_(100);
      t = t.to(type);
      if (style.strided) t = t.narrow(-1, 2, shape.back()).narrow(-2, 1, shape[shape.size() - 2]);
    } else if (value.name == "rope") {
      const at::Tensor angles = draw({shape[0], shape[1] / 2}) * 3;
      t = at::stack({at::cos(angles), at::sin(angles)}, 2).flatten(1).contiguous();
    } else if (value.kind == ValueKind::kTable) {
      if (style.strided) shape[0] = 1;
      t = draw(shape) * 0.3;
      if (ends_with(value.name, "scale")) t = t + 1;
      t = t.to(type);
    } else if (value.kind == ValueKind::kAdapter) {
      t = (draw(shape) * (1 / std::sqrt(static_cast<double>(shape.back())))).to(type);
    } else if (shape.size() == 2 && style.strided) {  // with room beside it
      t = (draw({shape[0], shape[1] + 16}) * (1 / std::sqrt(static_cast<double>(shape[1]))))
              .to(type)
              .narrow(1, 8, shape[1]);
    } else if (shape.size() == 2) {
      t = (draw(shape) * (1 / std::sqrt(static_cast<double>(shape[1])))).to(type);
    } else {
      t = (draw(shape) * 0.1 + (ends_with(value.name, "bias") ? 0.0 : 1.0)).to(type);
    }
    inputs.push_back(t);
  }
  return inputs;
}

std::vector<at::Tensor> converted(const std::vector<at::Tensor>& inputs, c10::ScalarType type) {
  std::vector<at::Tensor> made;
  for (const at::Tensor& t : inputs) made.push_back(t.to(type));
  return made;
}

double relative_error(const at::Tensor& got, const at::Tensor& reference) {
  const at::Tensor wide = reference.to(c10::ScalarType::Double);
  const double norm = at::linalg_vector_norm(wide).item<double>();
  return at::linalg_vector_norm(got.to(c10::ScalarType::Double) - wide).item<double>() / (norm > 0 ? norm : 1);
}

}  // namespace ditfleet::region::testing
