#include "pipeline/region/run/region.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/region/key.h"
#include "pipeline/region/run/interpreter.h"
#include "pipeline/region/run/sizes.h"

namespace ditfleet::region {
namespace {

using pipeline::fail;

constexpr std::size_t kMaxVariants = 256;  // sizes to remember

// For tensors without memory: execute() launches nothing.
class NoLauncher final : public RowLauncher {
  void launch(const ResolvedRows&, const std::vector<std::vector<long long>>&) const override {}
};

std::string text_of(const Sizes& sizes) {
  std::string out;
  for (const auto& [name, value] : sizes) out += (out.empty() ? "" : ", ") + name + " " + std::to_string(value);
  return out;
}

ElementType element_type(c10::ScalarType type, const std::string& block) {
  if (type == c10::ScalarType::Float) return ElementType::kF32;
  if (type == c10::ScalarType::BFloat16) return ElementType::kBF16;
  fail(Code::kInvalidArgument,
       "[" + block + "] activations are " + c10::toString(type) + "; they must be Float or BFloat16");
}

}  // namespace

std::chrono::steady_clock::duration pause_after(int failures, std::chrono::steady_clock::duration attempt) {
  constexpr std::chrono::steady_clock::duration kFirst = std::chrono::seconds(30), kLongest = std::chrono::hours(1);
  const auto doubled = kFirst * (1 << std::clamp(failures - 1, 0, 10));
  return std::min(kLongest, std::max(doubled, 10 * attempt));
}

Region::Region(std::string block, Recipe recipe, std::shared_ptr<const RegionHost> host, F8Heads f8_heads)
    : block_(std::move(block)), recipe_(std::move(recipe)), host_(std::move(host)), f8_heads_(std::move(f8_heads)) {}

std::vector<std::string> Region::input_names() const {
  const Program program = pipeline::unwrap(recipe_(ElementType::kF32));
  std::vector<std::string> names;
  for (int input : program.inputs()) names.push_back(program.value(input).name);
  return names;
}

Result<std::unique_ptr<RowLauncher>> Region::make_launcher(const Plan& plan, c10::DeviceType device,
                                                           const std::string& reason) const {
  if (device == c10::DeviceType::Meta) return std::unique_ptr<RowLauncher>(std::make_unique<NoLauncher>());
  const bool cubin = host_->compiler->output_kind() == kernel_cache::Kind::kCubin;
  const Source source = cubin ? generate_cuda(plan) : generate_cpp(plan);
  const auto compile = [&](const Validator& usable) {
    const auto key = key_of(identify(source, *host_->compiler, host_->arch));
    return host_->compile(key, plan.program.block, source, reason, usable);
  };
  return load_cached(compile, [&](const Entry& entry) { return load(plan, source, entry); });
}

Result<std::unique_ptr<RowLauncher>> Region::load(const Plan& plan, const Source& source, const Entry& entry) const {
  if (entry.kind == kernel_cache::Kind::kCubin) {
    auto module = GpuModule::load(entry, source, host_->device);
    if (!module) return module.error();
    return gpu_launcher(*module, plan.kernels);
  }
  auto module = HostModule::load(entry);
  if (!module) return module.error();
  std::vector<std::int64_t> widths;
  for (const RowKernel& kernel : plan.kernels) widths.push_back(kernel.width);
  return host_launcher(*module, std::move(widths));
}

std::shared_ptr<const Region::Compiled> Region::compile(ElementType type, c10::DeviceType device, const Sizes& bound,
                                                        const std::string& guard, const std::string& reason) {
  Program program = pipeline::unwrap(recipe_(type));
  if (!bound.empty()) program = program.bind(bound);
  const auto eager = [&](bool failed = false) {
    return std::make_shared<Compiled>(Compiled{type, device, bound, Plan{.program = program}, nullptr, failed});
  };
  if (!host_->compiler) return eager();
  if (programs_ > 0) {
    if (host_->options.error_on_recompile)
      fail(Code::kInvalidArgument,
           "compile.error_on_recompile is set and region " + block_ + " would be compiled again: " + guard,
           "compile.error_on_recompile");
    if (programs_ >= host_->options.recompile_limit) {
      host_->fall_back(block_, "recompile_limit",
                       "it has " + std::to_string(programs_) + " programs, compile.recompile_limit is " +
                           std::to_string(host_->options.recompile_limit) + ", and " + guard);
      return eager();
    }
  }
  auto plan = fuse(program, host_->compiler->fuse_options());
  if (!plan) {
    host_->fall_back(block_, "unsupported_op", plan.error().message);
    return eager();
  }
  const auto failed = [&](const std::string& message) {
    host_->fall_back(block_, "compile_error", message);
    return eager(true);
  };
  const auto begun = host_->now();
  if (ask_again_ && begun < *ask_again_) return failed("its compiler failed recently");
  auto launcher = make_launcher(*plan, device, reason);
  if (!launcher) {
    auto eager_for_now = failed(launcher.error().message);
    const auto ended = host_->now();
    ask_again_ = ended + pause_after(++failures_, ended - begun);
    return eager_for_now;
  }
  if (failures_ > 0) spdlog::info("region {}: compiled after {} failed attempts", block_, std::exchange(failures_, 0));
  host_->counters->has_program();
  if (programs_ > 0) host_->counters->recompiled(block_, guard);
  ++programs_;
  return std::make_shared<Compiled>(
      Compiled{type, device, bound, std::move(plan).value(), std::move(launcher).value()});
}

void Region::forget_failed() {
  if (!ask_again_ || host_->now() < *ask_again_) return;
  ask_again_.reset();
  last_.reset();
  std::erase_if(compiled_, [](const auto& one) { return one->failed; });
  std::erase_if(variants_, [](const auto& one) { return one->compiled->failed; });
}

void Region::prepare(ElementType type, c10::Device device) {
  if (!host_->options.dynamic) return;
  std::lock_guard lock(mutex_);
  forget_failed();
  for (const auto& one : compiled_)
    if (one->type == type && one->device == device.type()) return;
  compiled_.push_back(
      compile(type, device.type(), {}, "element type or device", compiled_.empty() ? "first" : "dtype"));
}

void Region::prewarm(ElementType type, c10::Device device, const Sizes& sizes) {
  if (!host_->direct_attention) return;
  std::shared_ptr<const Compiled> compiled;
  {
    std::lock_guard lock(mutex_);
    for (const auto& one : compiled_)
      if (one->type == type && one->device == device.type() && one->bound.empty() && one->launcher) compiled = one;
  }
  if (!compiled) return;
  prewarm_attention(*host_->direct_attention, compiled->plan, resolve(compiled->plan, sizes));
}

// Everything that the guard checks: the device, and each input's element type and sizes. Strides may differ between
// calls (execute()).
std::vector<std::int64_t> Region::describe(const std::vector<at::Tensor>& inputs) {
  std::vector<std::int64_t> d;
  d.reserve(inputs.size() * 5 + 1);
  if (inputs.empty() || !inputs.front().defined()) return d;
  d.push_back(static_cast<std::int64_t>(inputs.front().device().type()));
  for (const at::Tensor& t : inputs) {
    if (!t.defined()) {
      d.push_back(-1);
      continue;
    }
    d.push_back(static_cast<std::int64_t>(t.scalar_type()) << 8 | t.dim());
    for (std::int64_t n : t.sizes()) d.push_back(n);
  }
  return d;
}

std::shared_ptr<const Region::Variant> Region::find(const std::vector<std::int64_t>& descriptor) {
  if (last_ && last_->descriptor == descriptor) return last_;
  for (const auto& variant : variants_)
    if (variant->descriptor == descriptor) return last_ = variant;
  return nullptr;
}

std::shared_ptr<const Region::Variant> Region::add_variant(std::vector<std::int64_t> descriptor,
                                                           const std::vector<at::Tensor>& inputs) {
  // The first activation decides the call's element type.
  const Program shape_of = pipeline::unwrap(recipe_(ElementType::kF32));
  const auto order = shape_of.inputs();
  std::size_t first = 0;
  while (first + 1 < order.size() && shape_of.value(order[first]).kind != ValueKind::kActivation) ++first;
  if (inputs.size() != order.size() || !inputs[first].defined()) sizes_of(shape_of, inputs);  // throws
  const ElementType type = element_type(inputs[first].scalar_type(), block_);
  const auto device = inputs[first].device().type();
  const Program program = pipeline::unwrap(recipe_(type));
  const Sizes sizes = sizes_of(program, inputs);
  const Sizes bound = host_->options.dynamic ? Sizes{} : sizes;

  std::shared_ptr<const Compiled> compiled;
  for (const auto& one : compiled_)
    if (one->type == type && one->device == device && one->bound == bound) compiled = one;
  if (!compiled) {
    std::string guard = "nothing was compiled before", reason = "first";
    if (!compiled_.empty()) {
      const Compiled& before = *compiled_.back();
      if (before.type != type) {
        reason = "dtype";
        guard = "activations were " + std::string(name_of(before.type)) + " and are " + std::string(name_of(type));
      } else if (before.device != device) {
        reason = "device";
        guard = "the device has changed";
      } else {
        reason = "shape";
        guard = "with compile.dynamic off sizes were " + text_of(before.bound) + " and are " + text_of(bound);
      }
    }
    compiled = compile(type, device, bound, guard, reason);
    if (compiled->launcher || bound.empty()) compiled_.push_back(compiled);  // else every size would add one
  }
  auto variant = std::make_shared<Variant>();
  variant->descriptor = std::move(descriptor);
  variant->compiled = compiled;
  if (compiled->launcher) variant->resolved = resolve(compiled->plan, sizes);
  if (!host_->dry) host_->counters->variant();
  variants_.insert(variants_.begin(), variant);
  if (variants_.size() > kMaxVariants) variants_.pop_back();
  return last_ = variant;
}

void Region::run(const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& outputs,
                 const pipeline::parallel::Sequence* sequence) {
  auto descriptor = describe(inputs);
  std::shared_ptr<const Variant> variant;
  {
    std::lock_guard lock(mutex_);
    forget_failed();
    variant = find(descriptor);
    if (variant) {
      host_->counters->hit();
    } else {
      host_->counters->missed();
      variant = add_variant(std::move(descriptor), inputs);
    }
  }
  const Compiled& compiled = *variant->compiled;
  if (compiled.launcher) {
    const Libraries libraries{host_->gemm.get(), host_->attention, host_->direct_attention.get(), f8_heads_, sequence};
    execute(compiled.plan, variant->resolved, *compiled.launcher, libraries, host_->pool, inputs, outputs);
    return;
  }
  auto made = interpret(compiled.plan.program, inputs, sequence);
  outputs.resize(made.size());
  for (std::size_t o = 0; o < made.size(); ++o) {
    if (outputs[o].defined())
      outputs[o].copy_(made[o]);
    else
      outputs[o] = std::move(made[o]);
  }
}

}  // namespace ditfleet::region
