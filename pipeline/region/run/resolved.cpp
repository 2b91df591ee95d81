#include "pipeline/region/run/resolved.h"

#include <algorithm>

namespace ditfleet::region {
namespace {

constexpr std::int64_t kAlignment = 64;  // of buffers in the workspace: a cache line

class Resolver {
 public:
  Resolver(const Plan& plan, const Sizes& sizes) : plan_(plan), sizes_(sizes) {
    made_.contiguous_input.assign(plan.program.inputs().size(), false);
  }

  Resolved run() {
    for (int input : plan_.program.inputs()) made_.input_sizes.push_back(numbers(plan_.program.value(input).shape));
    for (const Step& step : plan_.steps) std::visit([&](const auto& one) { add(one); }, step);
    place_buffers();
    for (int output : plan_.program.outputs) made_.output_sizes.push_back(numbers(plan_.program.value(output).shape));
    return std::move(made_);
  }

 private:
  std::int64_t number(const Dim& d) const { return d.evaluate(sizes_); }
  std::vector<std::int64_t> numbers(const std::vector<Dim>& dims) const { return evaluate(dims, sizes_); }

  int input_position(const View& view) const {
    const Buffer& buffer = plan_.buffer(view.buffer);
    if (buffer.kind != BufferKind::kInput) return -1;
    const auto order = plan_.program.inputs();
    return static_cast<int>(std::find(order.begin(), order.end(), buffer.value) - order.begin());
  }

  ResolvedView view(const View& v) {
    if (const int input = input_position(v); input >= 0) made_.contiguous_input[static_cast<std::size_t>(input)] = true;
    return {v.buffer, number(v.offset), numbers(v.shape), numbers(v.strides)};
  }

  ResolvedView optional_view(const View& v) { return v.buffer < 0 ? ResolvedView{} : view(v); }

  bool writes(const ResolvedStep& step, int buffer) const {
    const auto* rows = std::get_if<ResolvedRows>(&step);
    if (!rows) {
      if (const auto* gemm = std::get_if<ResolvedGemm>(&step)) return gemm->out.buffer == buffer;
      if (const auto* copy = std::get_if<ResolvedCopy>(&step)) return copy->to.buffer == buffer;
      return std::get<ResolvedAttention>(step).out.buffer == buffer;
    }
    const RowKernel& kernel = plan_.kernels[static_cast<std::size_t>(rows->kernel)];
    const auto inputs = static_cast<std::ptrdiff_t>(kernel.inputs.size());
    return std::any_of(rows->instances.begin(), rows->instances.end(), [&](const auto& instance) {
      return std::any_of(instance.operands.begin() + inputs, instance.operands.end(),
                         [&](const auto& operand) { return operand.buffer == buffer; });
    });
  }

  // Whether the step's result is read by a product that adds to it, and by nothing else.
  bool only_accumulated(const GemmStep& step) const {
    bool later = false;
    for (const Step& one : plan_.steps) {
      const auto* gemm = std::get_if<GemmStep>(&one);
      if (later && gemm && same_place(gemm->out, step.out)) return gemm->accumulates;
      if (const auto* rows = std::get_if<RowStep>(&one); later && rows)
        for (const auto& instance : rows->instances)
          for (const auto& operand : instance.operands)
            if (same_place(operand.view, step.out)) return false;
      later = later || gemm == &step;
    }
    return false;
  }

  // Groups the rows of x and out into evenly spaced runs, axis by axis.
  static void runs(const ResolvedView& x, const ResolvedView& out, std::size_t axis, std::int64_t x_offset,
                   std::int64_t out_offset, std::vector<ResolvedGemm::Rows>& rows) {
    const std::size_t outer = x.sizes.size() - 1;
    std::int64_t count = 1, x_stride = 0, out_stride = 0;
    bool even = true;
    for (std::size_t a = outer; a-- > axis;) {
      if (x.sizes[a] == 1) continue;
      if (count == 1) {
        x_stride = x.strides[a];
        out_stride = out.strides[a];
      } else if (x.strides[a] != x_stride * count || out.strides[a] != out_stride * count) {
        even = false;
        break;
      }
      count *= x.sizes[a];
    }
    if (even) {
      const std::int64_t first = rows.empty() ? 0 : rows.back().first + rows.back().count;
      rows.push_back({x_offset, count == 1 ? x.sizes.back() : x_stride, out_offset,
                      count == 1 ? out.sizes.back() : out_stride, count, 0, first});
      return;
    }
    for (std::int64_t i = 0; i < x.sizes[axis]; ++i)
      runs(x, out, axis + 1, x_offset + i * x.strides[axis], out_offset + i * out.strides[axis], rows);
  }

  static void add_runs(bool per_sample, const ResolvedView& x, const ResolvedView& out,
                       std::vector<ResolvedGemm::Rows>& rows) {
    if (!per_sample) return runs(x, out, 0, x.offset, out.offset, rows);
    for (std::int64_t sample = 0; sample < x.sizes[0]; ++sample) {
      const std::size_t first = rows.size();
      runs(x, out, 1, x.offset + sample * x.strides[0], out.offset + sample * out.strides[0], rows);
      for (std::size_t i = first; i < rows.size(); ++i) rows[i].sample = sample;
    }
  }

