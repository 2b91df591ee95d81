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

// How the program sees each linear. Values of quantized weights are weights like others.
Forms forms_of(const WanBlockSlots& block, Placement placement) {
  Forms forms;
  for (const LinearSlot* slot : linears_of(block)) {
    const QuantizedWeight* quantized = slot->quantized.get();
    forms.push_back(!quantized                              ? Weight::kOwn
                    : quantized->dynamic                    ? Weight::kF8
                    : quantized->compute != placement.dtype ? Weight::kWide
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

region::WanBlockShape shape_of(const WanConfig& c, region::ElementType type, const Forms& forms) {
  return {.heads = c.heads,
          .head_dim = c.head_dim,
          .ffn = c.ffn_dim,
          .eps = c.eps,
          .cross_norm = c.cross_attn_norm,
          .type = type,
          .weights = forms};
}

}  // namespace

std::vector<region::Program> WanRegions::programs(const WanConfig& config, const WanSlots& slots, Placement placement) {
  std::set<Forms> forms;
  for (const WanBlockSlots& block : slots.blocks) forms.insert(forms_of(block, placement));
  std::vector<region::Program> made;
  for (const Forms& one : forms)
    made.push_back(unwrap(region::wan_block(shape_of(config, element_type(placement), one))));
  return made;
}

WanRegions::WanRegions(const WanConfig& config, const std::vector<const WanSlots*>& experts, Placement placement,
                       std::shared_ptr<region::RegionHost> host)
    : placement_(placement), host_(std::move(host)) {
  std::vector<std::string> call{"tokens", "text", "rope"};
  call.insert(call.end(), region::kWanRows.begin(), region::kWanRows.end());
  std::map<Forms, std::vector<std::pair<std::size_t, std::size_t>>> by_forms;  // expert, block
  for (std::size_t e = 0; e < experts.size(); ++e) {
    experts_.emplace_back(experts[e]->blocks.size());
    for (std::size_t i = 0; i < experts[e]->blocks.size(); ++i)
      by_forms[forms_of(experts[e]->blocks[i], placement)].emplace_back(e, i);
  }
  const auto memory = std::make_shared<WeightMemory>();
  for (const auto& [forms, blocks] : by_forms) {
    Table& table = *tables_.emplace_back(std::make_unique<Table>());
    const auto recipe = [config, forms = forms](region::ElementType type) {
      return region::wan_block(shape_of(config, type, forms));
    };
    table.region = std::make_unique<region::Region>(unwrap(recipe(element_type(placement))).block, recipe, host_);
    const auto names = table.region->input_names();
    for (const auto& name : call) {
      const auto at = std::find(names.begin(), names.end(), name);
      if (at == names.end()) fail(Code::kInternal, "the region has no input " + name);
      table.given.push_back(static_cast<std::size_t>(at - names.begin()));
    }
    std::vector<Weights> weights;
    for (const auto& [expert, index] : blocks) {
      experts_[expert][index] = {&table, weights.size()};
      weights.push_back(weights_of(experts[expert]->blocks[index]));
    }
    table.weights = BlockWeights(
        names, weights,
        [&](const std::string& name) { return std::find(call.begin(), call.end(), name) != call.end(); }, memory);
    table.region->prepare(element_type(placement), placement.device);
  }
}

void WanRegions::prewarm(std::int64_t tokens, std::int64_t text) const {
  for (const auto& table : tables_)
    table->region->prewarm(element_type(placement_), placement_.device,
                           {{"batch", 1}, {"tokens", tokens}, {"text", text}});
}

at::Tensor WanRegions::rope_rows(const at::Tensor& rope) {
  return at::view_as_real(rope).view({rope.size(1), 2 * rope.size(3)});
}

void WanRegions::block(std::size_t expert, std::size_t index, at::Tensor& x, const at::Tensor& text,
                       const at::Tensor& rows, const at::Tensor& rope, region::Mode mode) const {
  const auto& [table, row] = experts_[expert][index];
  std::vector<at::Tensor> inputs = table->weights.take(row);
  auto position = table->given.begin();
  for (const at::Tensor* given : {&std::as_const(x), &text, &rope}) inputs[*position++] = *given;
  for (std::int64_t i = 0; i < rows.size(1); ++i) inputs[*position++] = rows.narrow(1, i, 1);
  std::vector<at::Tensor> outputs{x};
  table->region->run(inputs, outputs, mode);
  x = std::move(outputs[0]);
}

}  // namespace ditfleet::pipeline
