#include "pipeline/region/fusion/units.h"

#include <algorithm>
#include <cstdio>
#include <set>

namespace ditfleet::region {
namespace {

const Op& op_at(const Program& p, int i) { return p.ops[static_cast<std::size_t>(i)]; }

// The dependencies between units, which are indices here.
class Order {
 public:
  Order(const Program& p, const std::vector<int>& producer)
      : program_(p), producer_(producer), unit_of_op_(p.ops.size(), -1) {}

  int add_unit() { return units_++; }
  void put(int op, int unit) { unit_of_op_[static_cast<std::size_t>(op)] = unit; }
  int unit_of(int op) const { return op < 0 ? -1 : unit_of_op_[static_cast<std::size_t>(op)]; }

  // Whether computing `value` needs `unit` to have run.
  bool depends(int value, int unit) const {
    const int op = producer_[static_cast<std::size_t>(value)];
    if (op < 0) return false;
    if (unit_of(op) == unit) return true;
    for (int input : op_at(program_, op).inputs)
      if (depends(input, unit)) return true;
    return false;
  }

 private:
  const Program& program_;
  const std::vector<int>& producer_;
  std::vector<int> unit_of_op_;
  int units_ = 0;
};

constexpr std::int64_t kLeastTile = 1024;  // shorter tiles of a long row would spend most work on addresses

bool has_kernel(OpCode code) { return is_row_op(code) && code != OpCode::kGeluErf; }

// The value whose rows a row operator computes on. Its own result, unless that has one element per row.
const Value& row_of(const Program& p, const Op& op) {
  return p.value(op.code == OpCode::kRowScale ? op.inputs[0] : op.output);
}

// Adds nodes to a kernel; casts do the rounding.
class OpNodes {
 public:
  explicit OpNodes(RowKernel& kernel) : kernel_(kernel) {}

  int push(RowNode node) {
    kernel_.nodes.push_back(std::move(node));
    return static_cast<int>(kernel_.nodes.size()) - 1;
  }
  int rounded(int node, ElementType type) { return push({.code = OpCode::kCast, .operands = {node}, .type = type}); }
  // Each operator of LibTorch that computes the op, rounded.
  int push_rounded(RowNode node) {
    const std::vector<int> x = node.operands;
    const ElementType type = node.type;
    if (node.code == OpCode::kModulate) return sum(product(x[0], x[1], type), x[2], type);
    if (node.code == OpCode::kGateResidual) return sum(x[0], product(x[1], x[2], type), type);
    return rounded(push(std::move(node)), type);
  }

 private:
  int product(int a, int b, ElementType type) {
    return rounded(push({.code = OpCode::kMul, .operands = {a, b}, .type = type}), type);
  }
  int sum(int a, int b, ElementType type) {
    return rounded(push({.code = OpCode::kAdd, .operands = {a, b}, .type = type}), type);
  }