  void add(const GemmStep& step) {
    ResolvedGemm r{.weight = step.weight,
                   .bias = step.bias,
                   .gelu = step.gelu,
                   .x_scales = optional_view(step.x_scales),
                   .weight_scales = step.weight_scales,
                   .out = view(step.out)};
    if (r.out.sizes.back() == 0) return;  // no adapters
    // Products of adapters of rank 0 are not computed, and what they would be added to is not read.
    if (number(step.parts.front().columns) == 0 && only_accumulated(step)) {
      skipped_.push_back(&step.out);
      return;
    }
    const auto is_out = [&](const View* view) { return same_place(*view, step.out); };
    r.accumulates = step.accumulates && std::erase_if(skipped_, is_out) == 0;
    for (const auto& part : step.parts) {
      ResolvedGemm::Part p{
          .x = view(part.x), .first_column = number(part.first_column), .columns = number(part.columns)};
      if (p.columns == 0 && step.parts.size() > 1) continue;
      p.gather = p.x.strides.back() != 1 && p.x.sizes.back() != 1;
      if (p.gather) {  // the copy's layout
        ResolvedView packed = p.x;
        packed.offset = 0;
        std::int64_t stride = 1;
        for (std::size_t a = packed.sizes.size(); a-- > 0;) {
          packed.strides[a] = stride;
          stride *= packed.sizes[a];
        }
        add_runs(step.per_sample, packed, r.out, p.rows);
      } else {
        add_runs(step.per_sample, p.x, r.out, p.rows);
      }
      r.parts.push_back(std::move(p));
    }
    made_.steps.push_back(std::move(r));
  }
  void add(const AttentionStep& step) {
    ResolvedAttention r{view(step.q), view(step.k), view(step.v), view(step.out), step.across_ranks};
    for (std::size_t i = 0; i < made_.steps.size(); ++i)
      for (const ResolvedView* one : {&r.q, &r.k, &r.v})
        if (writes(made_.steps[i], one->buffer)) r.ready = i + 1;
    made_.steps.push_back(std::move(r));
  }
  void add(const CopyStep& step) { made_.steps.push_back(ResolvedCopy{view(step.from), view(step.to)}); }

  void add(const RowStep& step) {
    ResolvedRows r{.kernel = step.kernel};
    for (const auto& instance : step.instances) {
      ResolvedRows::Instance made{.rows = 1};
      for (const Dim& extent : instance.extents) {
        made.words.push_back(number(extent));
        made.rows *= made.words.back();
      }
      for (const auto& operand : instance.operands) {
        const Buffer& buffer = plan_.buffer(operand.view.buffer);
        ResolvedRows::Operand o{.buffer = operand.view.buffer,
                                .offset_bytes = number(operand.view.offset) * bytes_of(buffer.type),
                                .word = made.words.size()};
        made.words.push_back(0);
        for (const Dim& stride : operand.strides) made.words.push_back(number(stride));
        if (const int input = input_position(operand.view); input >= 0) {
          const bool whole =
              operand.view.own_axes && operand.view.shape == buffer.shape && operand.view.offset == Dim(0);
          if (whole) {
            o.input = input;
            o.axes = buffer.shape.size() - 1;
          } else {
            made_.contiguous_input[static_cast<std::size_t>(input)] = true;
          }
        }
        made.operands.push_back(o);
      }
      r.rows += made.rows;
      r.instances.push_back(std::move(made));
    }
    made_.steps.push_back(std::move(r));
  }

  // Buffers whose lifetimes do not overlap share memory: first fit, ordered by first use.
  void place_buffers() {
    struct Placed {
      std::int64_t begin, end;
      int first, last;
    };
    std::vector<Placed> placed;
    made_.workspace_offset.assign(plan_.buffers.size(), -1);
    std::vector<std::size_t> order;
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b)
      if (plan_.buffers[b].kind == BufferKind::kWorkspace && plan_.buffers[b].first >= 0) order.push_back(b);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return plan_.buffers[a].first < plan_.buffers[b].first; });
    for (std::size_t b : order) {
      const Buffer& buffer = plan_.buffers[b];
      const std::int64_t bytes =
          (number(elements_of(buffer.shape)) * bytes_of(buffer.type) + kAlignment - 1) / kAlignment * kAlignment;
      std::int64_t at = 0;
      for (bool moved = true; moved;) {
        moved = false;
        for (const Placed& other : placed)
          if (other.last >= buffer.first && other.first <= buffer.last && at < other.end && other.begin < at + bytes) {
            at = other.end;
            moved = true;
          }
      }
      placed.push_back({at, at + bytes, buffer.first, buffer.last});
      made_.workspace_offset[b] = at;
      made_.workspace_bytes = std::max(made_.workspace_bytes, at + bytes);
    }
  }

  const Plan& plan_;
  const Sizes& sizes_;
  std::vector<const View*> skipped_;  // results of products that were not computed
  Resolved made_;
};

}  // namespace

Resolved resolve(const Plan& plan, const Sizes& sizes) { return Resolver(plan, sizes).run(); }

}  // namespace ditfleet::region
