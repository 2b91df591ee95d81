#include "pipeline/region/run/executor.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "pipeline/parallel/sequence.h"
#include "pipeline/region/run/sizes.h"

namespace ditfleet::region {
namespace {

// A large image must not keep its memory forever; allocating is cheap compared with computing it.
constexpr std::int64_t kMostKeptBytes = std::int64_t{256} << 20;

class Call {
 public:
  Call(const Plan& plan, const Resolved& resolved, const RowLauncher& launcher, const Libraries& libraries,
       std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs, char* workspace)
      : plan_(plan),
        resolved_(resolved),
        launcher_(launcher),
        libraries_(libraries),
        inputs_(inputs),
        device_(inputs.front().device()),
        base_(plan.buffers.size()) {
    const auto order = plan.program.inputs();
    value_input_.assign(plan.program.values.size(), -1);
    for (std::size_t i = 0; i < order.size(); ++i)
      value_input_[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      if (buffer.kind == BufferKind::kInput) base_[b] = static_cast<char*>(input(buffer.value).data_ptr());
      if (buffer.kind == BufferKind::kOutput)
        base_[b] = static_cast<char*>(outputs[static_cast<std::size_t>(buffer.value)].data_ptr());
      if (buffer.kind == BufferKind::kWorkspace && resolved.workspace_offset[b] >= 0)
        base_[b] = workspace + resolved.workspace_offset[b];
    }
  }

  void run() {
    const auto& steps = resolved_.steps;
    // Steps between the last one that writes q, k or v and the attention run while the ranks exchange these.
    const ResolvedAttention* across = nullptr;
    for (auto step = steps.rbegin(); libraries_.sequence && step != steps.rend(); ++step)
      if (const auto* attention = std::get_if<ResolvedAttention>(&*step); attention && attention->across_ranks)
        across = attention;                                                                   // the first one
    if (across && plan_.buffer(across->q.buffer).type == ElementType::kF8) across = nullptr;  // see run()
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (across && i == across->ready)
        libraries_.sequence->start(tensor(across->q), tensor(across->k), tensor(across->v));
      std::visit([&](const auto& one) { run(one); }, steps[i]);
    }
  }

 private:
  const at::Tensor& input(int value) const {
    return inputs_[static_cast<std::size_t>(value_input_[static_cast<std::size_t>(value)])];
  }

  at::Tensor tensor(int buffer, std::int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) const {
    const ElementType type = plan_.buffer(buffer).type;
    const auto options = at::TensorOptions(scalar_type(type)).device(device_);
    if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end())
      return at::empty(sizes, options);  // its address may be outside the buffer
    return at::from_blob(base_[static_cast<std::size_t>(buffer)] + offset * bytes_of(type), sizes, strides, options);
  }
  at::Tensor tensor(const ResolvedView& v) const { return tensor(v.buffer, v.offset, v.sizes, v.strides); }

  // What all rows of a product share, and the rows of one run.
  struct Product {
    const ResolvedGemm& step;
    bool first = true, last = true;  // of the parts
    bool accumulates = false;        // adds to out
    at::Tensor x, columns, bias, out;
    at::Tensor x_scales = {}, weight_scales = {};
  };

  void run(const ResolvedGemm& step) const {
    const at::Tensor& weights = input(step.weight);
    for (std::size_t p = 0; p < step.parts.size(); ++p) {
      const auto& part = step.parts[p];
      const at::Tensor gathered = part.gather ? tensor(part.x).contiguous() : at::Tensor();
      for (const auto& rows : part.rows) {
        if (rows.count == 0) continue;  // libraries reject empty products
        const std::int64_t width = step.out.sizes.back();
        const at::Tensor weight =
            weights.dim() == 3 ? weights.select(0, weights.size(0) == 1 ? 0 : rows.sample) : weights;
        Product product{
            .step = step,
            .first = p == 0,
            .last = p + 1 == step.parts.size(),
            .x = part.gather ? gathered.as_strided({rows.count, part.columns}, {rows.x_stride, 1}, rows.x_offset)
                             : tensor(part.x.buffer, rows.x_offset, {rows.count, part.columns}, {rows.x_stride, 1}),
            .columns = (step.parts.size() == 1 ? weight : weight.narrow(1, part.first_column, part.columns)).t(),
            .bias = step.bias < 0 ? at::Tensor() : input(step.bias),
            .out = tensor(step.out.buffer, rows.out_offset, {rows.count, width}, {rows.out_stride, 1})};
        product.accumulates = step.accumulates || p > 0;
        if (step.weight_scales >= 0) {
          product.x_scales = tensor(step.x_scales.buffer, step.x_scales.offset + rows.first, {rows.count, 1}, {1, 1});
          product.weight_scales = input(step.weight_scales);
        }
        run(product);
      }
    }
  }

