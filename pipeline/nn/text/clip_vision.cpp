#include "pipeline/nn/text/clip_vision.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "shared/media/resize.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMostPixels = 4096;

std::array<float, 3> three(const ConfigFile& file, const char* field, const std::vector<double>& otherwise) {
  const std::vector<double> values = file.numbers(field, otherwise);
  if (values.size() != 3) file.refuse(std::string(field) + " must have 3 entries");
  std::array<float, 3> made{};
  std::transform(values.begin(), values.end(), made.begin(), [](double value) { return static_cast<float>(value); });
  return made;
}

// A number, or an object with one of the keys.
std::int64_t side_of(const ConfigFile& file, const char* field, std::initializer_list<const char*> keys) {
  constexpr std::int64_t kDefault = 224;
  const json::value* given = file.fields().if_contains(field);
  if (!given || !given->is_object()) return file.integer(field, kDefault, 1, kMostPixels);
  const auto sides = file.child(field);
  std::int64_t side = 0;
  for (const char* key : keys) {
    const std::int64_t one = sides->integer(key, 0, 0, kMostPixels);
    if (one == 0 || (side != 0 && one != side))
      file.refuse(std::string(field) + " must have " + (keys.size() > 1 ? "equal " : "") + *keys.begin() +
                  (keys.size() > 1 ? std::string(" and ") + *(keys.begin() + 1) : ""));
    side = one;
  }
  return side;
}

}  // namespace

ClipVisionConfig read_clip_vision_config(const ConfigFile& file) {
  if (const auto vision = file.child("vision_config")) return read_clip_vision_config(*vision);
  ClipVisionConfig c{};
  c.layers = read_clip_layers_config(file, {.hidden_size = 768, .intermediate_size = 3072, .num_attention_heads = 12});
  c.image_size = file.integer("image_size", 224, 1, kMostPixels);
  c.patch_size = file.integer("patch_size", 32, 1, c.image_size);
  if (c.layers.num_hidden_layers < 1) file.refuse("num_hidden_layers must be at least 1");
  if (file.integer("num_channels", 3, 1, 100) != 3) file.refuse("num_channels must be 3");
  return c;
}

ClipProcessorConfig read_clip_processor_config(const ConfigFile& file) {
  for (const char* step : {"do_resize", "do_center_crop", "do_rescale", "do_normalize"})
    if (!file.boolean(step, true)) file.refuse(std::string(step) + " must be true");
  if (file.integer("resample", 3, 0, 100) != 3) file.refuse("resample must be 3 (bicubic)");
  if (const double factor = file.number("rescale_factor", 1.0 / 255); factor < 0.99 / 255 || factor > 1.01 / 255)
    file.refuse("rescale_factor must be 1 / 255");
  ClipProcessorConfig c{};
  c.short_side = side_of(file, "size", {"shortest_edge"});
  c.size = side_of(file, "crop_size", {"height", "width"});
  if (c.size > c.short_side) file.refuse("crop_size is larger than size; pictures are not padded");
  c.mean = three(file, "image_mean", {0.48145466, 0.4578275, 0.40821073});
  c.std = three(file, "image_std", {0.26862954, 0.26130258, 0.27577711});
  return c;
}

at::Tensor clip_pixels(const media::Media& picture, const ClipProcessorConfig& c) {
  const std::int64_t least = std::min(picture.width, picture.height), most = std::max(picture.width, picture.height);
  const auto side = [&](std::int64_t length) {
    return length == least
               ? c.short_side
               : static_cast<std::int64_t>(static_cast<double>(c.short_side * most) / static_cast<double>(least));
  };
  const std::int64_t width = side(picture.width), height = side(picture.height);
  const media::Media resized = media::resize_bicubic(picture, static_cast<int>(width), static_cast<int>(height));
  const at::Tensor bytes = at::from_blob(const_cast<std::uint8_t*>(resized.rgb.data()), {height, width, 3},
                                         at::TensorOptions(c10::ScalarType::Byte));
  const at::Tensor middle = bytes.narrow(0, (height - c.size) / 2, c.size).narrow(1, (width - c.size) / 2, c.size);
  const at::Tensor unit = (middle.to(c10::ScalarType::Double) * (1.0 / 255)).to(c10::ScalarType::Float);
  return ((unit - at::tensor(at::ArrayRef<float>(c.mean))) / at::tensor(at::ArrayRef<float>(c.std)))
      .permute({2, 0, 1})
      .unsqueeze(0)
      .contiguous();
}

ClipVision ClipVision::load(const ComponentFiles& from, Placement placement) {
  ClipVision m;
  m.config_ = read_clip_vision_config(ConfigFile(from.dir + "/config.json"));
  m.placement_ = placement;
  auto p = Parameters::open(from, Library::kTransformers, placement);
  // transformers 4 saved the names below "vision_model."; 5 saves them bare.
  const std::string at = p.contains("vision_model.embeddings.class_embedding") ? "vision_model." : "";
  const std::int64_t d = m.config_.layers.hidden_size, patch = m.config_.patch_size,
                     last = m.config_.layers.num_hidden_layers - 1;
  m.class_embedding_ = p.tensor(at + "embeddings.class_embedding", {d});
  m.patch_embedding_ = p.tensor(at + "embeddings.patch_embedding.weight", {d, 3, patch, patch});
  m.position_embedding_ = p.tensor(at + "embeddings.position_embedding.weight", {m.config_.tokens(), d});
  m.norm_ = p.norm(at + "pre_layrnorm", d);  // the name in transformers
  m.layers_ = ClipLayers::load(p, at + "encoder.layers.", m.config_.layers, last);
  p.skip(at + "encoder.layers." + std::to_string(last) + ".");
  std::vector<const LinearSlot*> linears;
  std::vector<at::Tensor> tensors{m.class_embedding_, m.patch_embedding_, m.position_embedding_, m.norm_.weight,
                                  m.norm_.bias};
  m.layers_.add_to(linears, tensors);
  m.parts_ = std::make_shared<PartSequence>(placement, "clip", /*repeats=*/false);
  add_part(*m.parts_, linears, tensors);
  p.finish(at + "encoder.");
  m.bytes_ = p.bytes();
  m.linears_ = p.linears();
  return m;
}

at::Tensor ClipVision::hidden(const at::Tensor& pixels) const {
  PartSequence::Pass pass(parts_.get());
  pass.begin(0);
  const at::Tensor x = pixels.to(placement_.device, placement_.dtype);
  const at::Tensor patches = at::conv2d(x, patch_embedding_, {}, config_.patch_size).flatten(2).transpose(1, 2);
  at::Tensor tokens = at::cat({class_embedding_.expand({x.size(0), 1, -1}), patches}, 1) + position_embedding_;
  tokens =
      at::layer_norm(tokens, {config_.layers.hidden_size}, norm_.weight, norm_.bias, config_.layers.layer_norm_eps);
  tokens = layers_.run(std::move(tokens), /*causal=*/false);
  pass.end(0);
  return tokens;
}

}  // namespace ditfleet::pipeline
