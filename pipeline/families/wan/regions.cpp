#include "pipeline/families/wan/regions.h"

#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/block_program.h"

namespace ditfleet::pipeline {
namespace {

using Weight = region::Builder::Weight;
using Forms = std::vector<Weight>;

// In the order of region::kWanLinears.
std::array<const LinearSlot*, region::kWanLinears.size()> linears_of(const WanBlockSlots& b) {
  return {&b.qkv, &b.out, &b.cross_q, &b.cross_kv, &b.cross_out, &b.mlp_in, &b.mlp_out};
}

// How the program sees each linear. Without adapters, values of quantized weights are weights like others.
Forms forms_of(const WanBlockSlots& block, Placement placement, bool adapted) {
  Forms forms;
  for (const LinearSlot* slot : linears_of(block)) {
    const QuantizedWeight* quantized = slot->quantized.get();
    forms.push_back(!quantized                              ? Weight::kOwn
                    : quantized->dynamic                    ? Weight::kF8
                    : quantized->compute != placement.dtype ? Weight::kWide
                    : adapted                               ? Weight::kApart
                                                            : Weight::kOwn);
  }
  return forms;
}

Weights weights_of(const WanBlockSlots& b) {
  Weights weights;
  const auto linears = linears_of(b);
  for (std::size_t i = 0; i < linears.size(); ++i) add_linear(weights, region::kWanLinears[i], *linears[i]);
  weights.emplace("norm_q", b.norm_q);
  weights.emplace("norm_k", b.norm_k);
  weights.emplace("cross_norm_q", b.cross_norm_q);
  weights.emplace("cross_norm_k", b.cross_norm_k);
  if (b.norm2.weight.defined()) {
    weights.emplace("norm2.weight", b.norm2.weight);
    weights.emplace("norm2.bias", b.norm2.bias);
  }
  return weights;
}

region::ElementType element_type(Placement placement) {
  return placement.dtype == c10::ScalarType::Float ? region::ElementType::kF32 : region::ElementType::kBF16;
}

region::WanBlockShape shape_of(const WanConfig& c, region::ElementType type, bool adapted, const Forms& forms) {
  return {.heads = c.heads,
          .head_dim = c.head_dim,
          .ffn = c.ffn_dim,
          .eps = c.eps,
          .cross_norm = c.cross_attn_norm,
          .type = type,
          .adapters = adapted,
          .weights = forms};
}

std::size_t position_of(const std::vector<std::string>& names, const std::string& name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) fail(Code::kInternal, "the region has no input " + name);
  return static_cast<std::size_t>(at - names.begin());
}

}  // namespace

std::vector<region::Program> WanRegions::programs(const WanConfig& config, const WanSlots& slots, Placement placement) {
  std::vector<region::Program> made;
  for (const bool adapted : {false, true}) {
    std::set<Forms> forms;
    for (const WanBlockSlots& block : slots.blocks) forms.insert(forms_of(block, placement, adapted));
    for (const Forms& one : forms)
      made.push_back(unwrap(region::wan_block(shape_of(config, element_type(placement), adapted, one))));
  }
  return made;
}

AdapterColumns::Terms WanRegions::terms_of(const WanSlots& slots) {
  AdapterColumns::Terms terms;
  for (const WanBlockSlots& block : slots.blocks)
    for (const LinearSlot* slot : linears_of(block)) terms.push_back(&slot->low_rank);
  return terms;
}

