#include "shared/job/shape_class.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "shared/core/text.h"
#include "shared/job/object_reader.h"

namespace ditfleet::job {
namespace {

constexpr std::array<std::string_view, 3> kGuidanceNames = {"none", "embedded", "true_cfg"};
constexpr std::string_view kCache = "+cache", kImages = "+images";

// Removes and returns the part of `text` after the last `separator`. A model's name may contain separators.
std::string_view take_last(std::string_view& text, char separator) {
  const auto at = text.rfind(separator);
  const auto part = at == std::string_view::npos ? text : text.substr(at + 1);
  text = at == std::string_view::npos ? std::string_view() : text.substr(0, at);
  return part;
}

int hundredths(double threshold) { return std::max(1, static_cast<int>(std::lround(100 * threshold))); }

}  // namespace

std::string ShapeClass::key() const {
  std::string out = model;
  out += '/';
  out += std::to_string(width) + 'x' + std::to_string(height) + 'x' + std::to_string(frames);
  out += '/';
  out += kGuidanceNames[static_cast<std::size_t>(guidance)];
  out += '/';
  out += std::to_string(text_tokens);
  out += '/';
  out += precision;
  if (images > 0) out += std::string(kImages) + std::to_string(images);
  if (cache > 0) out += std::string(kCache) + number_text(cache / 100.0);
  return out;
}

std::int64_t ShapeClass::pixels() const {  // a stored key may have any sizes
  const double product = 1.0 * std::max(width, 0) * std::max(height, 0) * std::max(frames, 0);
  return static_cast<std::int64_t>(std::min(product, 0x1p50));
}

std::optional<ShapeClass> parse_class_key(std::string_view key) {
  ShapeClass out;
  std::string_view precision = take_last(key, '/');
  if (const auto at = precision.find(kCache); at != precision.npos) {
    const auto threshold = number_of<double>(precision.substr(at + kCache.size()), 0, 1);
    if (!threshold) return std::nullopt;
    out.cache = hundredths(*threshold);
    precision = precision.substr(0, at);
  }
  if (const auto at = precision.find(kImages); at != precision.npos) {
    const auto images = number_of<int>(precision.substr(at + kImages.size()), 1);
    if (!images) return std::nullopt;
    out.images = *images;
    precision = precision.substr(0, at);
  }
  out.precision = precision;
  const auto tokens = take_last(key, '/'), guidance = take_last(key, '/');
  auto size = take_last(key, '/');
  const auto frames = take_last(size, 'x'), height = take_last(size, 'x');
  out.model = key;
  if (out.model.empty() || out.precision.empty()) return std::nullopt;
  for (const auto& [text, at] :
       {std::pair(tokens, &out.text_tokens), {size, &out.width}, {height, &out.height}, {frames, &out.frames}}) {
    const auto value = number_of<int>(text);
    if (!value) return std::nullopt;
    *at = *value;
  }
  for (std::size_t i = 0; i < kGuidanceNames.size(); ++i) {
    if (kGuidanceNames[i] != guidance) continue;
    out.guidance = static_cast<GuidanceKind>(i);
    return out;
  }
  return std::nullopt;
}

ShapeClass shape_class_of(const JobSpec& spec, const ModelEntry& model, const std::string& precision) {
  const auto integer = [&](Field field, int otherwise) {
    return static_cast<int>(spec.fields.integer(field).value_or(otherwise));
  };
  const int frames = integer("frames", 1);
  const auto limits = model.fields.find("frames");
  const double cache = spec.fields.real("cache").value_or(0);
  return {.model = spec.model,
          .width = integer("width", model.free_width),
          .height = integer("height", model.free_height),
          .frames = limits == model.fields.end() ? frames : static_cast<int>(limits->second.rounded(frames)),
          .guidance = model.guidance ? model.guidance(spec.fields) : GuidanceKind::kNone,
          .text_tokens = integer("max_sequence_length", 512),
          .precision = precision,
          .cache = cache > 0 ? hundredths(cache) : 0,
          .images = model.pixels_per_image > 0 ? static_cast<int>(spec.fields.images("image").size()) : 0};
}

std::int64_t tokens_of(const ShapeClass& shape, const ModelEntry& model) {
  ShapeClass latents = shape;
  latents.frames = static_cast<int>(model.latent_frames(std::max(shape.frames, 1)));
  return (latents.pixels() + shape.images * model.pixels_per_image) / model.pixels_per_token +
         std::max(shape.text_tokens, 0);
}

}  // namespace ditfleet::job
