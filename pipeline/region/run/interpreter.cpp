#include "pipeline/region/run/interpreter.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>

#include "pipeline/parallel/sequence.h"
#include "pipeline/region/libraries/fp8.h"
#include "pipeline/region/run/sizes.h"

namespace ditfleet::region {
namespace {

at::Tensor rope(const at::Tensor& x, const at::Tensor& table) {
  // At least fp32, whatever the type.
  const auto wide = x.scalar_type() == c10::ScalarType::Double ? c10::ScalarType::Double : c10::ScalarType::Float;
  const auto pairs = [](const at::Tensor& t) {
    return at::view_as_complex(t.contiguous().unflatten(-1, {t.size(-1) / 2, 2}));
  };
  const std::int64_t period = table.size(-1);
  const at::Tensor rows = pairs(x.to(wide).unflatten(-1, {x.size(-1) / period, period}));
  return at::view_as_real(rows * pairs(table.to(wide)).unsqueeze(-2)).flatten(-3).to(x.scalar_type());
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto heads_first = [](const at::Tensor& t) { return (t.dim() > 4 ? t.flatten(0, -4) : t).transpose(-2, -3); };
  const at::Tensor out =
      at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v)).transpose(-2, -3);
  return out.reshape(q.sizes());
}

}  // namespace

std::vector<at::Tensor> interpret(const Program& program, const std::vector<at::Tensor>& inputs,
                                  const pipeline::parallel::Sequence* sequence, const LinearOperator& linear) {
  const Sizes sizes = sizes_of(program, inputs, /*any_type=*/true);
  std::vector<at::Tensor> values(program.values.size());
  const auto order = program.inputs();
  for (std::size_t i = 0; i < order.size(); ++i) values[static_cast<std::size_t>(order[i])] = inputs[i];
  std::vector<const Op*> last(values.size(), nullptr);  // that reads a value
  for (const Op& op : program.ops)
    for (const int input : op.inputs) last[static_cast<std::size_t>(input)] = &op;
  for (const int output : program.outputs) last[static_cast<std::size_t>(output)] = nullptr;
  for (const Op& op : program.ops) {
    const auto in = [&](std::size_t i) -> const at::Tensor& { return values[static_cast<std::size_t>(op.inputs[i])]; };
    const Value& made = program.value(op.output);
    const std::vector<std::int64_t> shape = evaluate(made.shape, sizes);
    at::Tensor out;
    switch (op.code) {
      case OpCode::kLinear:
        if (linear)
          out = linear(program.value(op.inputs[1]).name, in(0));
        else if (in(1).dim() == 3)
          out = at::matmul(in(0).flatten(1, -2), in(1).transpose(1, 2)).view(shape);
        else
          out = at::linear(in(0), in(1), op.inputs.size() > 2 ? std::optional(in(2)) : std::nullopt);
        if (op.inputs.size() > 3) out = out + in(3);
        break;
      case OpCode::kScaledLinear:
        out = fp8_linear({.x = in(0),
                          .x_scales = in(2),
                          .weight = in(1),
                          .weight_scales = in(3),
                          .bias = in(4),
                          .addend = op.inputs.size() > 5 ? in(5) : at::Tensor()},
                         in(4).scalar_type());
        break;
      case OpCode::kRowScale: out = fp8_row_scales(in(0)); break;
      case OpCode::kQuantizeRow: out = fp8_codes(in(0), in(1)); break;
      case OpCode::kLayerNorm: out = at::layer_norm(in(0), {in(0).size(-1)}, {}, {}, op.eps); break;
      case OpCode::kRmsNorm:
        out = at::rms_norm(in(0), {in(0).size(-1)}, op.inputs.size() > 1 ? std::optional(in(1)) : std::nullopt, op.eps);
        break;
      case OpCode::kModulate: out = in(0) * in(1) + in(2); break;
      case OpCode::kGateResidual: out = (in(0) + in(2) * in(1)).to(in(0).scalar_type()); break;
      case OpCode::kGeluTanh: out = at::gelu(in(0), "tanh"); break;
      case OpCode::kGeluErf: out = at::gelu(in(0)); break;
      case OpCode::kSilu: out = at::silu(in(0)); break;
      case OpCode::kRope: out = rope(in(0), in(1)); break;
      case OpCode::kAttention: {
        const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
          return op.across_ranks && sequence ? sequence->attention(q, k, v, attention) : attention(q, k, v);
        };
        const bool f8 = in(0).scalar_type() == c10::ScalarType::Float8_e4m3fn;
        out = f8 ? fp8_attention(in(0), in(1), in(2), attend) : attend(in(0), in(1), in(2));
        break;
      }
      case OpCode::kMul: out = in(0) * in(1); break;
      case OpCode::kAdd: out = in(0) + in(1); break;
      // A reference in wider types keeps them.
      case OpCode::kCast:
        if (in(0).scalar_type() == c10::ScalarType::Double)
          out = in(0);
        else if (made.type == ElementType::kF8)
          out = at::clamp(in(0), -kLargestF8, kLargestF8).to(c10::ScalarType::Float8_e4m3fn);
        else
          out = in(0).to(scalar_type(made.type));
        break;
      case OpCode::kReshape: out = in(0).reshape(shape); break;
      case OpCode::kSlice: out = in(0).narrow(op.axis, op.start.evaluate(sizes), op.length.evaluate(sizes)); break;
      case OpCode::kPermute: out = in(0).permute(std::vector<std::int64_t>(op.order.begin(), op.order.end())); break;
      case OpCode::kJoin: {
        std::vector<at::Tensor> parts;
        for (std::size_t i = 0; i < op.inputs.size(); ++i) parts.push_back(in(i));
        out = at::cat(parts, op.axis);
        break;
      }
    }
    values[static_cast<std::size_t>(op.output)] = std::move(out);
    for (const int input : op.inputs)
      if (last[static_cast<std::size_t>(input)] == &op) values[static_cast<std::size_t>(input)].reset();
  }
  std::vector<at::Tensor> outputs;
  for (int output : program.outputs) outputs.push_back(values[static_cast<std::size_t>(output)]);
  return outputs;
}

}  // namespace ditfleet::region