WanRegions::WanRegions(const WanConfig& config, const std::vector<Expert>& experts, Placement placement,
                       std::shared_ptr<region::RegionHost> host)
    : placement_(placement), host_(std::move(host)) {
  std::vector<std::string> call{"tokens", "text", "rope"};
  call.insert(call.end(), region::kWanRows.begin(), region::kWanRows.end());
  using Key = std::pair<bool, Forms>;                                        // with adapters or without
  std::map<Key, std::vector<std::pair<std::size_t, std::size_t>>> by_forms;  // expert, block
  const auto& first = experts.front().slots->blocks;
  const bool room = !first.empty() && first.front().qkv.lora_columns.count > 0;
  const auto copies = room ? region::make_matrix_copies(*host_) : nullptr;
  for (std::size_t e = 0; e < experts.size(); ++e) {
    const std::vector<WanBlockSlots>& blocks = experts[e].slots->blocks;
    experts_.emplace_back(blocks.size());
    std::vector<std::vector<LinearSlot>> linears;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      auto& of_block = linears.emplace_back();
      for (const LinearSlot* slot : linears_of(blocks[i])) of_block.push_back(*slot);
      by_forms[{false, forms_of(blocks[i], placement, false)}].emplace_back(e, i);
      if (room) by_forms[{true, forms_of(blocks[i], placement, true)}].emplace_back(e, i);
    }
    columns_.push_back(room ? std::make_unique<AdapterColumns>(std::move(linears), copies, experts[e].parts) : nullptr);
  }
  const auto memory = std::make_shared<WeightMemory>();
  for (const auto& [key, blocks] : by_forms) {
    Table& table = *tables_.emplace_back(std::make_unique<Table>());
    table.adapted = key.first;
    const auto recipe = [config, key = key](region::ElementType type) {
      return region::wan_block(shape_of(config, type, key.first, key.second));
    };
    table.region = std::make_unique<region::Region>(unwrap(recipe(element_type(placement))).block, recipe, host_);
    const auto names = table.region->input_names();
    for (const auto& name : call) table.given.push_back(position_of(names, name));
    for (std::size_t i = 0; i < region::kWanLinears.size(); ++i) {
      const std::string linear = region::kWanLinears[i];
      Linear& made = table.linears.emplace_back(Linear{position_of(names, linear + ".bias")});
      if (!table.adapted) continue;
      made.up = position_of(names, linear + (key.second[i] == Weight::kOwn ? ".weight" : ".up"));
      made.adapter = position_of(names, linear + ".adapter");
    }
    std::vector<Weights> weights;
    for (const auto& [expert, index] : blocks) {
      experts_[expert][index][table.adapted] = {&table, weights.size()};
      weights.push_back(weights_of(experts[expert].slots->blocks[index]));
    }
    const auto is_given = [&](const std::string& name) {
      return name.ends_with(".adapter") || name.ends_with(".up") ||
             std::find(call.begin(), call.end(), name) != call.end();
    };
    table.weights = BlockWeights(names, weights, is_given, memory);
    table.region->prepare(element_type(placement), placement.device);
  }
}

void WanRegions::prewarm(std::int64_t tokens, std::int64_t text, bool adapters) const {
  region::Sizes sizes{{"batch", 1}, {"tokens", tokens}, {"text", text}};
  for (const char* linear : region::kWanLinears) sizes[std::string(linear) + ".rank"] = 0;  // all ranks share the plan
  for (const auto& table : tables_)
    if (adapters || !table->adapted) table->region->prewarm(element_type(placement_), placement_.device, sizes);
}

at::Tensor WanRegions::rope_rows(const at::Tensor& rope) {
  return at::view_as_real(rope).view({rope.size(1), 2 * rope.size(3)});
}

void WanRegions::block(std::size_t expert, std::size_t index, at::Tensor& x, const at::Tensor& text,
                       const at::Tensor& rows, const at::Tensor& rope, region::Mode mode, const WanBlockSlots& slots,
                       const AdapterColumns::Layout* adapters, const parallel::Sequence* sequence) const {
  if (adapters && index > 0) columns(expert)->join();
  const auto linears = linears_of(slots);
  const auto* operands = adapters ? &adapters->operands[index * linears.size()] : nullptr;
  const bool adapted =
      operands && std::any_of(operands, operands + linears.size(), [](const auto& o) { return o.adapter.size(1) > 0; });
  const auto& [table, row] = experts_[expert][index][adapted];
  std::vector<at::Tensor> inputs = table->weights.take(row);
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const Linear& at = table->linears[i];
    if (!linears[i]->bias_changes.empty()) inputs[at.bias] = compiled_bias(*linears[i]);
    if (!adapted) continue;
    inputs[at.up] = operands[i].weight;
    inputs[at.adapter] = operands[i].adapter;
  }
  auto position = table->given.begin();
  for (const at::Tensor* given : {&std::as_const(x), &text, &rope}) inputs[*position++] = *given;
  for (std::int64_t i = 0; i < rows.size(1); ++i) inputs[*position++] = rows.narrow(1, i, 1);
  std::vector<at::Tensor> outputs{x};
  table->region->run(inputs, outputs, mode, sequence);
  x = std::move(outputs[0]);
}

}  // namespace ditfleet::pipeline