  void run(Product product) const {
    const bool gelu = product.step.gelu && product.last;
    // No epilogue computes GELU without a bias, or after several parts.
    if (libraries_.gemm && product.x.size(1) > 0 && !(gelu && !(product.bias.defined() && product.first)) &&
        by_library(product))
      return;
    at::Tensor& out = product.out;
    if (product.x.size(1) == 0) {
      if (!product.accumulates) out.zero_();
    } else if (product.weight_scales.defined()) {
      out.copy_(fp8_linear({.x = product.x,
                            .x_scales = product.x_scales,
                            .weight = product.columns.t(),
                            .weight_scales = product.weight_scales,
                            .bias = product.bias,
                            .addend = product.accumulates ? out : at::Tensor()},
                           out.scalar_type()));
    } else if (product.accumulates || product.bias.defined()) {
      at::addmm_out(out, product.accumulates ? out : product.bias, product.x, product.columns);
      if (product.accumulates && product.first && product.bias.defined()) out.add_(product.bias);
    } else {
      at::mm_out(out, product.x, product.columns);
    }
    if (gelu) at::gelu_out(out, out, "tanh");
  }

  // False if the library cannot do it.
  bool by_library(Product& product) const {
    const bool biased = product.first && product.bias.defined();
    const auto epilogue = !biased             ? GemmEpilogue::kPlain
                          : product.step.gelu ? GemmEpilogue::kBiasGelu
                                              : GemmEpilogue::kBias;
    // The rows of later samples may begin at an odd address.
    if (product.x_scales.defined() && reinterpret_cast<std::uintptr_t>(product.x_scales.const_data_ptr()) % 16 != 0)
      product.x_scales = product.x_scales.clone();
    const auto scales = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr<float>() : nullptr; };
    return libraries_.gemm->run({.type = plan_.buffer(product.step.out.buffer).type,
                                 .f8 = product.weight_scales.defined(),
                                 .epilogue = epilogue,
                                 .rows = product.x.size(0),
                                 .in = product.x.size(1),
                                 .out = product.out.size(1),
                                 .x_stride = product.x.stride(0),
                                 .weight_stride = product.columns.stride(1),
                                 .out_stride = product.out.stride(0),
                                 .accumulates = product.accumulates},
                                {.x = product.x.const_data_ptr(),
                                 .weight = product.columns.const_data_ptr(),
                                 .bias = biased ? product.bias.const_data_ptr() : nullptr,
                                 .x_scales = scales(product.x_scales),
                                 .weight_scales = scales(product.weight_scales),
                                 .out = product.out.mutable_data_ptr()});
  }

  void run(const ResolvedAttention& step) {
    const at::Tensor q = tensor(step.q), k = tensor(step.k), v = tensor(step.v);
    const bool own_memory = plan_.buffer(step.out.buffer).kind == BufferKind::kLibrary;
    const at::Tensor out = own_memory ? at::Tensor() : tensor(step.out);
    at::Tensor made;
    if (step.across_ranks && libraries_.sequence) {
      // Ranks exchange f8 as bf16, in which every f8 value is exact.
      const auto f8 = q.scalar_type(), type = v.scalar_type();
      made = libraries_.sequence->attention(
          q.to(type), k.to(type), v, [&](const at::Tensor& all_q, const at::Tensor& all_k, const at::Tensor& all_v) {
            return attended(all_q.to(f8), all_k.to(f8), all_v, {});
          });
      if (own_memory)
        made = made.contiguous();
      else
        out.copy_(made);
    } else {
      made = attended(q, k, v, out);
    }
    if (own_memory) keep(step.out.buffer, std::move(made));
  }

  // Computes the result in `out`, or copies it there. If `out` is undefined, returns a contiguous tensor of q's shape.
  at::Tensor attended(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out) {
    if (q.numel() == 0) return out.defined() ? out : at::empty(q.sizes(), v.options());
    const bool f8 = q.scalar_type() == c10::ScalarType::Float8_e4m3fn;
    if (libraries_.direct_attention) {
      const at::Tensor direct = out.defined() ? out : at::empty(q.sizes(), v.options());
      const auto [values, scales] = f8 ? libraries_.f8_heads(v) : std::pair(v, at::Tensor());
      if (libraries_.direct_attention->run(q, k, values, direct, scales)) return direct;
    }
    const auto by_torch = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
      return attend(a, b, c, libraries_.attention);
    };
    at::Tensor made = f8 ? fp8_attention(q, k, v, by_torch) : by_torch(q, k, v);
    return out.defined() ? out.copy_(made) : made;
  }

  void keep(int buffer, at::Tensor made) {
    base_[static_cast<std::size_t>(buffer)] = static_cast<char*>(made.data_ptr());
    kept_.push_back(std::move(made));
  }

  void run(const ResolvedCopy& step) const { tensor(step.to).copy_(tensor(step.from)); }

  void run(const ResolvedRows& step) const {
    std::vector<std::vector<long long>> instances;
    instances.reserve(step.instances.size());
    for (const auto& instance : step.instances) {
      instances.push_back(instance.words);
      auto& words = instances.back();
      for (const auto& o : instance.operands) {
        words[o.word] = reinterpret_cast<long long>(base_[static_cast<std::size_t>(o.buffer)] + o.offset_bytes);
        if (o.input < 0) continue;
        const at::Tensor& t = inputs_[static_cast<std::size_t>(o.input)];
        for (std::size_t a = 0; a < o.axes; ++a)
          words[o.word + 1 + kOuterAxes - o.axes + a] =
              t.size(static_cast<std::int64_t>(a)) == 1 ? 0 : t.stride(static_cast<std::int64_t>(a));
      }
    }
    if (step.rows > 0) launcher_.launch(step, instances);
  }

  const Plan& plan_;
  const Resolved& resolved_;
  const RowLauncher& launcher_;
  const Libraries& libraries_;
  const std::vector<at::Tensor>& inputs_;
  const c10::Device device_;
  std::vector<int> value_input_;
  std::vector<char*> base_;       // of each buffer
  std::vector<at::Tensor> kept_;  // results that libraries allocated
};

