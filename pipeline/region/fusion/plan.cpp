#include "pipeline/region/fusion/plan.h"

#include <algorithm>
#include <map>

#include "pipeline/region/fusion/storage.h"

namespace ditfleet::region {
namespace {

class Planner {
 public:
  Planner(Plan& plan, const std::vector<Group>& groups, const FuseOptions& options)
      : plan_(plan), groups_(groups), options_(options), storage_(plan, groups) {}

  void run() {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      const Unit& first = groups_[g].front();
      if (!first.kernel.nodes.empty()) {
        add_rows(static_cast<int>(g));
        continue;
      }
      const Op& op = plan_.program.ops[static_cast<std::size_t>(first.ops.front())];
      if (is_linear(op.code))
        add_gemm(op, static_cast<int>(g), first);
      else
        add_attention(op);
    }
    deliver_outputs();
    if (options_.copies_in_rows) copy_in_rows();
    delay_attention();
    find_lifetimes();
    find_replaceable();
  }

 private:
  const Value& value(int i) const { return plan_.program.value(i); }

  void add_gemm(const Op& op, int group, const Unit& unit) {
    GemmStep step{.weight = op.inputs[1],
                  .bias = bias_of(op),
                  .per_sample = value(op.inputs[1]).shape.size() == 3,
                  .gelu = unit.ops.size() > 1,
                  .name = value(unit.writes.front()).name};
    if (const Op* join = storage_.split_join(op)) {
      Dim column = 0;
      for (int part : join->inputs) {
        const Dim& columns = value(part).shape.back();
        step.parts.push_back({storage_.view_of(part), column, columns});
        column = column + columns;
      }
    } else {
      step.parts.push_back({storage_.view_of(op.inputs[0]), 0, value(op.inputs[0]).shape.back()});
    }
    if (op.code == OpCode::kScaledLinear) {
      step.x_scales = storage_.view_of(op.inputs[2]);
      step.weight_scales = op.inputs[3];
    }
    step.out = storage_.place(unit.writes.front(), group, unit);
    if (const int addend = addend_of(op); addend >= 0) {
      step.accumulates = true;
      const View from = storage_.view_of(addend);
      if (!same_place(from, step.out)) plan_.steps.push_back(CopyStep{from, step.out, value(addend).name});
    }
    plan_.steps.push_back(std::move(step));
  }

  void add_attention(const Op& op) {
    AttentionStep step{.across_ranks = op.across_ranks, .name = value(op.output).name};
    step.q = storage_.view_of(op.inputs[0]);
    step.k = storage_.view_of(op.inputs[1]);
    step.v = storage_.view_of(op.inputs[2]);
    step.out = storage_.place_attention(op, options_.attention_token_stride);
    plan_.steps.push_back(std::move(step));
  }

  // Right-aligned in kOuterAxes axes; the row's own axis is not among them.
  static std::array<Dim, kOuterAxes> outer(const Shape& shape) {
    std::array<Dim, kOuterAxes> axes;
    axes.fill(1);
    for (std::size_t i = 0; i + 1 < shape.size(); ++i) axes[kOuterAxes - (shape.size() - 1) + i] = shape[i];
    return axes;
  }
  static RowStep::Operand operand(const View& view, const std::array<Dim, kOuterAxes>& extents) {
    RowStep::Operand made{view, {}};
    made.strides.fill(0);
    const std::size_t axes = view.shape.size() - 1;
    for (std::size_t i = 0; i < axes; ++i) {
      const std::size_t at = kOuterAxes - axes + i;
      // An axis of 1 against a longer one broadcasts.
      if (!(view.shape[i] == Dim(1)) || extents[at] == Dim(1)) made.strides[at] = view.strides[i];
    }
    return made;
  }

  // Splits rows that are longer than `width` into tiles along a new axis.
  static Shape in_tiles(Shape shape, std::int64_t width) {
    const std::int64_t tiles = shape.back().value() / width;
    if (tiles <= 1) return shape;
    shape.back() = tiles;
    shape.push_back(width);
    return shape;
  }

