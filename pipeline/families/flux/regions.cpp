#include "pipeline/families/flux/regions.h"

#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <future>
#include <map>
#include <set>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/block_programs.h"
#include "shared/core/background_threads.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::pipeline {
namespace {

// What each call gives, in this order.
std::vector<std::string> double_call() {
  std::vector<std::string> names = {"image", "text", "rope"};
  for (const char* rows : {"image.attention_", "image.mlp_", "text.attention_", "text.mlp_"})
    for (const char* row : {"shift", "scale", "gate"}) names.push_back(std::string(rows) + row);
  return names;
}
const std::vector<std::string> kSingleCall = {"tokens", "rope", "shift", "scale", "gate"};

// The linears that adapters change, by their names in the programs.
std::vector<std::pair<std::string, const LinearSlot*>> linears_of(const DoubleBlockSlots& block) {
  std::vector<std::pair<std::string, const LinearSlot*>> linears;
  for (const auto& [prefix, stream] : {std::pair("image.", &block.image), std::pair("text.", &block.text)})
    for (const auto& [name, slot] : {std::pair("qkv", &stream->qkv), std::pair("out", &stream->out),
                                     std::pair("mlp_in", &stream->mlp_in), std::pair("mlp_out", &stream->mlp_out)})
      linears.emplace_back(std::string(prefix) + name, slot);
  return linears;
}
std::vector<std::pair<std::string, const LinearSlot*>> linears_of(const SingleBlockSlots& block) {
  return {{"qkv", &block.qkv}, {"mlp_in", &block.mlp_in}, {"out", &block.out}};
}

template <class Block>
Weights weights_of_linears(const Block& block) {
  Weights weights;
  for (const auto& [name, linear] : linears_of(block)) add_linear(weights, name, *linear);
  return weights;
}

Weights weights_of(const DoubleBlockSlots& block) {
  Weights weights = weights_of_linears(block);
  weights.emplace("image.norm_q", block.image.norm_q);
  weights.emplace("image.norm_k", block.image.norm_k);
  weights.emplace("text.norm_q", block.text.norm_q);
  weights.emplace("text.norm_k", block.text.norm_k);
  return weights;
}

Weights weights_of(const SingleBlockSlots& block) {
  Weights weights = weights_of_linears(block);
  weights.emplace("norm_q", block.norm_q);
  weights.emplace("norm_k", block.norm_k);
  return weights;
}

using Weight = region::Builder::Weight;

// How a program sees each linear. Without adapters, values of quantized weights are weights like others.
template <class Block>
std::vector<Weight> forms_of(const Block& block, Placement placement, bool adapted) {
  std::vector<Weight> forms;
  for (const auto& [name, slot] : linears_of(block)) {
    const QuantizedWeight* quantized = slot->quantized.get();
    forms.push_back(!quantized                              ? Weight::kOwn
                    : quantized->dynamic                    ? Weight::kF8
                    : quantized->compute != placement.dtype ? Weight::kWide
                    : adapted                               ? Weight::kApart
                                                            : Weight::kOwn);
  }
  return forms;
}

// Of all blocks, in one order.
template <class F>
void each_linear(const FluxSlots& slots, F visit) {
  for (const auto& block : slots.double_blocks)
    for (const auto& [name, slot] : linears_of(block)) visit(*slot);
  for (const auto& block : slots.single_blocks)
    for (const auto& [name, slot] : linears_of(block)) visit(*slot);
}

AdapterColumns::Terms terms_of(const FluxSlots& slots) {
  AdapterColumns::Terms terms;
  each_linear(slots, [&](const LinearSlot& slot) { terms.push_back(&slot.low_rank); });
  return terms;
}

region::ElementType element_type(Placement placement) {
  return placement.dtype == c10::ScalarType::Float ? region::ElementType::kF32 : region::ElementType::kBF16;
}

region::BlockShape shape_of(const FluxConfig& config, region::ElementType type, bool adapted,
                            const std::vector<Weight>& forms) {
  return {.heads = config.heads, .head_dim = config.head_dim, .type = type, .adapters = adapted, .weights = forms};
}

int position_of(const std::vector<std::string>& names, const std::string& name) {
  const auto at = std::find(names.begin(), names.end(), name);
  if (at == names.end()) fail(Code::kInternal, "the region has no input " + name);
  return static_cast<int>(at - names.begin());
}

}  // namespace

