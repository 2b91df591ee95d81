// The models that a job may use, with the fields and limits of each model. The list comes from the configuration
// (models.NAME), so that a job can wait for its model while no worker is running.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/error.h"
#include "shared/job/fields.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

enum class MediaKind { kImage, kVideo };

// The kind of guidance of a request. With kTrueCfg, each step needs two forward passes.
enum class GuidanceKind { kNone, kEmbedded, kTrueCfg };

// The values of a numeric field that a model accepts; bounds are inclusive.
struct FieldLimits {
  std::int64_t low = 0, high = 0;
  std::int64_t multiple_of = 1;  // for integers
  // Above a multiple: 4 and 1 mean 1, 5, 9, …. Unless it is 0, the model rounds other values, with a warning.
  std::int64_t remainder = 0;
  bool required = false;  // a request without the field, or a default of it, is an error

  // The accepted integer that is nearest to `value`, ignoring the bounds; of two, the greater one.
  std::int64_t nearest(double value) const;
  // What the model makes of an integer: with a remainder, as diffusers rounds a number of frames. 82 becomes 81.
  std::int64_t rounded(std::int64_t value) const {
    return remainder > 0 ? value / multiple_of * multiple_of + remainder : value;
  }
};

// Settings that belong together, such as those of a distilled model.
struct Preset {
  FieldValues fields;
  std::vector<LoraUse> loras;  // by the names that the tenant has registered
};

// A model. A model family (shared/families) fills the entry from the model's folder.
struct ModelEntry {
  std::string name;
  std::string dir;   // diffusers folder; it may not exist on the coordinator's host
  std::string kind;  // name of the family
  MediaKind media = MediaKind::kImage;
  std::map<Field, FieldLimits> fields;    // the generation fields that apply to this model
  FieldValues defaults;                   // a field without a default stays unset
  std::map<std::string, Preset> presets;  // by name
  bool experts = false;                   // two transformers, for high and for low noise levels
  std::int64_t max_pixels = std::numeric_limits<std::int64_t>::max();  // width × height
  // The size by which a request without a size is scheduled, where the model takes the size from the request's image.
  int free_width = 0, free_height = 0;
  // That size, where it is not the image's aspect ratio within the area of free_width × free_height.
  std::pair<int, int> (*size_of_image)(int width, int height, int multiple_of) = nullptr;
  bool sized_by_last_image = false;  // of several images; else by the first
  // The smallest side of an image that the model reads, and how often at most the shorter side fits into the longer.
  int least_image_side = 1, most_image_ratio = std::numeric_limits<int>::max();
  // The pixels by which each image of a request lengthens the transformer's sequence; 0: it does not.
  std::int64_t pixels_per_image = 0;
  // Whether the text encoder gets the places in a picture as positions of its tokens. nullopt: it sees no pictures.
  std::optional<bool> grid_positions;
  GuidanceKind (*guidance)(const FieldValues& complete) = nullptr;  // nullptr: always kNone
  std::int64_t pixels_per_token = 256;                              // of a latent frame, for the transformer

  // Adds a field with the bounds of the field table. Returns the limits, which the caller may narrow.
  FieldLimits& apply(Field field);
  bool applies(Field field) const { return fields.contains(field); }
  // The latent frames of a video of this many frames: 4k + 1 frames have k + 1, where the model makes such videos.
  std::int64_t latent_frames(std::int64_t frames) const;
};

// Returns kInvalidArgument if the field does not apply to the model or a number is outside the model's limits. The
// message contains the field and the accepted values. Thread-safe.
std::optional<Error> check_value(const ModelEntry& model, Field field, const FieldValues::Value& value);

// Whether a field only makes sense with an image: mask, strength and auto_resize.
bool belongs_to_image(Field field);

// The same as check_value() for such fields. `has_image`: the request has one.
std::optional<Error> check_images(const FieldValues& fields, bool has_image);

// kInvalidArgument, without a param: an image of this size is too small or too long for the model.
std::optional<Error> check_image_size(const ModelEntry& model, int width, int height);

// The steps that run: with strength, a part of num_inference_steps, rounded as diffusers does.
int steps_of(const FieldValues& fields);

// The configured models by name. `default_model` may be empty.
struct Catalogue {
  std::map<std::string, ModelEntry> models;
  std::string default_model;
  // By the name of a family: parts of tensors' names in its adapters, with "_" for ".". Of all families.
  std::map<std::string, std::span<const std::string_view>> adapter_parts;
};

}  // namespace ditfleet::job
