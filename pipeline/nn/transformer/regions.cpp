#include "pipeline/nn/transformer/regions.h"

#include <algorithm>
#include <future>
#include <set>
#include <tuple>

#include "pipeline/device/failure.h"
#include "pipeline/region/programs/f8_heads.h"
#include "shared/core/background_threads.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::pipeline {
namespace {

using Weight = BlockSpec::Weight;

// How the program sees each linear. Without adapters, values of quantized weights are weights like others.
std::vector<Weight> forms_of(const TransformerSpec& spec, const TransformerBlock& block, Placement placement,
                             bool adapted) {
  std::vector<Weight> forms;
  for (const LinearSlot* slot : program_linears(spec, block)) {
    const QuantizedWeight* quantized = slot->quantized.get();
    forms.push_back(!quantized                              ? Weight::kOwn
                    : quantized->dynamic                    ? Weight::kF8
                    : quantized->compute != placement.dtype ? Weight::kWide
                    : adapted                               ? Weight::kApart
                                                            : Weight::kOwn);
  }
  return forms;
}

Weights weights_of(const BlockSpec& spec, const TransformerBlock& block) {
  Weights weights;
  for (std::size_t i = 0; i < spec.linears.size(); ++i)
    if (!spec.linears[i].input.empty()) add_linear(weights, spec.linears[i].input, block.linears[i]);
  for (std::size_t i = 0; i < spec.tensors.size(); ++i)
    if (!spec.tensors[i].input.empty()) weights.emplace(spec.tensors[i].input, block.tensors[i]);
  return weights;
}

region::ElementType element_type(Placement placement) {
  return placement.dtype == c10::ScalarType::Float ? region::ElementType::kF32 : region::ElementType::kBF16;
}

std::size_t position_of(const std::vector<std::string>& names, const std::string& name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) fail(Code::kInternal, "the region has no input " + name);
  return static_cast<std::size_t>(at - names.begin());
}

}  // namespace

std::vector<region::Program> BlockRegions::programs(const TransformerSpec& spec, const TransformerWeights& weights,
                                                    Placement placement) {
  std::vector<region::Program> made;
  for (const bool adapted : {false, true}) {
    std::set<std::tuple<std::size_t, std::size_t, std::vector<Weight>>> forms;
    for (const TransformerBlock& block : weights.blocks)
      for (std::size_t variant = 0; variant <= spec.blocks[block.spec].variants.size(); ++variant)
        if (spec.blocks[block.spec].compiles(variant))
          forms.emplace(block.spec, variant, forms_of(spec, block, placement, adapted));
    for (const auto& [kind, variant, one] : forms)
      made.push_back(unwrap(spec.blocks[kind].recipe(variant)(element_type(placement), adapted, one)));
  }
  return made;
}

AdapterColumns::Terms BlockRegions::terms_of(const TransformerSpec& spec, const TransformerWeights& weights) {
  AdapterColumns::Terms terms;
  for (const TransformerBlock& block : weights.blocks)
    for (const LinearSlot* slot : program_linears(spec, block)) terms.push_back(&slot->low_rank);
  return terms;
}