std::vector<region::Program> FluxRegions::programs(const FluxConfig& config, const FluxSlots& slots,
                                                   Placement placement) {
  std::vector<region::Program> made;
  const auto add = [&](auto make, const auto& blocks, bool adapted) {
    std::set<std::vector<Weight>> forms;
    for (const auto& block : blocks) forms.insert(forms_of(block, placement, adapted));
    for (const auto& one : forms) made.push_back(unwrap(make(shape_of(config, element_type(placement), adapted, one))));
  };
  for (const bool adapted : {false, true}) {
    add(region::flux_double_block, slots.double_blocks, adapted);
    add(region::flux_single_block, slots.single_blocks, adapted);
  }
  return made;
}

template <class BlockSlots, class Make>
void FluxRegions::add_blocks(const std::vector<BlockSlots>& blocks, const FluxConfig& config, Placement placement,
                             Make make, const std::vector<std::string>& call, bool adapted, std::vector<Block>& made) {
  std::map<std::vector<Weight>, std::vector<std::size_t>> by_forms;
  for (std::size_t i = 0; i < blocks.size(); ++i) by_forms[forms_of(blocks[i], placement, adapted)].push_back(i);
  for (const auto& [forms, indices] : by_forms) {
    Table& table = *tables_.emplace_back(std::make_unique<Table>());
    const auto recipe = [=, forms = forms](auto type) { return make(shape_of(config, type, adapted, forms)); };
    table.region = std::make_unique<region::Region>(unwrap(recipe(region::ElementType::kF32)).block, recipe, host_);
    const auto names = table.region->input_names();
    for (const auto& name : call) table.activations.push_back(position_of(names, name));
    if (adapted)
      for (std::size_t l = 0; const auto& [name, slot] : linears_of(blocks[indices.front()]))
        table.linears.emplace_back(position_of(names, name + (forms[l++] == Weight::kOwn ? ".weight" : ".up")),
                                   position_of(names, name + ".adapter"));
    const auto is_given = [&](const std::string& name) {
      return std::find(call.begin(), call.end(), name) != call.end() ||
             (adapted && (name.ends_with(".adapter") || name.ends_with(".up")));
    };
    std::vector<Weights> weights;
    for (const std::size_t i : indices) {
      (adapted ? made[i].adapted : made[i].plain) = &table;
      (adapted ? made[i].adapted_row : made[i].row) = weights.size();
      weights.push_back(weights_of(blocks[i]));
    }
    table.weights = BlockWeights(names, weights, is_given, memory_);
  }
}

FluxRegions::FluxRegions(const FluxConfig& config, const FluxSlots& slots, Placement placement,
                         std::shared_ptr<region::RegionHost> host, std::shared_ptr<PartSequence> blocks)
    : host_(host), double_(slots.double_blocks.size()), single_(slots.single_blocks.size()) {
  std::vector<std::vector<LinearSlot>> linears;
  std::size_t count = 0;
  bool room = true;
  for (std::size_t i = 0; i < double_.size() + single_.size(); ++i) {
    const bool is_double = i < double_.size();
    (is_double ? double_[i] : single_[i - double_.size()]).first_linear = count;
    const auto of_block =
        is_double ? linears_of(slots.double_blocks[i]) : linears_of(slots.single_blocks[i - double_.size()]);
    count += of_block.size();
    auto& of_columns = linears.emplace_back();
    for (const auto& [name, slot] : of_block) {
      of_columns.push_back(*slot);
      room = room && slot->lora_columns.count > 0;
    }
  }
  room = room && count > 0;
  for (const bool adapted : {false, true}) {
    if (adapted && !room) continue;
    add_blocks(slots.double_blocks, config, placement, region::flux_double_block, double_call(), adapted, double_);
    add_blocks(slots.single_blocks, config, placement, region::flux_single_block, kSingleCall, adapted, single_);
  }
  const auto type = element_type(placement);
  BackgroundThreads threads("prepare", std::max<std::size_t>(1, tables_.size()));  // all at once
  std::vector<std::future<void>> running;
  for (const auto& table : tables_)
    running.push_back(threads.run([&, context = telemetry::current_span()] {
      const telemetry::ContextScope scope(context);
      table->region->prepare(type, placement.device);
    }));
  if (room)
    columns_ =
        std::make_unique<AdapterColumns>(std::move(linears), region::make_matrix_copies(*host), std::move(blocks));
  for (auto& one : running) one.get();
}

