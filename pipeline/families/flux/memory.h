// What a FLUX model needs of the device's memory.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "pipeline/engine/fit.h"
#include "pipeline/families/flux/folder.h"
#include "pipeline/families/flux/generation.h"
#include "pipeline/memory/measured_needs.h"
#include "pipeline/memory/plan.h"

namespace ditfleet::pipeline {

// A FLUX folder on tensors without memory. It reads configuration and headers, and compiles nothing.
class FluxNeeds {
 public:
  // Throws what load_flux_folder() throws.
  explicit FluxNeeds(const LoadContext& context);

  // What the bytes of this request depend on.
  static RequestSize size(const FluxRequest& request, int size_multiple);
  // Runs the model's stages for a new size, which takes some 10 ms, and remembers the result. Thread-safe.
  MemoryNeeds of(const RequestSize& size);
  // An image of at most side × side, but at least one token, and its pixels. 0: the request that needs least.
  std::pair<RequestSize, std::int64_t> square(int side) const;

 private:
  MemoryNeeds measure(const RequestSize& size) const;

  const Placement placement_;
  MemoryNeeds weights_;  // without the bytes of a request
  FluxFolder folder_;
  MeasuredNeeds known_;
};

// With quantize auto: the first of no format, fp8 (where the device has it) and NF4 with which no block of the
// transformer has to leave the device for an image of 1024 × 1024; if there is none, of 512 × 512, or the smallest;
// else the first that fits at all. Throws what load_flux_folder() throws.
Fit<FluxNeeds> fit_flux(LoadContext context, bool always);

}  // namespace ditfleet::pipeline