// What a call on tensors without memory does: allocates the results that libraries would allocate, and what ranks
// exchange.
void allocate_results(const Plan& plan, const Resolved& resolved, const Libraries& libraries,
                      const at::TensorOptions& options) {
  std::vector<at::Tensor> kept;
  for (const ResolvedStep& one : resolved.steps) {
    const auto* step = std::get_if<ResolvedAttention>(&one);
    if (!step) continue;
    if (step->across_ranks && libraries.sequence) {
      const at::Tensor q = at::empty(step->q.sizes, options);
      libraries.sequence->attention(q, q, q, [](const at::Tensor& all, const auto&...) { return at::empty_like(all); });
    }
    if (plan.buffer(step->q.buffer).type == ElementType::kF8)
      at::empty(step->v.sizes, options.dtype(c10::ScalarType::Float8_e4m3fn));  // v's codes
    if (plan.buffer(step->out.buffer).kind == BufferKind::kLibrary) kept.push_back(at::empty(step->out.sizes, options));
  }
}

}  // namespace

at::Tensor WorkspacePool::take(std::int64_t bytes, c10::Device device) {
  const auto options = at::TensorOptions(c10::ScalarType::Byte).device(device);
  // A GPU's allocator has its own cache, which respects streams.
  if (device.is_cpu()) {
    std::lock_guard lock(mutex_);
    while (!idle_.empty()) {
      at::Tensor workspace = std::move(idle_.back());
      idle_.pop_back();
      if (workspace.numel() >= bytes) return workspace;
    }
  }
  return at::empty({bytes}, options);
}

void WorkspacePool::give_back(at::Tensor workspace) {
  if (!workspace.is_cpu() || workspace.numel() > kMostKeptBytes) return;
  std::lock_guard lock(mutex_);
  idle_.push_back(std::move(workspace));
}

void prewarm_attention(const DirectAttention& direct, const Plan& plan, const Resolved& resolved) {
  const auto strides = [](const ResolvedView& v) {
    return AttentionShape::Strides{v.strides[0], v.strides[1], v.strides[2]};
  };
  for (const ResolvedStep& one : resolved.steps) {
    const auto* step = std::get_if<ResolvedAttention>(&one);
    // The strides of a result in memory of its own are not known ahead.
    if (!step || plan.buffer(step->out.buffer).kind == BufferKind::kLibrary) continue;
    direct.prewarm({step->q.sizes[0], step->q.sizes[1], step->k.sizes[1], step->q.sizes[2], step->q.sizes[3],
                    strides(step->q), strides(step->k), strides(step->v), strides(step->out),
                    plan.buffer(step->q.buffer).type == ElementType::kF8});
  }
}

void execute(const Plan& plan, const Resolved& resolved, const RowLauncher& launcher, const Libraries& libraries,
             WorkspacePool& pool, std::vector<at::Tensor> inputs, std::vector<at::Tensor>& outputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor& t = inputs[i];
    const bool rows_lie_flat = t.size(-1) == 1 || t.stride(-1) == 1;
    if (resolved.contiguous_input[i])
      inputs[i] = t.expand(resolved.input_sizes[i]).contiguous();
    else if (!rows_lie_flat)
      inputs[i] = t.contiguous();
  }
  outputs.resize(plan.program.outputs.size());
  for (std::size_t o = 0; o < outputs.size(); ++o)
    if (!outputs[o].defined()) {
      const ElementType type = plan.program.value(plan.program.outputs[o]).type;
      outputs[o] =
          at::empty(resolved.output_sizes[o], at::TensorOptions(scalar_type(type)).device(inputs.front().device()));
    }
  at::Tensor workspace = pool.take(resolved.workspace_bytes, inputs.front().device());
  if (inputs.front().is_meta())
    allocate_results(plan, resolved, libraries, inputs.front().options());
  else
    Call(plan, resolved, launcher, libraries, inputs, outputs, static_cast<char*>(workspace.data_ptr())).run();
  pool.give_back(std::move(workspace));
}

}  // namespace ditfleet::region