  void add_rows(int g) {
    const Group& group = groups_[static_cast<std::size_t>(g)];
    const std::int64_t width = group.front().kernel.width;
    const auto tiled = [&](const View& view) {
      return *reshaped(view, in_tiles(view.shape, width));
    };  // splitting an axis is always possible
    RowStep step;
    step.kernel = kernel_index(group.front().kernel, static_cast<int>(group.size()));
    // Reads are resolved before results are placed, because results may take their memory.
    std::vector<std::vector<View>> reads;
    for (const Unit& unit : group) {
      reads.emplace_back();
      for (int read : unit.reads) reads.back().push_back(tiled(storage_.view_of(read)));
    }
    for (std::size_t u = 0; u < group.size(); ++u) {
      const Unit& unit = group[u];
      RowStep::Instance instance;
      instance.extents = outer(in_tiles(value(unit.writes.front()).shape, width));
      for (const View& view : reads[u]) instance.operands.push_back(operand(view, instance.extents));
      for (int written : unit.writes) {
        instance.operands.push_back(operand(tiled(storage_.place(written, g, unit)), instance.extents));
        step.name += (step.name.empty() ? "" : ", ") + value(written).name;
      }
      step.instances.push_back(std::move(instance));
    }
    plan_.steps.push_back(std::move(step));
  }

  int kernel_index(const RowKernel& kernel, int instances) {
    const std::string structure = kernel.structure();
    for (std::size_t i = 0; i < plan_.kernels.size(); ++i)
      if (plan_.kernels[i].structure() == structure) {
        plan_.kernels[i].instances = std::max(plan_.kernels[i].instances, instances);
        return static_cast<int>(i);
      }
    RowKernel added = kernel;
    added.instances = instances;
    const int same_name =
        static_cast<int>(std::count_if(plan_.kernels.begin(), plan_.kernels.end(),
                                       [&](const RowKernel& k) { return k.name.rfind(kernel.name, 0) == 0; }));
    if (same_name > 0) added.name += "_v" + std::to_string(same_name + 1);
    plan_.kernels.push_back(std::move(added));
    return static_cast<int>(plan_.kernels.size()) - 1;
  }

  // Copies outputs that are not in the caller's memory yet (made by a linear, an attention or a view).
  void deliver_outputs() {
    for (std::size_t o = 0; o < plan_.program.outputs.size(); ++o) {
      const int v = plan_.program.outputs[o];
      const View at = storage_.view_of(v);
      const Buffer& buffer = plan_.buffer(at.buffer);
      if (buffer.kind == BufferKind::kOutput && buffer.value == static_cast<int>(o)) continue;
      plan_.buffers.push_back({BufferKind::kOutput, value(v).type, value(v).shape, static_cast<int>(o)});
      plan_.steps.push_back(
          CopyStep{at, whole_buffer(static_cast<int>(plan_.buffers.size()) - 1, value(v).shape), value(v).name});
    }
  }

  void copy_in_rows() {
    for (Step& step : plan_.steps) {
      const auto* copy = std::get_if<CopyStep>(&step);
      if (!copy) continue;
      const View from = copy->from, to = copy->to;
      const ElementType type = plan_.buffer(to.buffer).type;
      if (!to.shape.back().is_static() || to.shape.size() > kOuterAxes + 1 || to.shape.back().value() > kMaxRowWidth ||
          !(from.strides.back() == Dim(1)) || !(to.strides.back() == Dim(1)) ||
          plan_.buffer(from.buffer).type != type || type == ElementType::kF8)
        continue;
      RowKernel kernel{.name = "copy_" + to.shape.back().text(),
                       .width = to.shape.back().value(),
                       .inputs = {type},
                       .nodes = {{.load = true, .input = 0}},
                       .outputs = {{0, type}}};
      const auto extents = outer(to.shape);
      step = RowStep{.kernel = kernel_index(kernel, 1),
                     .instances = {{extents, {operand(from, extents), operand(to, extents)}}},
                     .name = copy->name};
    }
  }

  static std::vector<const View*> views_of(const Step& step) {
    if (const auto* attention = std::get_if<AttentionStep>(&step))
      return {&attention->q, &attention->k, &attention->v, &attention->out};
    if (const auto* copy = std::get_if<CopyStep>(&step)) return {&copy->from, &copy->to};
    std::vector<const View*> views;
    if (const auto* gemm = std::get_if<GemmStep>(&step)) {
      for (const auto& part : gemm->parts) views.push_back(&part.x);
      if (gemm->x_scales.buffer >= 0) views.push_back(&gemm->x_scales);
      views.push_back(&gemm->out);
    } else if (const auto* rows = std::get_if<RowStep>(&step)) {
      for (const auto& instance : rows->instances)
        for (const auto& operand : instance.operands) views.push_back(&operand.view);
    }
    return views;
  }