BlockRegions::BlockRegions(const std::vector<Expert>& experts, Placement placement,
                           std::shared_ptr<region::RegionHost> host)
    : placement_(placement), host_(std::move(host)) {
  struct Shared {
    const BlockSpec* spec;
    std::size_t kind, variant;
    bool adapted;
    std::vector<Weight> forms;
    std::vector<std::pair<std::size_t, std::size_t>> blocks;  // expert, index
  };
  std::vector<Shared> shared;
  std::map<std::string, std::size_t> by_program;
  const auto type = element_type(placement);
  std::shared_ptr<const region::MatrixCopies> copies;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const auto& [spec, weights, parts] = experts[e];
    auto& blocks = blocks_.emplace_back(weights->blocks.size());
    std::vector<std::vector<LinearSlot>> linears;
    std::size_t count = 0;
    bool room = true;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      auto& of_block = linears.emplace_back();
      for (const LinearSlot* slot : program_linears(*spec, weights->blocks[i])) {
        of_block.push_back(*slot);
        room = room && slot->lora_columns.count > 0;
      }
      blocks[i].first_linear = std::exchange(count, count + of_block.size());
    }
    room = room && count > 0;
    std::map<std::tuple<std::size_t, std::size_t, bool, std::vector<Weight>>, std::size_t> known;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::size_t kind = weights->blocks[i].spec;
      const BlockSpec& of = spec->blocks[kind];
      blocks[i].rows.resize(of.variants.size() + 1);
      for (std::size_t variant = 0; variant <= of.variants.size(); ++variant)
        for (const bool adapted : {false, true}) {
          if ((adapted && !room) || !of.compiles(variant)) continue;
          auto forms = forms_of(*spec, weights->blocks[i], placement, adapted);
          const auto [at, added] = known.try_emplace({kind, variant, adapted, forms});
          if (added) {
            const std::string program = print(unwrap(of.recipe(variant)(type, adapted, forms)));
            at->second = by_program.try_emplace(program, shared.size()).first->second;
            if (at->second == shared.size()) shared.push_back({&of, kind, variant, adapted, std::move(forms), {}});
          }
          shared[at->second].blocks.emplace_back(e, i);
        }
    }
    if (room && !copies) copies = region::make_matrix_copies(*host_);
    columns_.push_back(room ? std::make_unique<AdapterColumns>(std::move(linears), copies, parts) : nullptr);
  }
  const auto memory = std::make_shared<WeightMemory>();
  region::F8Heads f8_heads;
  for (const Shared& one : shared) {
    Table& table = *tables_.emplace_back(std::make_unique<Table>());
    table.spec = one.kind;
    table.variant = one.variant;
    table.adapted = one.adapted;
    const auto recipe = [make = one.spec->recipe(one.variant), adapted = one.adapted,
                         forms = one.forms](region::ElementType of) { return make(of, adapted, forms); };
    const region::Program program = unwrap(recipe(type));
    if (!f8_heads && region::has_f8_attention(program)) f8_heads = region::make_f8_heads(*host_);
    table.region = std::make_unique<region::Region>(program.block, recipe, host_,
                                                    f8_heads ? f8_heads : region::F8Heads(region::fp8_heads));
    const auto names = table.region->input_names();
    const std::vector<std::string>& given = one.spec->inputs(one.variant);
    for (const std::string& name : given) table.given.push_back(position_of(names, name));
    for (std::size_t i = 0, form = 0; i < one.spec->linears.size(); ++i) {
      const std::string& name = one.spec->linears[i].input;
      if (name.empty()) continue;
      Linear& linear = table.linears.emplace_back(Linear{i, position_of(names, name + ".bias")});
      const bool own = one.forms[form++] == Weight::kOwn;
      if (!one.adapted) continue;
      linear.up = position_of(names, name + (own ? ".weight" : ".up"));
      linear.adapter = position_of(names, name + ".adapter");
      table.ranks[name + ".rank"] = 0;
    }
    std::vector<Weights> weights;
    for (const auto& [expert, index] : one.blocks) {
      blocks_[expert][index].rows[one.variant][one.adapted] = {&table, weights.size()};
      weights.push_back(weights_of(*one.spec, experts[expert].weights->blocks[index]));
    }
    const auto is_given = [&](const std::string& name) {
      return name.ends_with(".adapter") || name.ends_with(".up") ||
             std::find(given.begin(), given.end(), name) != given.end();
    };
    table.weights = BlockWeights(names, weights, is_given, memory);
  }
  BackgroundThreads threads("prepare", std::max<std::size_t>(1, tables_.size()));  // all at once
  std::vector<std::future<void>> running;
  for (const auto& table : tables_)
    running.push_back(threads.run([&, context = telemetry::current_span()] {
      const telemetry::ContextScope scope(context);
      table->region->prepare(type, placement.device);
    }));
  for (auto& one : running) one.get();
}

// Blocks with adapters attend at the same strides as those without. All ranks of adapters share a plan.
void BlockRegions::prewarm(std::span<const region::Sizes> sizes, bool adapters, std::size_t variant) const {
  for (const auto& table : tables_) {
    if ((table->adapted && !adapters) || table->variant != variant) continue;
    region::Sizes of_table = sizes[table->spec];
    of_table.insert(table->ranks.begin(), table->ranks.end());
    table->region->prewarm(element_type(placement_), placement_.device, of_table);
  }
}

void BlockRegions::run(std::size_t expert, std::size_t index, const TransformerBlock& weights,
                       std::initializer_list<const at::Tensor*> given, std::vector<at::Tensor>& outputs,
                       const AdapterColumns::Layout* adapters, const parallel::Sequence* sequence,
                       std::size_t variant) const {
  if (adapters && index > 0) columns(expert)->join();
  const Block& block = blocks_[expert][index];
  const auto* operands = adapters ? &adapters->operands[block.first_linear] : nullptr;
  const auto& rows = block.rows[variant];
  const bool adapted = operands && std::any_of(operands, operands + rows[1].table->linears.size(),
                                               [](const auto& linear) { return linear.adapter.size(1) > 0; });
  const auto& [table, row] = rows[adapted];
  std::vector<at::Tensor> inputs = table->weights.take(row);
  for (const Linear& linear : table->linears) {
    const LinearSlot& slot = weights.linears[linear.index];
    if (!slot.bias_changes.empty()) inputs[linear.bias] = compiled_bias(slot);
    if (!adapted) continue;
    inputs[linear.up] = operands->weight;
    inputs[linear.adapter] = operands++->adapter;
  }
  auto position = table->given.begin();
  for (const at::Tensor* tensor : given) inputs[*position++] = *tensor;
  table->region->run(inputs, outputs, sequence);
}

}  // namespace ditfleet::pipeline
