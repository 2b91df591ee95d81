#include "pipeline/models/flux/regions.h"

#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <future>
#include <map>

#include "pipeline/device/failure.h"
#include "pipeline/region/blocks/blocks.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::pipeline {
namespace {

using Slots = std::map<std::string, at::Tensor>;

void add(Slots& slots, const std::string& name, const LinearSlot& linear) {
  slots[name + ".weight"] = linear.weight;
  slots[name + ".bias"] = linear.bias;
}

void add(Slots& slots, const std::string& prefix, const StreamSlots& stream) {
  add(slots, prefix + "qkv", stream.qkv);
  slots[prefix + "norm_q"] = stream.norm_q;
  slots[prefix + "norm_k"] = stream.norm_k;
  add(slots, prefix + "out", stream.out);
  add(slots, prefix + "mlp_in", stream.mlp_in);
  add(slots, prefix + "mlp_out", stream.mlp_out);
}

Slots slots_of(const DoubleBlockSlots& block) {
  Slots slots;
  add(slots, "image.", block.image);
  add(slots, "text.", block.text);
  return slots;
}

Slots slots_of(const SingleBlockSlots& block) {
  Slots slots;
  add(slots, "qkv", block.qkv);
  slots["norm_q"] = block.norm_q;
  slots["norm_k"] = block.norm_k;
  add(slots, "mlp_in", block.mlp_in);
  add(slots, "out", block.out);
  return slots;
}

// What each call gives, in this order.
const std::vector<std::string> kDoubleCall = {"image", "text", "rope",
                                              "image.attention_shift", "image.attention_scale", "image.attention_gate",
                                              "image.mlp_shift", "image.mlp_scale", "image.mlp_gate",
                                              "text.attention_shift", "text.attention_scale", "text.attention_gate",
                                              "text.mlp_shift", "text.mlp_scale", "text.mlp_gate"};
const std::vector<std::string> kSingleCall = {"tokens", "rope", "shift", "scale", "gate"};

template <class Block, class Table>
void fill(Table& table, const std::vector<Block>& blocks, const std::vector<std::string>& call) {
  const auto names = table.region->input_names();
  for (const auto& name : call) {
    const auto at = std::find(names.begin(), names.end(), name);
    if (at == names.end()) fail(Code::kInternal, "the region has no input " + name);
    table.activations.push_back(static_cast<int>(at - names.begin()));
  }
  for (const Block& block : blocks) {
    const Slots slots = slots_of(block);
    auto& row = table.rows.emplace_back();
    for (const auto& name : names) {
      const auto at = slots.find(name);
      if (at == slots.end() && std::find(call.begin(), call.end(), name) == call.end()) fail(Code::kInternal, "no slot is called " + name);
      row.push_back(at == slots.end() ? at::Tensor() : at->second);
    }
  }
}

}  // namespace

FluxRegions::FluxRegions(const FluxConfig& config, const FluxSlots& slots, Placement placement, std::shared_ptr<region::RegionHost> host)
    : host_(host) {
  const auto recipe = [&](auto make) {
    return [=, heads = config.heads, head_dim = config.head_dim](region::ElementType type) {
      return make(region::BlockShape{.heads = heads, .head_dim = head_dim, .type = type});
    };
  };
  double_.region = std::make_unique<region::Region>("flux.double", recipe(region::flux_double_block), host);
  single_.region = std::make_unique<region::Region>("flux.single", recipe(region::flux_single_block), host);
  fill(double_, slots.double_blocks, kDoubleCall);
  fill(single_, slots.single_blocks, kSingleCall);
  const auto type = placement.dtype == c10::ScalarType::Float ? region::ElementType::kF32 : region::ElementType::kBF16;
  std::future<void> other;  // both at once
  if (!slots.single_blocks.empty())
    other = std::async(std::launch::async, [&, context = telemetry::current_span()] {
      const telemetry::ContextScope scope(context);
      single_.region->prepare(type, placement.device);
    });
  if (!slots.double_blocks.empty()) double_.region->prepare(type, placement.device);
  if (other.valid()) other.get();
}

at::Tensor FluxRegions::rope_rows(const at::Tensor& rope) {
  return at::view_as_real(rope).view({rope.size(1), 2 * rope.size(3)});
}

void FluxRegions::double_block(std::size_t index, at::Tensor& image, at::Tensor& text, bool text_is_mine, const DoubleModulation& m,
                               const at::Tensor& rope, region::Mode mode) const {
  std::vector<at::Tensor> inputs = double_.rows[index];
  const at::Tensor* given[] = {&image, &text, &rope,
                               &m.image_attention.shift, &m.image_attention.scale, &m.image_attention.gate,
                               &m.image_mlp.shift, &m.image_mlp.scale, &m.image_mlp.gate,
                               &m.text_attention.shift, &m.text_attention.scale, &m.text_attention.gate,
                               &m.text_mlp.shift, &m.text_mlp.scale, &m.text_mlp.gate};
  for (std::size_t i = 0; i < double_.activations.size(); ++i) inputs[static_cast<std::size_t>(double_.activations[i])] = *given[i];
  std::vector<at::Tensor> outputs{image, text_is_mine ? text : at::Tensor()};
  double_.region->run(inputs, outputs, mode);
  image = std::move(outputs[0]);
  text = std::move(outputs[1]);
}

void FluxRegions::single_block(std::size_t index, at::Tensor& tokens, const Modulation& m, const at::Tensor& rope, region::Mode mode) const {
  std::vector<at::Tensor> inputs = single_.rows[index];
  const at::Tensor* given[] = {&tokens, &rope, &m.shift, &m.scale, &m.gate};
  for (std::size_t i = 0; i < single_.activations.size(); ++i) inputs[static_cast<std::size_t>(single_.activations[i])] = *given[i];
  std::vector<at::Tensor> outputs{tokens};
  single_.region->run(inputs, outputs, mode);
  tokens = std::move(outputs[0]);
}

}  // namespace ditfleet::pipeline
