#include "pipeline/region/codegen/phases.h"

#include <algorithm>
#include <cstdio>

namespace ditfleet::region {

bool is_reduction(OpCode code) {
  return code == OpCode::kLayerNorm || code == OpCode::kRmsNorm || code == OpCode::kRowScale;
}

Phases::Phases(const RowKernel& kernel) : of_node(kernel.nodes.size(), 0), last_use(kernel.nodes.size(), 0) {
  for (std::size_t n = 0; n < kernel.nodes.size(); ++n) {
    const RowNode& node = kernel.nodes[n];
    if (node.load) continue;
    pairs = pairs || node.code == OpCode::kRope;
    for (std::size_t i = 0; i < node.operands.size(); ++i) {
      const int before = of_node[static_cast<std::size_t>(node.operands[i])];
      of_node[n] = std::max(of_node[n], before + (is_reduction(node.code) && i == 0 ? 1 : 0));
    }
    for (int o : node.operands) {
      auto& last = last_use[static_cast<std::size_t>(o)];
      last = std::max(last, of_node[n]);
    }
    count = std::max(count, of_node[n] + 1);
  }
  for (const RowOutput& output : kernel.outputs) last_use[static_cast<std::size_t>(output.node)] = count - 1;
}

std::vector<int> Phases::computed_in(const RowKernel& kernel, int p) const {
  std::vector<int> nodes;
  for (std::size_t n = 0; n < kernel.nodes.size(); ++n)
    if (!kernel.nodes[n].load && kernel.nodes[n].code != OpCode::kRowScale && of_node[n] == p)
      nodes.push_back(static_cast<int>(n));
  return nodes;
}

std::vector<int> Phases::reduced_after(const RowKernel& kernel, int p) const {
  std::vector<int> nodes;
  for (std::size_t n = 0; n < kernel.nodes.size(); ++n)
    if (!kernel.nodes[n].load && is_reduction(kernel.nodes[n].code) && of_node[n] == p + 1)
      nodes.push_back(static_cast<int>(n));
  return nodes;
}

std::string periodic(const RowNode& load, const std::string& at) {
  return load.period == 0 ? at : "(" + at + ") % " + std::to_string(load.period);
}

std::string float_literal(double value) {
  char text[48];
  std::snprintf(text, sizeof text, "%.9g", value);
  std::string s(text);
  if (s.find_first_of(".en") == std::string::npos) s += ".0";
  return s + "f";
}

namespace {

bool has(const RowKernel& kernel, ElementType type) {
  bool found = false;
  for (std::size_t o = 0; o < kernel.operands(); ++o) found = found || kernel.type_of(o) == type;
  return found;
}

}  // namespace

bool has_bf16(const RowKernel& kernel) { return has(kernel, ElementType::kBF16); }
bool has_f8(const RowKernel& kernel) { return has(kernel, ElementType::kF8); }

std::string pointer_name(const RowKernel& kernel, std::size_t o) {
  return o < kernel.inputs.size() ? "x" + std::to_string(o) : "y" + std::to_string(o - kernel.inputs.size());
}

std::string pointer_type(const RowKernel& kernel, std::size_t o) {
  return std::string(o < kernel.inputs.size() ? "const " : "") +
         (kernel.type_of(o) == ElementType::kF32 ? "float*" : std::string(name_of(kernel.type_of(o))) + "*");
}

std::string expression(const RowKernel& kernel, int index, const std::function<std::string(int)>& of) {
  const RowNode& node = kernel.nodes[static_cast<std::size_t>(index)];
  const auto arg = [&](std::size_t i) { return of(node.operands[i]); };
  const std::string id = std::to_string(index);
  switch (node.code) {
    case OpCode::kLayerNorm: return "(" + arg(0) + " - mean" + id + ") * scale" + id;
    case OpCode::kRmsNorm: return arg(0) + " * scale" + id + (node.operands.size() > 1 ? " * " + arg(1) : "");
    case OpCode::kModulate: return arg(0) + " * " + arg(1) + " + " + arg(2);
    case OpCode::kGateResidual: return arg(0) + " + " + arg(1) + " * " + arg(2);
    case OpCode::kGeluTanh: return "gelu_tanh(" + arg(0) + ")";
    case OpCode::kSilu: return "silu(" + arg(0) + ")";
    case OpCode::kMul: return arg(0) + " * " + arg(1);
    case OpCode::kAdd: return arg(0) + " + " + arg(1);
    case OpCode::kQuantizeRow: return arg(0) + " * inverse" + std::to_string(node.operands[1]);
    case OpCode::kCast: return node.type == ElementType::kBF16 ? "round_bf16(" + arg(0) + ")" : arg(0);
    default: return "0.0f /* not a row op */";
  }
}

std::string rope_expression(const RowNode& node, bool second, const std::function<std::string(int, bool)>& of) {
  const int x = node.operands[0], table = node.operands[1];
  const std::string a = of(x, false), b = of(x, true), cosine = of(table, false), sine = of(table, true);
  return second ? a + " * " + sine + " + " + b + " * " + cosine : a + " * " + cosine + " - " + b + " * " + sine;
}

}  // namespace ditfleet::region
