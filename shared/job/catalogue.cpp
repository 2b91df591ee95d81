#include "shared/job/catalogue.h"

#include <algorithm>
#include <cmath>

#include "shared/job/object_reader.h"

namespace ditfleet::job {
namespace {

std::string nearest_multiples(std::int64_t value, const FieldLimits& limits) {
  const std::int64_t below = value / limits.multiple_of * limits.multiple_of, above = below + limits.multiple_of;
  if (below < limits.low) return std::to_string(above);
  return std::to_string(below) + (above <= limits.high ? " or " + std::to_string(above) : "");
}

}  // namespace

std::int64_t FieldLimits::nearest(double value) const {
  const double steps = std::floor((value - static_cast<double>(remainder)) / static_cast<double>(multiple_of) + 0.5);
  return static_cast<std::int64_t>(steps) * multiple_of + remainder;
}

FieldLimits& ModelEntry::apply(Field field) {
  return fields[field] = {.low = field.row().low, .high = field.row().high};
}

std::int64_t ModelEntry::latent_frames(std::int64_t frames) const {
  const auto limits = fields.find("frames");
  return limits == fields.end() ? frames : (frames - 1) / limits->second.multiple_of + 1;
}

std::optional<Error> check_value(const ModelEntry& model, Field field, const FieldValues::Value& value) {
  const std::string name(field.name());
  const auto found = model.fields.find(field);
  if (found == model.fields.end())
    return invalid_argument(name + " does not apply to model '" + model.name + "'; leave it out", name);
  const FieldLimits& limits = found->second;
  if (const auto* images = std::get_if<std::string>(&value); images && field.row().type == FieldType::kImage) {
    const auto count = std::count(images->begin(), images->end(), ',') + 1;
    if (count >= limits.low && count <= limits.high) return std::nullopt;
    const std::string given = count > 1 && field == Field("image") ? "images" : name;
    return invalid_argument(given + " has " + std::to_string(count) + (count > 1 ? " images" : " image") + "; model '" +
                                model.name + "' takes " +
                                (limits.low < limits.high ? std::to_string(limits.low) + " to " : "") +
                                std::to_string(limits.high),
                            given);
  }
  const auto* integer = std::get_if<std::int64_t>(&value);
  const auto* real = std::get_if<double>(&value);
  if (!integer && !real) return std::nullopt;
  const double number = integer ? static_cast<double>(*integer) : *real;
  const std::string is = name + " is " + (integer ? std::to_string(*integer) : number_text(*real));
  if (!(number >= static_cast<double>(limits.low) && number <= static_cast<double>(limits.high))) {
    return invalid_argument(is + "; model '" + model.name + "' accepts " + std::to_string(limits.low) + " to " +
                                std::to_string(limits.high),
                            name);
  }
  if (!integer || limits.remainder > 0 || *integer % limits.multiple_of == 0) return std::nullopt;
  return invalid_argument(is + ", which is not a multiple of " + std::to_string(limits.multiple_of) + " as model '" +
                              model.name + "' needs; use " + nearest_multiples(*integer, limits),
                          name);
}

bool belongs_to_image(Field field) {
  return field == Field("mask") || field == Field("strength") || field == Field("auto_resize");
}

std::optional<Error> check_images(const FieldValues& fields, bool has_image) {
  for (const Field field : kFields) {
    const std::string name(field.name());
    if (belongs_to_image(field) && fields.has(field) && !has_image)
      return invalid_argument(name + " is given without image; send the picture to edit as image, or leave it out",
                              name);
  }
  if (fields.real("strength") == 0.0)
    return invalid_argument("strength is 0, which would run no step; it must be above 0 and at most 1", "strength");
  if (fields.has("mask") && fields.images("image").size() > 1)
    return invalid_argument("mask is given with several images; it belongs to one", "mask");
  return std::nullopt;
}

std::optional<Error> check_image_size(const ModelEntry& model, int width, int height) {
  const auto [shorter, longer] = std::minmax(width, height);
  const std::string size = "the image is " + std::to_string(width) + "x" + std::to_string(height);
  if (shorter < model.least_image_side)
    return invalid_argument(size + "; both sides must be at least " + std::to_string(model.least_image_side) +
                            " pixels for model '" + model.name + "'");
  if (longer <= std::int64_t{shorter} * model.most_image_ratio) return std::nullopt;
  return invalid_argument(size + "; a side may be at most " + std::to_string(model.most_image_ratio) +
                          " times as long as the other for model '" + model.name + "'");
}

int steps_of(const FieldValues& fields) {
  const auto steps = static_cast<double>(fields.integer("num_inference_steps").value_or(1));
  const double run = std::min(steps * fields.real("strength").value_or(1), steps);
  return static_cast<int>(steps) - static_cast<int>(std::max(steps - run, 0.0));
}

}  // namespace ditfleet::job
