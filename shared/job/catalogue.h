// The models that a job may name, with what each takes. The configuration lists them (models.NAME…), not the workers
// that are alive: a job waits for its model while no worker is up.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include "shared/core/error.h"
#include "shared/job/fields.h"

namespace ditfleet::job {

enum class MediaKind { kImage, kVideo };

// What classifier-free guidance a request runs with. With kTrueCfg each step costs two passes.
enum class GuidanceKind { kNone, kEmbedded, kTrueCfg };

// The values that a model takes for one field; inclusive, and only of numbers.
struct FieldLimits {
  std::int64_t low = 0, high = 0;
  std::int64_t multiple_of = 1;  // of integers
};

// A model family (shared/families) fills it from the model's folder.
struct ModelEntry {
  std::string name;
  std::string dir;   // diffusers folder; it may not exist on the coordinator's host
  std::string kind;  // name of the family
  MediaKind media = MediaKind::kImage;
  std::map<Field, FieldLimits> fields;  // the generation fields that apply to this model; others are refused
  FieldValues defaults;                 // a field without a default stays unset
  std::int64_t max_pixels = std::numeric_limits<std::int64_t>::max();  // width × height
  GuidanceKind (*guidance)(const FieldValues& complete) = nullptr;     // nullptr: always kNone

  // Adds a field with the table's bounds, and returns them so that the caller may narrow them.
  FieldLimits& apply(Field field);
  bool applies(Field field) const { return fields.contains(field); }
};

// kInvalidArgument names the field and what the model takes: the field does not apply, or a number is outside the
// model's limits. Pure, thread safe.
std::optional<Error> check_value(const ModelEntry& model, Field field, const FieldValues::Value& value);

// Ordered by name; the configured default model is `default_model`.
struct Catalogue {
  std::map<std::string, ModelEntry> models;
  std::string default_model;
};

}  // namespace ditfleet::job