  // Moves attention across ranks behind steps that do not need it, so that the ranks exchange q, k and v meanwhile.
  void delay_attention() {
    for (std::size_t s = 0; s + 1 < plan_.steps.size(); ++s) {
      const auto* attention = std::get_if<AttentionStep>(&plan_.steps[s]);
      if (!attention || !attention->across_ranks) continue;
      const auto mine = views_of(plan_.steps[s]), others = views_of(plan_.steps[s + 1]);
      const bool apart = std::all_of(mine.begin(), mine.end(), [&](const View* a) {
        return std::all_of(others.begin(), others.end(), [&](const View* b) { return provably_disjoint(*a, *b); });
      });
      if (apart) std::swap(plan_.steps[s], plan_.steps[s + 1]);
    }
  }

  void find_lifetimes() {
    for (std::size_t s = 0; s < plan_.steps.size(); ++s)
      for (const View* view : views_of(plan_.steps[s])) {
        Buffer& buffer = plan_.buffers[static_cast<std::size_t>(view->buffer)];
        if (buffer.first < 0) buffer.first = static_cast<int>(s);
        buffer.last = static_cast<int>(s);
      }
  }

  // An output may take an activation's memory if the chain that first writes the output reads the activation at the
  // same rows, and nothing else reads the activation then or later.
  void find_replaceable() {
    plan_.may_replace.assign(plan_.program.outputs.size(), -1);
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      const Buffer& out = plan_.buffers[b];
      if (out.kind != BufferKind::kOutput) continue;
      const auto* first = std::get_if<RowStep>(&plan_.steps[static_cast<std::size_t>(out.first)]);
      if (!first) continue;
      for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
        const Buffer& in = plan_.buffers[i];
        if (in.kind != BufferKind::kInput || value(in.value).kind != ValueKind::kActivation || in.shape != out.shape ||
            in.type != out.type || in.last > out.first)
          continue;
        bool fits = true;
        for (const auto& instance : first->instances) {
          const auto has = [&](std::size_t buffer) {
            return std::any_of(instance.operands.begin(), instance.operands.end(), [&](const RowStep::Operand& o) {
              return o.view.buffer == static_cast<int>(buffer) && o.view.shape == out.shape;
            });
          };
          const bool reads =
              std::any_of(instance.operands.begin(), instance.operands.end(),
                          [&](const RowStep::Operand& o) { return o.view.buffer == static_cast<int>(i); });
          if (reads && !(has(i) && has(b))) fits = false;
        }
        if (fits) plan_.may_replace[static_cast<std::size_t>(out.value)] = in.value;
      }
    }
  }

  Plan& plan_;
  const std::vector<Group>& groups_;
  const FuseOptions options_;
  Storage storage_;
};

}  // namespace

Result<Plan> fuse(const Program& program, const FuseOptions& options) {
  if (auto checked = verify(program); !checked) return checked.error();
  auto groups = group_ops(program, options);
  if (!groups) return groups.error();
  Plan plan;
  plan.program = program;
  Planner(plan, *groups, options).run();
  return plan;
}

std::string print(const Plan& plan) {
  static constexpr const char* kKinds[] = {"in", "out", "ws", "lib"};
  const auto place = [&](const View& view) {
    return std::string(kKinds[static_cast<int>(plan.buffer(view.buffer).kind)]) + std::to_string(view.buffer) +
           (view.offset == Dim(0) ? "" : "+" + view.offset.text());
  };
  std::string out;
  for (const Step& step : plan.steps) {
    if (const auto* gemm = std::get_if<GemmStep>(&step)) {
      out += "  gemm       " + gemm->name + ": " + place(gemm->out) + (gemm->gelu ? " = gelu of" : " =");
      for (std::size_t i = 0; i < gemm->parts.size(); ++i)
        out += (i ? " + " : " ") + place(gemm->parts[i].x) + "·" + plan.program.value(gemm->weight).name;
      if (gemm->accumulates) out += " + " + place(gemm->out);
    } else if (const auto* attention = std::get_if<AttentionStep>(&step)) {
      out += "  attention  " + attention->name + ": " + place(attention->out) + " = " + place(attention->q) + ", " +
             place(attention->k) + ", " + place(attention->v);
    } else if (const auto* copy = std::get_if<CopyStep>(&step)) {
      out += "  copy       " + copy->name + ": " + place(copy->to) + " = " + place(copy->from);
    } else if (const auto* rows = std::get_if<RowStep>(&step)) {
      const RowKernel& kernel = plan.kernels[static_cast<std::size_t>(rows->kernel)];
      out += "  rows       " + rows->name + ": " + kernel.name;
      for (const auto& instance : rows->instances) {
        out += " (";
        for (std::size_t i = 0; i < instance.operands.size(); ++i)
          out += (i == 0 ? "" : i == kernel.inputs.size() ? " → " : ", ") + place(instance.operands[i].view);
        out += ")";
      }
    }
    out += "\n";
  }
  return out;
}

}  // namespace ditfleet::region
