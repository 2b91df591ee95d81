#include "pipeline/nn/transformer/transformer.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <future>
#include <set>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/nn/transformer/regions.h"
#include "pipeline/region/run/interpreter.h"
#include "pipeline/region/run/region_host.h"
#include "shared/core/background_threads.h"

namespace ditfleet::pipeline {
namespace {

void set_up(Parameters& parameters, const TransformerSpec& spec, const std::string& quantize) {
  if (spec.file_names) parameters.set_file_names(spec.file_names(parameters));
  if (quantize.empty()) return;
  std::set<std::string, std::less<>> of_programs;
  // Products in fp8 pay in compiled blocks only.
  TransformerSpec compiled = spec;
  std::erase_if(compiled.blocks, [](const BlockSpec& blocks) { return blocks.apart; });
  each_linear(compiled, [&](const LinearSpec& linear, const std::vector<std::string>& names) {
    if (!linear.input.empty()) of_programs.insert(names.begin(), names.end());
  });
  parameters.quantize_on_load(quantize, [all = quantize != "fp8", of_programs = std::move(of_programs)](
                                            std::string_view linear) { return all || of_programs.contains(linear); });
}

std::shared_ptr<const TransformerSpec> with_f8_attention(const TransformerSpec& spec) {
  auto made = std::make_shared<TransformerSpec>(spec);
  const auto change = [](BlockSpec::Recipe& recipe) {
    recipe = [make = std::move(recipe)](const auto&... arguments) -> Result<region::Program> {
      auto program = make(arguments...);
      return program ? region::with_f8_attention(std::move(*program)) : program;
    };
  };
  for (BlockSpec& blocks : made->blocks) {
    change(blocks.program);
    for (BlockSpec::Variant& variant : blocks.variants)
      if (!variant.eager) change(variant.program);
  }
  return made;
}

// Why attention cannot be in f8; empty if it can.
std::string no_f8_attention(const TransformerSource& source, const Placement& placement) {
  if (!source.regions || !source.regions->compiles_blocks()) return "the blocks are not compiled";
  if (!placement.device.is_cuda()) return {};
  if (placement.dtype != c10::ScalarType::BFloat16) return "worker.dtype is not bf16";
  const auto& direct = source.regions->direct_attention;
  return direct && direct->has_f8() ? "" : "this GPU, or compile.attention, has no FlashAttention-3";
}

// A folder without weights has no parameters.
Parameters open_if_any(const ComponentFiles& files, const Placement& placement) {
  try {
    return Parameters::open(files, Library::kDiffusers, placement);
  } catch (const Failure& failure) {
    if (!files.file.empty() || failure.error().code != Code::kNotFound) throw;
    return Parameters(Checkpoint(), placement);
  }
}

}  // namespace

Transformer::Transformer(TransformerSpec spec, Placement placement)
    : spec_(std::make_shared<const TransformerSpec>(std::move(spec))), placement_(std::move(placement)) {}

void Transformer::use_f8_attention() { spec_ = with_f8_attention(*spec_); }

void Transformer::load(const TransformerSource& source, std::int64_t heads) {
  team_ = parallel::Team::all(source.regions ? source.regions->ranks : nullptr);
  team_.check_heads(heads);
  if (source.f8_attention) {
    if (const std::string why = no_f8_attention(source, placement_); why.empty())
      use_f8_attention();
    else
      spdlog::warn("{}: attention is in {} instead of fp8, because {}", source.files.dir,
                   placement_.dtype == c10::ScalarType::BFloat16 ? "bf16" : "fp32", why);
  }
  auto parameters = Parameters::open(source.files, Library::kDiffusers, placement_);
  set_up(parameters, *spec_, source.quantize);
  parameters.set_regions(source.regions);
  const bool apart = std::any_of(spec_->blocks.begin(), spec_->blocks.end(), [](const BlockSpec& blocks) {
    return blocks.apart ||
           std::any_of(blocks.linears.begin(), blocks.linears.end(), [](const auto& l) { return l.input.empty(); });
  });
  parts_.blocks = std::make_shared<PartSequence>(placement_, source.name, /*repeats=*/true);
  if (apart) parts_.apart = std::make_shared<PartSequence>(placement_, source.name + ".apart", /*repeats=*/false);
  const bool compiled = source.regions && source.regions->compiles_blocks();
  const std::int64_t rank = compiled ? std::min(source.adapter_rank, region::kMostAdapterColumns) : 0;
  weights_ = load_weights(*spec_, parameters, rank, parts_);
  parameters.finish("");
  bytes_ = parameters.bytes();
  linears_ = parameters.linears();
  computes_in_other_type_ = parameters.computes_in_other_type();
}

std::vector<region::Program> Transformer::programs(const TransformerSpec& spec, const TransformerSource& source,
                                                   Placement placement, bool fp8_products) {
  auto parameters = open_if_any(source.files, placement);
  set_up(parameters, spec, source.quantize);
  parameters.set_fp8_products(fp8_products);
  return BlockRegions::programs(source.f8_attention ? *with_f8_attention(spec) : spec, weight_formats(spec, parameters),
                                placement);
}

void Transformer::compile(const std::vector<Transformer*>& experts, const std::shared_ptr<region::RegionHost>& host) {
  if (!host || !host->compiles_blocks() || experts.empty()) return;
  BackgroundThreads threads("gpu_libraries", 1);
  std::future<void> libraries;
  if (experts.front()->placement_.device.is_cuda())
    libraries = threads.run([&] {
      try {
        experts.front()->open_libraries(*host);
      } catch (...) {  // no harm: what could not be loaded now is loaded when it is needed, or fails there
        spdlog::warn("cannot load the GPU's libraries ahead of time; the first step will take longer: {}",
                     error_in_flight("libraries").message);
      }
    });
  std::vector<BlockRegions::Expert> all;
  for (const Transformer* expert : experts) {
    if (expert->computes_in_other_type_ && expert->placement_.dtype == c10::ScalarType::Float)
      return host->fall_back(expert->spec_->family, "unsupported_op",
                             "[" + expert->spec_->family + "] NF4 weights compute in another type than fp32");
    all.push_back({expert->spec_.get(), &expert->weights_, expert->parts_.blocks});
  }
  const auto regions = std::make_shared<const BlockRegions>(all, experts.front()->placement_, host);
  if (libraries.valid()) libraries.get();
  for (std::size_t i = 0; i < experts.size(); ++i) {
    experts[i]->regions_ = regions;
    experts[i]->expert_ = i;
    experts[i]->compiled_blocks();
  }
}

void Transformer::adapt(TransformerWeights weights) {
  weights_ = std::move(weights);
  if (!regions_) return;
  const auto terms = BlockRegions::terms_of(*spec_, weights_);
  const AdapterColumns* columns = regions_->columns(expert_);
  if (const std::string problem = AdapterColumns::problem(columns, terms); !problem.empty()) {
    regions_->host().fall_back(spec_->family, "adapters", problem);
    regions_ = nullptr;
  } else if (columns) {
    adapters_ = columns->plan(terms);
  }
}

void Transformer::load_adapters() const {
  if (adapters_) regions_->columns(expert_)->load(adapters_);
}

void Transformer::clear_adapters() const {
  if (regions_ && regions_->columns(expert_)) regions_->columns(expert_)->clear();
}

void Transformer::join_adapters() const {
  if (adapters_) regions_->columns(expert_)->join();
}

region::Mode Transformer::mode_for(std::int64_t tokens, std::int64_t frames) const {
  return regions_ ? region::mode_for(regions_->host().options, tokens, frames) : region::Mode::kNone;
}

void Transformer::prewarm(std::span<const region::Sizes> sizes, bool adapters, std::size_t variant) const {
  if (regions_) regions_->prewarm(sizes, adapters, variant);
}

void Transformer::run_block(std::size_t index, std::initializer_list<const at::Tensor*> given,
                            std::vector<at::Tensor>& outputs, const parallel::Sequence* sequence) const {
  regions_->run(expert_, index, weights_.blocks[index], given, outputs, adapters_.get(), sequence);
}

void Transformer::run_block(region::Mode mode, std::size_t index, std::initializer_list<const at::Tensor*> given,
                            std::initializer_list<at::Tensor*> tokens, const parallel::Sequence* sequence,
                            std::size_t variant) const {
  std::vector<at::Tensor> outputs;
  if (mode == region::Mode::kNone) {
    outputs = run_eagerly(index, given, sequence, variant);
  } else {
    for (const at::Tensor* one : tokens) outputs.push_back(*one);
    regions_->run(expert_, index, weights_.blocks[index], given, outputs, adapters_.get(), sequence, variant);
  }
  auto made = outputs.begin();
  for (at::Tensor* one : tokens) *one = std::move(*made++);
}

std::vector<at::Tensor> Transformer::run_eagerly(std::size_t index, std::initializer_list<const at::Tensor*> given,
                                                 const parallel::Sequence* sequence, std::size_t variant) const {
  const TransformerBlock& block = weights_.blocks[index];
  const BlockSpec& spec = spec_->blocks[block.spec];
  const bool bf16 = (*given.begin())->scalar_type() == c10::ScalarType::BFloat16;
  const region::Program program = unwrap(
      spec.recipe(variant)(bf16 ? region::ElementType::kBF16 : region::ElementType::kF32, /*adapters=*/false, {}));
  std::map<std::string_view, const at::Tensor*> known;
  for (std::size_t i = 0; i < spec.tensors.size(); ++i) known[spec.tensors[i].input] = &block.tensors[i];
  auto name = spec.inputs(variant).begin();
  for (const at::Tensor* tensor : given) known[*name++] = tensor;
  std::vector<at::Tensor> inputs;
  for (const int input : program.inputs()) {
    const auto found = known.find(program.value(input).name);
    inputs.push_back(found == known.end() ? at::Tensor() : *found->second);
  }
  return region::interpret(program, inputs, sequence, [&](std::string_view weight, const at::Tensor& x) {
    std::size_t linear = 0;
    while (spec.linears[linear].input + ".weight" != weight) ++linear;
    return apply_linear(block.linears[linear], x);
  });
}

}  // namespace ditfleet::pipeline
