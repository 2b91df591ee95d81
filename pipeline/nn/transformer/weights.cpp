#include "pipeline/nn/transformer/weights.h"

#include <ATen/ops/zeros.h>

namespace ditfleet::pipeline {
namespace {

std::vector<std::string> with_prefix(const std::string& prefix, std::vector<std::string> names) {
  for (std::string& name : names) name.insert(0, prefix);
  return names;
}

std::string prefix_of(const BlockSpec& spec, std::int64_t block) { return spec.prefix + std::to_string(block) + "."; }

LinearSlot load_linear(const LinearSpec& spec, const std::string& prefix, Parameters& p, std::int64_t adapter_rank) {
  const std::vector<std::string> names = with_prefix(prefix, spec.names);
  if (spec.type)
    return {p.tensor(names.front() + ".weight", {spec.out, spec.in}, spec.type),
            p.tensor(names.front() + ".bias", {spec.out}, spec.type)};
  const auto columns = spec.input.empty() ? 0 : static_cast<std::int64_t>(names.size()) * adapter_rank;
  LinearSlot slot = p.stacked_linear(names, spec.in, spec.out, spec.bias, {columns, spec.columns_before});
  if (!spec.bias)
    slot.bias = at::zeros({slot.out()}, at::TensorOptions(p.placement().dtype).device(p.placement().device));
  return slot;
}

}  // namespace

TransformerWeights load_weights(const TransformerSpec& spec, Parameters& p, std::int64_t adapter_rank,
                                const TransformerParts& parts) {
  TransformerWeights made;
  for (const LinearSpec& linear : spec.linears) made.linears.push_back(load_linear(linear, "", p, 0));
  for (const TensorSpec& tensor : spec.tensors)
    made.tensors.push_back(p.tensor(tensor.name, tensor.shape, tensor.type));
  for (std::size_t kind = 0; kind < spec.blocks.size(); ++kind) {
    const BlockSpec& of_blocks = spec.blocks[kind];
    for (std::int64_t i = 0; i < of_blocks.count; ++i) {
      const std::string prefix = prefix_of(of_blocks, i);
      TransformerBlock& block = made.blocks.emplace_back(TransformerBlock{kind, {}, {}});
      for (const LinearSpec& linear : of_blocks.linears)
        block.linears.push_back(load_linear(linear, prefix, p, of_blocks.apart ? 0 : adapter_rank));
      std::vector<const LinearSlot*> apart;
      for (std::size_t l = 0; l < block.linears.size(); ++l)
        if (of_blocks.apart || of_blocks.linears[l].input.empty()) apart.push_back(&block.linears[l]);
      if (parts.apart) add_part(*parts.apart, apart);
      if (parts.blocks) add_part(*parts.blocks, program_linears(spec, block));
      for (const TensorSpec& tensor : of_blocks.tensors)
        block.tensors.push_back(p.tensor(prefix + tensor.name, tensor.shape, tensor.type));
    }
  }
  return made;
}

TransformerWeights weight_formats(const TransformerSpec& spec, const Parameters& p) {
  TransformerWeights made;
  for (std::size_t kind = 0; kind < spec.blocks.size(); ++kind)
    for (std::int64_t i = 0; i < spec.blocks[kind].count; ++i) {
      TransformerBlock& block = made.blocks.emplace_back(TransformerBlock{kind, {}, {}});
      for (const LinearSpec& linear : spec.blocks[kind].linears)
        block.linears.emplace_back().quantized = p.format_of(with_prefix(prefix_of(spec.blocks[kind], i), linear.names),
                                                             linear.in, Shape(linear.names.size(), linear.out));
    }
  return made;
}

void each_linear(const TransformerSpec& spec,
                 const std::function<void(const LinearSpec&, const std::vector<std::string>&)>& visit) {
  for (const LinearSpec& linear : spec.linears) visit(linear, linear.names);
  for (const BlockSpec& blocks : spec.blocks)
    for (std::int64_t i = 0; i < blocks.count; ++i)
      for (const LinearSpec& linear : blocks.linears) visit(linear, with_prefix(prefix_of(blocks, i), linear.names));
}

std::vector<NamedLinear> named_linears(const TransformerSpec& spec, TransformerWeights& weights) {
  std::vector<LinearSlot*> slots;
  for (LinearSlot& slot : weights.linears) slots.push_back(&slot);
  for (TransformerBlock& block : weights.blocks)
    for (LinearSlot& slot : block.linears) slots.push_back(&slot);
  std::vector<NamedLinear> all;
  each_linear(spec, [&, next = slots.begin()](const LinearSpec&, const std::vector<std::string>& names) mutable {
    add_stacked(all, **next++, names);
  });
  return all;
}

std::vector<const LinearSlot*> program_linears(const TransformerSpec& spec, const TransformerBlock& block) {
  std::vector<const LinearSlot*> linears;
  const BlockSpec& blocks = spec.blocks[block.spec];
  for (std::size_t i = 0; i < block.linears.size(); ++i)
    if (!blocks.apart && !blocks.linears[i].input.empty()) linears.push_back(&block.linears[i]);
  return linears;
}

}  // namespace ditfleet::pipeline
