#include "pipeline/region/ir/program.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iterator>
#include <utility>

namespace ditfleet::region {

std::string_view name_of(ElementType type) {
  return type == ElementType::kF32 ? "f32" : type == ElementType::kBF16 ? "bf16" : "f8";
}
std::int64_t bytes_of(ElementType type) { return type == ElementType::kF32 ? 4 : type == ElementType::kBF16 ? 2 : 1; }

std::string_view name_of(ValueKind kind) {
  static constexpr std::string_view kNames[] = {"activation", "parameter", "table", "scalar", "adapter", "result"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(ValueKind::kResult) + 1);
  return kNames[static_cast<std::size_t>(kind)];
}

namespace {

// Name and number of operands of each op.
constexpr std::pair<std::string_view, std::size_t> kOps[] = {
    {"linear", 2},        {"scaled_linear", 5}, {"layer_norm", 1}, {"rms_norm", 1}, {"modulate", 3},
    {"gate_residual", 3}, {"gelu_tanh", 1},     {"gelu_erf", 1},   {"silu", 1},     {"rope", 2},
    {"attention", 3},     {"mul", 2},           {"add", 2},        {"cast", 1},     {"row_scale", 1},
    {"quantize_row", 2},  {"reshape", 1},       {"slice", 1},      {"permute", 1},  {"join", 2}};
static_assert(std::size(kOps) == static_cast<std::size_t>(OpCode::kJoin) + 1);

}  // namespace

std::string_view name_of(OpCode code) { return kOps[static_cast<std::size_t>(code)].first; }
std::size_t operands_of(OpCode code) { return kOps[static_cast<std::size_t>(code)].second; }

bool is_view(OpCode code) { return code == OpCode::kReshape || code == OpCode::kSlice || code == OpCode::kPermute; }

bool is_linear(OpCode code) { return code == OpCode::kLinear || code == OpCode::kScaledLinear; }

bool is_row_op(OpCode code) {
  return !is_view(code) && !is_linear(code) && code != OpCode::kAttention && code != OpCode::kJoin;
}

int bias_of(const Op& op) {
  const std::size_t at = op.code == OpCode::kScaledLinear ? 4 : 2;
  return op.inputs.size() > at ? op.inputs[at] : -1;
}
int addend_of(const Op& op) {
  const std::size_t at = op.code == OpCode::kScaledLinear ? 5 : 3;
  return op.inputs.size() > at ? op.inputs[at] : -1;
}

std::vector<int> Program::inputs() const {
  std::vector<int> found;
  for (std::size_t i = 0; i < values.size(); ++i)
    if (values[i].kind != ValueKind::kResult) found.push_back(static_cast<int>(i));
  return found;
}

std::vector<std::string> Program::symbols() const {
  std::vector<std::string> names;
  for (const Value& value : values)
    if (value.kind != ValueKind::kResult)
      for (const Dim& d : value.shape) d.add_symbols_to(names);
  return names;
}

Program Program::bind(const Sizes& sizes) const {
  Program bound = *this;
  for (Value& value : bound.values)
    for (Dim& d : value.shape) d = d.bind(sizes);
  for (Op& op : bound.ops) {
    op.start = op.start.bind(sizes);
    op.length = op.length.bind(sizes);
  }
  return bound;
}

bool has_f8_attention(const Program& p) {
  return std::any_of(p.ops.begin(), p.ops.end(), [&](const Op& op) {
    return op.code == OpCode::kAttention && p.value(op.inputs[0]).type == ElementType::kF8;
  });
}

Program with_f8_attention(Program p) {
  std::vector<std::pair<std::size_t, Op>> casts;  // each with the op that it follows
  const auto reads = [&](int value) {
    return std::count_if(p.ops.begin(), p.ops.end(),
                         [&](const Op& op) { return std::count(op.inputs.begin(), op.inputs.end(), value) > 0; });
  };
  // Views and joins of what is rounded change their type with it.
  const std::function<int(int)> rounded = [&](int value) {
    const auto made = static_cast<std::size_t>(
        std::find_if(p.ops.begin(), p.ops.end(), [&](const Op& op) { return op.output == value; }) - p.ops.begin());
    if (made < p.ops.size() && (p.ops[made].code == OpCode::kReshape || p.ops[made].code == OpCode::kJoin) &&
        reads(value) == 1) {
      p.values[static_cast<std::size_t>(value)].type = ElementType::kF8;
      for (int& input : p.ops[made].inputs) input = rounded(input);
      return value;
    }
    Value narrow = p.value(value);
    narrow.name += ".f8";
    narrow.kind = ValueKind::kResult;
    narrow.type = ElementType::kF8;
    p.values.push_back(std::move(narrow));
    const int made_here = static_cast<int>(p.values.size()) - 1;
    casts.emplace_back(made, Op{.code = OpCode::kCast, .inputs = {value}, .output = made_here});
    return made_here;
  };
  for (Op& op : p.ops)
    if (op.code == OpCode::kAttention && op.across_ranks)
      for (std::size_t i = 0; i < 2; ++i) op.inputs[i] = rounded(op.inputs[i]);
  std::stable_sort(casts.begin(), casts.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (auto& [after, cast] : casts)
    p.ops.insert(p.ops.begin() + static_cast<std::ptrdiff_t>(after < p.ops.size() ? after + 1 : 0), std::move(cast));
  p.block += ".f8_attention";
  return p;
}

std::string print(const Program& program) {
  const auto shown = [&](int index) { return "%" + program.value(index).name; };
  const auto typed = [&](int index) {
    const Value& v = program.value(index);
    return "%" + v.name + ": " + std::string(name_of(v.type)) + " " + text_of(v.shape);
  };
  std::string out = "region " + program.block + "\n";
  for (int index : program.inputs())
    out += "  " + std::string(name_of(program.value(index).kind)) + " " + typed(index) + "\n";
  for (const Op& op : program.ops) {
    out += "  " + typed(op.output) + " = " + std::string(name_of(op.code)) + "(";
    for (std::size_t i = 0; i < op.inputs.size(); ++i) out += (i ? ", " : "") + shown(op.inputs[i]);
    if (op.code == OpCode::kSlice) out += ", axis " + std::to_string(op.axis) + ", from " + op.start.text();
    if (op.code == OpCode::kJoin) out += ", axis " + std::to_string(op.axis);
    if (op.code == OpCode::kPermute)
      for (int axis : op.order) out += ", " + std::to_string(axis);
    if (op.eps != 0) {
      char eps[32];
      std::snprintf(eps, sizeof eps, ", eps %g", op.eps);
      out += eps;
    }
    if (op.token_stride != 0) out += ", token stride " + std::to_string(op.token_stride);
    if (op.across_ranks) out += ", across ranks";
    out += ")\n";
  }
  out += "  return";
  for (std::size_t i = 0; i < program.outputs.size(); ++i) out += (i ? ", " : " ") + shown(program.outputs[i]);
  return out + "\n";
}

}  // namespace ditfleet::region