// Blocks with adapters attend at the same strides, and to a library a picture's tokens and both streams' together are
// one shape.
void FluxRegions::prewarm(Placement placement, std::int64_t text_tokens, std::int64_t image_tokens) const {
  const auto type = element_type(placement);
  if (!double_.empty())
    double_.front().plain->region->prewarm(type, placement.device,
                                           {{"batch", 1}, {"text", text_tokens}, {"image", image_tokens}});
  if (!single_.empty())
    single_.front().plain->region->prewarm(type, placement.device,
                                           {{"batch", 1}, {"tokens", text_tokens + image_tokens}});
}

std::string FluxRegions::adapter_problem(const FluxSlots& slots) const {
  return AdapterColumns::problem(columns_.get(), terms_of(slots));
}

std::shared_ptr<const FluxAdapters> FluxRegions::plan(const FluxSlots& slots) const {
  if (!columns_) return nullptr;
  auto made = std::make_shared<FluxAdapters>();
  made->layout = columns_->plan(terms_of(slots));
  for (const auto& operands : made->layout->operands) made->signature.push_back(operands.adapter.size(1));
  return made;
}

at::Tensor FluxRegions::rope_rows(const at::Tensor& rope) {
  return at::view_as_real(rope).view({rope.size(1), 2 * rope.size(3)});
}

void FluxRegions::run(const Block& block, std::initializer_list<const at::Tensor*> given,
                      std::vector<at::Tensor>& outputs, region::Mode mode, const FluxAdapters* adapters,
                      const parallel::Sequence* sequence) const {
  const auto* operands = adapters ? &adapters->layout->operands[block.first_linear] : nullptr;
  const bool changed = operands && std::any_of(operands, operands + block.adapted->linears.size(),
                                               [](const auto& linear) { return linear.adapter.size(1) > 0; });
  const Table& table = changed ? *block.adapted : *block.plain;
  std::vector<at::Tensor> inputs = table.weights.take(changed ? block.adapted_row : block.row);
  for (const auto& [weight, adapter] : table.linears) {
    inputs[static_cast<std::size_t>(weight)] = operands->weight;
    inputs[static_cast<std::size_t>(adapter)] = operands++->adapter;
  }
  auto position = table.activations.begin();
  for (const at::Tensor* tensor : given) inputs[static_cast<std::size_t>(*position++)] = *tensor;
  table.region->run(inputs, outputs, mode, sequence);
}

void FluxRegions::double_block(std::size_t index, at::Tensor& image, at::Tensor& text, bool text_is_mine,
                               const DoubleModulation& m, const at::Tensor& rope, region::Mode mode,
                               const FluxAdapters* adapters, const parallel::Sequence* sequence) const {
  if (adapters && index > 0) join_adapters();
  std::vector<at::Tensor> outputs{image, text_is_mine ? text : at::Tensor()};
  run(double_[index],
      {&image, &text, &rope, &m.image_attention.shift, &m.image_attention.scale, &m.image_attention.gate,
       &m.image_mlp.shift, &m.image_mlp.scale, &m.image_mlp.gate, &m.text_attention.shift, &m.text_attention.scale,
       &m.text_attention.gate, &m.text_mlp.shift, &m.text_mlp.scale, &m.text_mlp.gate},
      outputs, mode, adapters, sequence);
  image = std::move(outputs[0]);
  text = std::move(outputs[1]);
}

void FluxRegions::single_block(std::size_t index, at::Tensor& tokens, const Modulation& m, const at::Tensor& rope,
                               region::Mode mode, const FluxAdapters* adapters,
                               const parallel::Sequence* sequence) const {
  if (adapters && index + double_.size() > 0) join_adapters();
  std::vector<at::Tensor> outputs{tokens};
  run(single_[index], {&tokens, &rope, &m.shift, &m.scale, &m.gate}, outputs, mode, adapters, sequence);
  tokens = std::move(outputs[0]);
}

}  // namespace ditfleet::pipeline
