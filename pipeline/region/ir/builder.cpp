#include "pipeline/region/ir/builder.h"

#include <algorithm>

namespace ditfleet::region {

std::string program_name(const std::string& block, const std::vector<Builder::Weight>& weights, bool adapters) {
  const auto has = [&](Builder::Weight weight) {
    return std::find(weights.begin(), weights.end(), weight) != weights.end();
  };
  return block +
         (has(Builder::Weight::kF8)      ? ".fp8"
          : has(Builder::Weight::kWide)  ? ".fp32"
          : has(Builder::Weight::kApart) ? ".quantized"
                                         : "") +
         (adapters ? ".adapted" : "");
}

Builder::Ref Builder::input(const std::string& name, ValueKind kind, ElementType type, Shape shape) {
  program_.values.push_back({name, kind, type, std::move(shape)});
  return {static_cast<int>(program_.values.size()) - 1};
}

Builder::Linear Builder::linear_slots(const std::string& name, std::int64_t in, std::int64_t out, Weight weight) {
  const ElementType type = weight == Weight::kF8     ? ElementType::kF8
                           : weight == Weight::kWide ? ElementType::kF32
                                                     : type_;
  Linear slots;
  slots.weight = input(name + ".weight", ValueKind::kParameter, type, {out, in});
  if (weight == Weight::kF8) slots.scale = input(name + ".scale", ValueKind::kParameter, ElementType::kF32, {out});
  slots.bias = input(name + ".bias", ValueKind::kParameter, weight == Weight::kWide ? ElementType::kF32 : type_, {out});
  return slots;
}

Builder::Linear Builder::adapted_slots(const std::string& name, const Dim& batch, std::int64_t in, std::int64_t out,
                                       Weight weight) {
  const Dim rank = Dim::symbol(name + ".rank");
  const Ref adapter = input(name + ".adapter", ValueKind::kAdapter, type_, {batch, rank, in});
  Linear slots;
  if (weight == Weight::kOwn) {
    slots.weight = parameter(name + ".weight", {out, rank + in});
    slots.bias = parameter(name + ".bias", {out});
  } else {
    slots = linear_slots(name, in, out, weight);
    slots.up = parameter(name + ".up", {out, rank});
  }
  slots.adapter = adapter;
  slots.rank = rank;
  return slots;
}

Builder::Ref Builder::add_op(const std::string& name, Op op, const std::vector<Ref>& operands, const Shape& shape,
                             ElementType cast_to) {
  if (error_) return {};
  std::vector<Value> values;
  for (const Ref& operand : operands) {
    op.inputs.push_back(operand.value);
    if (operand.value < 0 || operand.value >= static_cast<int>(program_.values.size())) {
      error_ = invalid_argument("[" + program_.block + "] " + name + " = " + std::string(name_of(op.code)) +
                                ": an operand is not a value of this block");
      return {};
    }
    values.push_back(program_.value(operand.value));
  }
  auto made = infer(program_.block, name, op, values, shape, cast_to);
  if (!made) {
    error_ = made.error();
    return {};
  }
  program_.values.push_back(std::move(made).value());
  op.output = static_cast<int>(program_.values.size()) - 1;
  program_.ops.push_back(std::move(op));
  return {program_.ops.back().output};
}

Builder::Ref Builder::linear(const std::string& name, Ref x, const Linear& slots, Ref addend) {
  if (error_) return {};
  std::vector<Ref> operands{x, slots.weight};
  if (slots.scale.value >= 0) {
    const auto known = quantized_.find(x.value);
    const std::string of = program_.value(x.value).name;
    const Ref scale = known != quantized_.end() ? known->second.second : row_scale(of + ".scale", x);
    const Ref codes = known != quantized_.end() ? known->second.first : quantize_row(of + ".codes", x, scale);
    quantized_[x.value] = {codes, scale};
    operands = {codes, slots.weight, scale, slots.scale};
  }
  if (slots.bias.value >= 0) operands.push_back(slots.bias);
  const bool wide = slots.scale.value < 0 && program_.value(slots.weight.value).type == ElementType::kF32 &&
                    type_ != ElementType::kF32;
  if (wide) operands[0] = cast(name + ".x", x, ElementType::kF32);
  if (addend.value >= 0) operands.push_back(wide ? cast(name + ".addend", addend, ElementType::kF32) : addend);
  const OpCode code = slots.scale.value >= 0 ? OpCode::kScaledLinear : OpCode::kLinear;
  const Ref made = add_op(wide ? name + ".f32" : name, {.code = code}, operands);
  return wide ? cast(name, made, type_) : made;
}
Builder::Ref Builder::row_scale(const std::string& name, Ref x) {
  return add_op(name, {.code = OpCode::kRowScale}, {x});
}
Builder::Ref Builder::quantize_row(const std::string& name, Ref x, Ref scale) {
  return add_op(name, {.code = OpCode::kQuantizeRow}, {x, scale});
}
Builder::Ref Builder::low_rank(const std::string& name, Ref x, const Linear& slots) {
  return add_op(name, {.code = OpCode::kLinear}, {x, slots.adapter});
}
Builder::Ref Builder::adapted_linear(const std::string& name, Ref x, const Linear& slots) {
  if (slots.adapter.value < 0 || error_) return linear(name, x, slots);
  if (slots.up.value >= 0)
    return linear(name, x, slots,
                  add_op(name + ".added", {.code = OpCode::kLinear}, {low_rank(name + ".low", x, slots), slots.up}));
  const int last = static_cast<int>(program_.value(x.value).shape.size()) - 1;
  return linear(name, join(name + ".wide", last, {x, low_rank(name + ".low", x, slots)}), slots);
}
Builder::Ref Builder::layer_norm(const std::string& name, Ref x, double eps) {
  return add_op(name, {.code = OpCode::kLayerNorm, .eps = eps}, {x});
}
Builder::Ref Builder::rms_norm(const std::string& name, Ref x, Ref weight, double eps) {
  return add_op(name, {.code = OpCode::kRmsNorm, .eps = eps},
                weight.value < 0 ? std::vector<Ref>{x} : std::vector<Ref>{x, weight});
}
Builder::Ref Builder::modulate(const std::string& name, Ref x, Ref scale, Ref shift) {
  return add_op(name, {.code = OpCode::kModulate}, {x, scale, shift});
}
Builder::Ref Builder::gate_residual(const std::string& name, Ref x, Ref gate, Ref branch) {
  return add_op(name, {.code = OpCode::kGateResidual}, {x, gate, branch});
}
Builder::Ref Builder::gelu_tanh(const std::string& name, Ref x) {
  return add_op(name, {.code = OpCode::kGeluTanh}, {x});
}
Builder::Ref Builder::gelu_erf(const std::string& name, Ref x) { return add_op(name, {.code = OpCode::kGeluErf}, {x}); }
Builder::Ref Builder::silu(const std::string& name, Ref x) { return add_op(name, {.code = OpCode::kSilu}, {x}); }
Builder::Ref Builder::swiglu(const std::string& name, Ref x) {
  if (error_) return {};
  const Shape& shape = program_.value(x.value).shape;
  const int last = static_cast<int>(shape.size()) - 1;
  const std::int64_t half = shape.back().value() / 2;
  const Ref gate = slice(name + ".gate", x, last, 0, half), up = slice(name + ".up", x, last, half, half);
  return mul(name, silu(name + ".silu", gate), up);
}
Builder::Ref Builder::rope(const std::string& name, Ref x, Ref table) {
  return add_op(name, {.code = OpCode::kRope}, {x, table});
}
Builder::Ref Builder::attention(const std::string& name, Ref q, Ref k, Ref v, const Attention& form) {
  return add_op(name,
                {.code = OpCode::kAttention, .token_stride = form.token_stride, .across_ranks = form.across_ranks},
                {q, k, v});
}
Builder::Ref Builder::mul(const std::string& name, Ref a, Ref b) {
  return add_op(name, {.code = OpCode::kMul}, {a, b});
}
Builder::Ref Builder::add(const std::string& name, Ref a, Ref b) {
  return add_op(name, {.code = OpCode::kAdd}, {a, b});
}
Builder::Ref Builder::cast(const std::string& name, Ref x, ElementType type) {
  return add_op(name, {.code = OpCode::kCast}, {x}, {}, type);
}
Builder::Ref Builder::reshape(const std::string& name, Ref x, Shape shape) {
  return add_op(name, {.code = OpCode::kReshape}, {x}, shape);
}
Builder::Ref Builder::slice(const std::string& name, Ref x, int axis, Dim start, Dim length) {
  return add_op(name, {.code = OpCode::kSlice, .axis = axis, .start = std::move(start), .length = std::move(length)},
                {x});
}
Builder::Ref Builder::permute(const std::string& name, Ref x, std::vector<int> order) {
  return add_op(name, {.code = OpCode::kPermute, .order = std::move(order)}, {x});
}
Builder::Ref Builder::join(const std::string& name, int axis, const std::vector<Ref>& parts) {
  return add_op(name, {.code = OpCode::kJoin, .axis = axis}, parts);
}

Result<Program> Builder::finish(const std::vector<Ref>& outputs) {
  if (error_) return *error_;
  for (const Ref& output : outputs) program_.outputs.push_back(output.value);
  if (auto checked = verify(program_); !checked) return checked.error();
  return program_;
}

}  // namespace ditfleet::region
