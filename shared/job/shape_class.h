// The shape class of a unit. A worker can be warm for it (see the glossary in shared/README.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "shared/job/catalogue.h"
#include "shared/job/spec.h"

namespace ditfleet::job {

// Sizes are exact, because padding would change the image.
struct ShapeClass {
  std::string model;
  int width = 0, height = 0, frames = 1;
  GuidanceKind guidance = GuidanceKind::kNone;
  int text_tokens = 512;
  std::string precision = "auto";
  int cache = 0;   // threshold of the step cache in hundredths, at least 1; 0: none. Its runs are much shorter
  int images = 0;  // that lengthen the sequence

  bool operator==(const ShapeClass&) const = default;
  // "MODEL/1024x1024x1/embedded/512/bf16", or bf16+images1+cache0.08 with an image and a cache: the form in Redis, in
  // metrics and in WorkerInfo::warm_classes.
  std::string key() const;
  std::int64_t pixels() const;  // width × height × frames, at most 2^50
};

// Precondition: `spec` is a result of complete_spec() for `model`. Frames are rounded as the model rounds them: 82
// become 81 with 4 frames per latent frame.
ShapeClass shape_class_of(const JobSpec& spec, const ModelEntry& model, const std::string& precision);

// The tokens of a forward pass: those of the latents and of the text.
std::int64_t tokens_of(const ShapeClass& shape, const ModelEntry& model);

// The inverse of key(). Nothing if the text is not a valid key.
std::optional<ShapeClass> parse_class_key(std::string_view key);

}  // namespace ditfleet::job
