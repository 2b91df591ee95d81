#include "pipeline/engine/settings.h"

#include <algorithm>
#include <cmath>

#include "pipeline/device/failure.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kMaxLoras = 16;  // of one request

[[noreturn]] void refuse(const std::string& field, const std::string& message) {
  fail(Code::kInvalidArgument, field + " " + message, field);
}

void check_loras(const std::vector<LoraRequest>& loras, const job::ModelEntry& model) {
  if (loras.size() > kMaxLoras)
    refuse("loras",
           "has " + std::to_string(loras.size()) + " entries; at most " + std::to_string(kMaxLoras) + " are allowed");
  for (const LoraRequest& lora : loras) {
    const std::string name = excerpt(lora.name.empty() ? lora.path : lora.name, 200);
    if (!(std::abs(lora.scale) <= job::kMaxLoraScale))
      refuse("loras", "gives " + name + " a scale of " + std::to_string(lora.scale) +
                          "; it must be a finite number from -100 to 100");
    if (lora.expert != job::Expert::kBoth && !model.experts)
      refuse("loras", "gives " + name + " the expert " + std::string(job::expert_name(lora.expert)) +
                          ", but this model has one transformer; leave the expert out");
  }
}

// Within the model's limits. Without a rule of the model, as in diffusers' examples of image to video.
void take_size_from_image(Settings& settings, const job::ModelEntry& model) {
  const Media& image = *(model.sized_by_last_image ? settings.images.back() : settings.images.front());
  const double aspect = static_cast<double>(image.height) / image.width, area = model.free_width * model.free_height;
  const auto set = [&](job::Field field, double length) {
    const job::FieldLimits& limits = model.fields.at(field);
    const auto multiples = [&](double n) {
      return static_cast<std::int64_t>(n) / limits.multiple_of * limits.multiple_of;
    };
    const std::int64_t least = multiples(static_cast<double>(limits.low + limits.multiple_of - 1));
    settings.fields.set(
        field, std::clamp(multiples(std::nearbyint(length)), least, multiples(static_cast<double>(limits.high))));
  };
  if (!model.size_of_image) {
    set("height", std::sqrt(area * aspect));
    set("width", std::sqrt(area / aspect));
    return;
  }
  const auto multiple = static_cast<int>(model.fields.at("width").multiple_of);
  const auto [width, height] = model.size_of_image(image.width, image.height, multiple);
  set("height", height);
  set("width", width);
}

}  // namespace

Settings read_settings(const GenerationRequest& request, const job::ModelEntry& model) {
  Settings s{.prompt = request.prompt,
             .fields = model.defaults,
             .seed = request.seed,
             .number = request.number,
             .loras = request.loras,
             .images = request.images,
             .mask = request.mask};
  const bool sized_by_image =
      model.free_width > 0 && !s.images.empty() && !request.fields.has("width") && !request.fields.has("height");
  if (!is_valid_utf8(s.prompt)) refuse("prompt", "is not valid UTF-8");
  check_loras(s.loras, model);
  if (!s.images.empty() && !model.applies("image"))
    refuse("image", "does not apply to this model, which takes only text; leave it out");
  if (s.mask && !model.applies("mask")) refuse("mask", "does not apply to this model; leave it out");
  if (s.mask && s.images.empty()) refuse("mask", "is given without image; send the picture to edit as image");
  const auto most = model.fields.find("image");
  const auto count = static_cast<std::int64_t>(s.images.size());
  if (count > 0)
    if (const std::int64_t takes = std::clamp(count, most->second.low, most->second.high); takes != count)
      refuse("image", "has " + std::to_string(count) + (count > 1 ? " pictures" : " picture") + "; this model takes " +
                          std::to_string(takes));
  for (const auto& image : s.images)
    if (const auto error = job::check_image_size(model, image->width, image->height))
      fail(Code::kInvalidArgument, error->message, "image");
  for (const job::Field field : job::kFields) {
    const auto* value = request.fields.find(field);
    if (!value || !model.applies(field)) continue;
    if (const auto error = job::check_value(model, field, *value)) throw Failure(*error);
    if (const auto* text = std::get_if<std::string>(value); text && !is_valid_utf8(*text))
      refuse(std::string(field.name()), "is not valid UTF-8");
    s.fields.set(field, *value);
  }
  for (const auto& [field, limits] : model.fields) {
    const std::string name(field.name());
    if (limits.required && field == job::Field("image") && s.images.empty())
      refuse(name, model.media == job::MediaKind::kVideo ? "is missing; this model makes a video from an image"
                                                         : "is missing; this model edits an image");
    const auto value = limits.remainder > 0 ? s.fields.integer(field) : std::nullopt;
    if (!value || limits.rounded(*value) == *value) continue;
    s.warnings.push_back(name + " is " + std::to_string(*value) + "; this model generates " +
                         std::to_string(limits.multiple_of) + "k + " + std::to_string(limits.remainder) + " " + name +
                         ", so it is " + std::to_string(limits.rounded(*value)));
    s.fields.set(field, limits.rounded(*value));
  }
  if (sized_by_image) take_size_from_image(s, model);
  if (const auto error = job::check_images(request.fields, !s.images.empty())) throw Failure(*error);
  return s;
}

}  // namespace ditfleet::pipeline