  RowKernel& kernel_;
};

// The weight and bias that layer_norm's operator applies before it rounds.
bool is_affine(const Program& p, const Op& op) {
  return op.code == OpCode::kModulate && p.value(op.inputs[1]).kind == ValueKind::kParameter;
}

// What LibTorch computes in fp32 and rounds once.
bool rounds_once(const Program& p, const Op& op) {
  return is_affine(p, op) || (op.code == OpCode::kGateResidual && p.value(op.inputs[1]).type == ElementType::kF32);
}

// The row width of a chain's kernel: whole rows, or equal tiles of long rows if the chain is elementwise.
Result<std::int64_t> row_width(const Program& p, const std::vector<int>& ops) {
  const Op& last = op_at(p, ops.back());
  const Value& made = row_of(p, last);
  const std::int64_t width = made.shape.back().value();
  const bool elementwise = std::none_of(ops.begin(), ops.end(), [&](int op) {
    const OpCode code = op_at(p, op).code;
    return code == OpCode::kLayerNorm || code == OpCode::kRmsNorm || code == OpCode::kRope || code == OpCode::kRowScale;
  });
  std::int64_t tiles = 1;
  if (elementwise)
    while (width / tiles >= kLeastTile && (width % tiles != 0 || width / tiles > kMaxRowWidth)) ++tiles;
  if (width % tiles == 0 && width / tiles <= kMaxRowWidth && made.shape.size() + (tiles > 1 ? 1 : 0) <= kOuterAxes + 1)
    return width / tiles;
  return invalid_argument("[" + p.block + "] " + made.name + " = " + std::string(name_of(last.code)) + ": rows of " +
                          text_of(made.shape) + " do not fit one kernel; they may have " +
                          std::to_string(kOuterAxes + 1) + " axes, the last up to " + std::to_string(kMaxRowWidth));
}

// The kernel of a chain: loads in order of use, nodes, and as outputs the values that others read.
void build_kernel(const Program& p, const std::set<int>& read_elsewhere, bool rounds, std::int64_t width, Unit& unit) {
  RowKernel& k = unit.kernel;
  k.width = width;
  OpNodes nodes(k);
  const auto norm_of_affine = [&](const Op& op) {
    return op.code == OpCode::kLayerNorm && std::any_of(unit.ops.begin(), unit.ops.end(), [&](int other) {
             return is_affine(p, op_at(p, other)) && op_at(p, other).inputs[0] == op.output;
           });
  };
  std::vector<std::pair<int, int>> node_of;  // value → node
  const auto find = [&](int value) {
    for (const auto& [v, n] : node_of)
      if (v == value) return n;
    return -1;
  };
  for (int index : unit.ops) {
    const Op& op = op_at(p, index);
    RowNode node{.code = op.code, .eps = op.eps, .type = p.value(op.output).type};
    for (int input : op.inputs) {
      int n = find(input);
      if (n < 0) {
        const std::int64_t elements = p.value(input).shape.back().value();
        k.nodes.push_back({.load = true,
                           .input = static_cast<int>(k.inputs.size()),
                           .period = op.code == OpCode::kRope && elements != width ? elements : 0});
        k.inputs.push_back(p.value(input).type);
        unit.reads.push_back(input);
        n = static_cast<int>(k.nodes.size()) - 1;
        node_of.emplace_back(input, n);
      }
      node.operands.push_back(n);
    }
    const int made = !rounds || node.type != ElementType::kBF16 || op.code == OpCode::kCast || norm_of_affine(op)
                         ? nodes.push(std::move(node))
                     : rounds_once(p, op) ? nodes.rounded(nodes.push(std::move(node)), ElementType::kBF16)
                                          : nodes.push_rounded(std::move(node));
    node_of.emplace_back(op.output, made);
    k.name += (k.name.empty() ? "" : "_") + std::string(name_of(op.code));
    if (read_elsewhere.contains(op.output)) {
      k.outputs.push_back({made, p.value(op.output).type, op.code == OpCode::kRowScale});
      unit.writes.push_back(op.output);
    }
  }
  k.name += "_" + std::to_string(k.width);
}

// Folds a GELU into the linear before it if nothing else reads the linear's result. Only in bf16, where the sum is then
// rounded once instead of twice. In fp32 the libraries' GELU is less exact than ours. A row quantization after the GELU
// remains a chain: the epilogue's GELU costs less than one in that chain.
void fold_gelu_epilogue(const Program& p, const std::vector<int>& producer, std::vector<Unit>& units) {
  for (std::size_t u = 0; u < units.size();) {
    const Op& gelu = op_at(p, units[u].ops.front());
    const bool quantizes = units[u].ops.size() > 1 && op_at(p, units[u].ops[1]).code == OpCode::kRowScale;
    const int from = gelu.code == OpCode::kGeluTanh && (units[u].ops.size() == 1 || quantizes)
                         ? producer[static_cast<std::size_t>(gelu.inputs[0])]
                         : -1;
    int readers = static_cast<int>(std::count(p.outputs.begin(), p.outputs.end(), gelu.inputs.front()));
    for (const Op& op : p.ops)
      readers += static_cast<int>(std::count(op.inputs.begin(), op.inputs.end(), gelu.inputs.front()));
    if (from < 0 || !is_linear(op_at(p, from).code) || readers != 1 ||
        p.value(gelu.output).type != ElementType::kBF16) {
      ++u;
      continue;
    }
    const auto linear =
        std::find_if(units.begin(), units.end(), [&](const Unit& unit) { return unit.ops.front() == from; });
    linear->ops.push_back(units[u].ops.front());
    units[u].ops.erase(units[u].ops.begin());
    if (units[u].ops.empty())
      units.erase(units.begin() + static_cast<std::ptrdiff_t>(u));
    else
      ++u;
  }
}

// A topological order of the groups; empty if there is a cycle.
std::vector<int> sorted_groups(const Program& p, const std::vector<int>& producer, const std::vector<Unit>& units,
                               const std::vector<std::vector<int>>& groups) {
  std::vector<int> group_of_op(p.ops.size(), -1);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (int u : groups[g])
      for (int op : units[static_cast<std::size_t>(u)].ops)
        group_of_op[static_cast<std::size_t>(op)] = static_cast<int>(g);
  std::vector<std::set<int>> needs(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (int u : groups[g])
      for (int read : units[static_cast<std::size_t>(u)].reads) {
        std::vector<int> roots;
        add_roots(p, producer, read, roots);
        for (int root : roots)
          if (const int op = producer[static_cast<std::size_t>(root)]; op >= 0)
            needs[g].insert(group_of_op[static_cast<std::size_t>(op)]);
      }
  std::vector<int> order;
  std::set<int> done;
  while (order.size() < groups.size()) {
    int next = -1, earliest = -1;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (done.contains(static_cast<int>(g)) ||
          !std::all_of(needs[g].begin(), needs[g].end(), [&](int n) { return done.contains(n); }))
        continue;
      const int at = units[static_cast<std::size_t>(groups[g].front())].ops.front();
      if (next < 0 || at < earliest) {
        next = static_cast<int>(g);
        earliest = at;
      }
    }
    if (next < 0) return {};
    order.push_back(next);
    done.insert(next);
  }
  return order;
}

}  // namespace

std::string RowKernel::structure() const {
  std::string s = std::to_string(width);
  for (ElementType type : inputs) s += " " + std::string(name_of(type));
  for (const RowNode& node : nodes) {
    char eps[32];
    std::snprintf(eps, sizeof eps, "%a", node.eps);
    s += node.load ? " load" + std::to_string(node.input) + (node.period ? "%" + std::to_string(node.period) : "")
                   : " " + std::string(name_of(node.code)) + "/" + eps;
    if (!node.load && node.code == OpCode::kCast) s += "/" + std::string(name_of(node.type));
    for (int o : node.operands) s += "," + std::to_string(o);
  }
  for (const RowOutput& out : outputs) s += " store" + std::to_string(out.node) + "/" + std::string(name_of(out.type));
  return s;
}

std::vector<int> producers(const Program& program) {
  std::vector<int> producer(program.values.size(), -1);
  for (std::size_t i = 0; i < program.ops.size(); ++i)
    producer[static_cast<std::size_t>(program.ops[i].output)] = static_cast<int>(i);
  return producer;
}

void add_roots(const Program& program, const std::vector<int>& producer, int value, std::vector<int>& roots) {
  const int op = producer[static_cast<std::size_t>(value)];
  if (op >= 0 && (is_view(op_at(program, op).code) || op_at(program, op).code == OpCode::kJoin)) {
    for (int input : op_at(program, op).inputs) add_roots(program, producer, input, roots);
    return;
  }
  if (std::find(roots.begin(), roots.end(), value) == roots.end()) roots.push_back(value);
}

Result<std::vector<Group>> group_ops(const Program& p, const FuseOptions& options) {
  const std::vector<int> producer = producers(p);
  Order order(p, producer);
  std::vector<Unit> units;
  for (std::size_t i = 0; i < p.ops.size(); ++i) {
    const Op& op = p.ops[i];
    const int index = static_cast<int>(i);
    if (is_view(op.code) || op.code == OpCode::kJoin) continue;
    if (is_row_op(op.code)) {
      const Value& made = p.value(op.output);
      if (!has_kernel(op.code))
        return invalid_argument("[" + p.block + "] " + made.name + " = " + std::string(name_of(op.code)) +
                                ": no generated kernel has this op; the backend eager computes it");
      // Extends the chain that makes one of its operands, unless another operand depends on that chain.
      int home = -1;
      for (int input : op.inputs) {
        const int from = producer[static_cast<std::size_t>(input)];
        if (from < 0 || !is_row_op(op_at(p, from).code) || row_of(p, op_at(p, from)).shape != row_of(p, op).shape)
          continue;
        const int unit = order.unit_of(from);
        const bool free = std::all_of(op.inputs.begin(), op.inputs.end(), [&](int other) {
          return order.unit_of(producer[static_cast<std::size_t>(other)]) == unit || !order.depends(other, unit);
        });
        if (free) home = unit;
      }
      if (op.code == OpCode::kQuantizeRow &&
          (home < 0 || order.unit_of(producer[static_cast<std::size_t>(op.inputs[1])]) != home))
        return invalid_argument("[" + p.block + "] " + made.name +
                                " = quantize_row: its scales are not the row_scale of the same rows");
      if (home >= 0) {
        units[static_cast<std::size_t>(home)].ops.push_back(index);
        order.put(index, home);
        continue;
      }
    }
    order.put(index, order.add_unit());
    units.push_back({.ops = {index}});
  }

  if (options.gelu_in_gemm) fold_gelu_epilogue(p, producer, units);
  for (std::size_t u = 0; u < units.size(); ++u) {
    const Op& first = op_at(p, units[u].ops.front());
    if (!is_row_op(first.code)) {
      units[u].reads = first.inputs;
      units[u].writes = {op_at(p, units[u].ops.back()).output};
      continue;
    }
    std::set<int> read_elsewhere(p.outputs.begin(), p.outputs.end());
    for (std::size_t i = 0; i < p.ops.size(); ++i)
      if (std::find(units[u].ops.begin(), units[u].ops.end(), static_cast<int>(i)) == units[u].ops.end())
        read_elsewhere.insert(p.ops[i].inputs.begin(), p.ops[i].inputs.end());
    const auto width = row_width(p, units[u].ops);
    if (!width) return width.error();
    build_kernel(p, read_elsewhere, options.rounds_results, *width, units[u]);
  }

  // Chains of the same structure share a launch if that creates no cycle.
  std::vector<std::vector<int>> groups;
  for (std::size_t u = 0; u < units.size(); ++u) {
    bool placed = false;
    if (!units[u].kernel.nodes.empty())
      for (std::size_t g = 0; g < groups.size() && !placed; ++g) {
        const Unit& other = units[static_cast<std::size_t>(groups[g].front())];
        if (other.kernel.nodes.empty() || other.kernel.structure() != units[u].kernel.structure()) continue;
        auto tried = groups;
        tried[g].push_back(static_cast<int>(u));
        for (std::size_t later = u + 1; later < units.size(); ++later) tried.push_back({static_cast<int>(later)});
        if (sorted_groups(p, producer, units, tried).empty()) continue;
        groups[g].push_back(static_cast<int>(u));
        placed = true;
      }
    if (!placed) groups.push_back({static_cast<int>(u)});
  }
  std::vector<Group> sorted;
  for (int g : sorted_groups(p, producer, units, groups)) {
    Group group;
    for (int u : groups[static_cast<std::size_t>(g)]) group.push_back(units[static_cast<std::size_t>(u)]);
    sorted.push_back(std::move(group));
  }
  return sorted;
}

}  // namespace ditfleet::region
