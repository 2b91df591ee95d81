#include "pipeline/nn/text/clip_encoder.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/layer_norm.h>

#include <algorithm>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/nn/text/token_tensor.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = 1 << 24;  // beyond any sensible size, below any overflow

bool takes_nf4(std::string_view) { return true; }

}  // namespace

ClipConfig read_clip_config(const ConfigFile& file) {
  if (const auto text = file.child("text_config")) return read_clip_config(*text);
  ClipConfig c{};
  c.layers = read_clip_layers_config(file, {.hidden_size = 512, .intermediate_size = 2048, .num_attention_heads = 8});
  c.vocab_size = file.integer("vocab_size", 49408, 1, kMost);
  c.max_position_embeddings = file.integer("max_position_embeddings", 77, 1, kMost);
  c.eos_token_id = file.integer("eos_token_id", 49407, 0, kMost);
  return c;
}

ClipEncoder ClipEncoder::load(const ComponentFiles& from, Placement placement,
                              std::shared_ptr<region::RegionHost> regions, const std::string& quantize) {
  ClipEncoder m;
  m.config_ = read_clip_config(ConfigFile(from.dir + "/config.json"));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  p.set_regions(std::move(regions));
  if (!quantize.empty()) p.quantize_on_load(quantize, takes_nf4);
  // transformers 4 saved the names below "text_model."; 5 saves them bare.
  const std::string at = p.contains("text_model.embeddings.token_embedding.weight") ? "text_model." : "";
  const std::int64_t d = m.config_.layers.hidden_size;
  m.token_embedding_ = p.tensor(at + "embeddings.token_embedding.weight", {m.config_.vocab_size, d});
  m.position_embedding_ = p.tensor(at + "embeddings.position_embedding.weight", {m.config_.max_position_embeddings, d});
  m.layers_ = ClipLayers::load(p, at + "encoder.layers.", m.config_.layers, m.config_.layers.num_hidden_layers);
  m.final_norm_ = p.norm(at + "final_layer_norm", d);
  std::vector<const LinearSlot*> linears;
  std::vector<at::Tensor> tensors{m.token_embedding_, m.position_embedding_, m.final_norm_.weight, m.final_norm_.bias};
  m.layers_.add_to(linears, tensors);
  m.parts_ = std::make_shared<PartSequence>(placement, "clip", /*repeats=*/false);
  add_part(*m.parts_, linears, tensors);
  p.finish(at + "encoder.");
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

at::Tensor ClipEncoder::pooled(const std::vector<std::int32_t>& ids) const {
  const auto length = static_cast<std::int64_t>(ids.size());
  if (length < 1 || length > config_.max_position_embeddings)
    fail(Code::kDataCorrupt, "[clip] the tokenizer gives " + std::to_string(length) +
                                 " ids, but the text encoder has " + std::to_string(config_.max_position_embeddings) +
                                 " positions; check model_max_length in tokenizer_config.json");
  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  at::Tensor hidden =
      at::embedding(token_embedding_, token_tensor(ids, config_.vocab_size, placement_.device, "clip")) +
      position_embedding_.slice(0, 0, length);
  hidden = at::layer_norm(layers_.run(std::move(hidden), /*causal=*/true), {config_.layers.hidden_size},
                          final_norm_.weight, final_norm_.bias, config_.layers.layer_norm_eps);
  pass.end(0);
  auto end = std::find(ids.begin(), ids.end(), static_cast<std::int32_t>(config_.eos_token_id));
  if (config_.eos_token_id == 2) end = std::max_element(ids.begin(), ids.end());
  if (end == ids.end()) end = ids.begin();  // as argmax over no match does
  return hidden.select(1, end - ids.begin()).contiguous();
}

}  // namespace ditfleet::pipeline
