#include "shared/job/shape_class.h"

#include <array>
#include <charconv>
#include <string_view>
#include <vector>

namespace ditfleet::job {
namespace {

constexpr std::array<std::string_view, 3> kGuidanceNames = {"none", "embedded", "true_cfg"};
constexpr std::string_view kScheduler = "flow-euler";

bool read_int(std::string_view text, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

// Takes the part after the last `separator` off `text`; a model's name may itself contain separators.
std::string_view take_last(std::string_view& text, char separator) {
  const auto at = text.rfind(separator);
  const auto part = at == std::string_view::npos ? text : text.substr(at + 1);
  text = at == std::string_view::npos ? std::string_view() : text.substr(0, at);
  return part;
}

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
  return out;
}

std::optional<ShapeClass> parse_class_key(std::string_view key) {
  ShapeClass out;
  out.precision = take_last(key, '/');
  const auto tokens = take_last(key, '/'), guidance = take_last(key, '/');
  auto size = take_last(key, '/');
  const auto frames = take_last(size, 'x'), height = take_last(size, 'x');
  out.model = key;
  if (out.model.empty() || out.precision.empty() || !read_int(tokens, out.text_tokens) || !read_int(size, out.width) ||
      !read_int(height, out.height) || !read_int(frames, out.frames)) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i < kGuidanceNames.size(); ++i) {
    if (kGuidanceNames[i] != guidance) continue;
    out.guidance = static_cast<GuidanceKind>(i);
    return out;
  }
  return std::nullopt;
}

ShapeClass shape_class_of(const JobSpec& spec, const std::string& precision) {
  ShapeClass out;
  out.model = spec.model;
  out.width = static_cast<int>(spec.fields.integer("width").value_or(0));
  out.height = static_cast<int>(spec.fields.integer("height").value_or(0));
  out.frames = static_cast<int>(spec.fields.integer("num_frames").value_or(1));
  out.text_tokens = static_cast<int>(spec.fields.integer("max_sequence_length").value_or(512));
  out.precision = precision;
  // As FluxPipeline: true CFG needs both a scale above one and a negative prompt.
  if (spec.fields.real("true_cfg_scale").value_or(1.0) > 1.0 && spec.fields.has("negative_prompt")) {
    out.guidance = GuidanceKind::kTrueCfg;
  } else if (spec.fields.has("guidance_scale")) {
    out.guidance = GuidanceKind::kEmbedded;
  }
  return out;
}

std::string batch_key_of(const JobSpec& spec, const std::string& precision) {
  std::string out = shape_class_of(spec, precision).key();
  out += '/';
  out += std::to_string(spec.fields.integer("num_inference_steps").value_or(0));
  out += '/';
  out += kScheduler;
  return out;
}

std::optional<BatchKey> parse_batch_key(std::string_view key) {
  BatchKey out;
  out.scheduler = take_last(key, '/');
  const auto steps = take_last(key, '/');
  const auto shape = parse_class_key(key);
  if (!shape || out.scheduler.empty() || !read_int(steps, out.steps)) return std::nullopt;
  out.shape = *shape;
  return out;
}

}  // namespace ditfleet::job
