// What decides whether a worker is warm for a unit, and what may share a batch.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "shared/job/spec.h"

namespace ditfleet::job {

enum class GuidanceKind { kNone, kEmbedded, kTrueCfg };

// The bucket: exact, never padded (padding changes the picture).
struct ShapeClass {
  std::string model;
  int width = 0, height = 0, frames = 1;
  GuidanceKind guidance = GuidanceKind::kNone;
  int text_tokens = 512;
  std::string precision = "auto";

  bool operator==(const ShapeClass&) const = default;
  // "flux-dev/1024x1024x1/embedded/512/bf16": the form in Redis, metrics and workers' warm lists.
  std::string key() const;
};

// Precondition: a complete spec (validate.h).
ShapeClass shape_class_of(const JobSpec& spec, const std::string& precision);

// ShapeClass + steps + scheduler: units with equal keys may be denoised as one batch.
std::string batch_key_of(const JobSpec& spec, const std::string& precision);

struct BatchKey {
  ShapeClass shape;
  int steps = 0;
  std::string scheduler;
};

// The way back from the keys. Nothing: not such a key.
std::optional<ShapeClass> parse_class_key(std::string_view key);
std::optional<BatchKey> parse_batch_key(std::string_view key);

}  // namespace ditfleet::job
