// What a FLUX model needs of the device's memory.
#pragma once

#include <compare>
#include <cstdint>

#include "pipeline/families/flux/folder.h"
#include "pipeline/memory/plan.h"

namespace ditfleet::pipeline {

// What the bytes of a request depend on.
struct FluxSize {
  std::int64_t rows = 0, columns = 0;  // of the image, in tokens
  std::int64_t text_tokens = 0;        // max_sequence_length
  bool true_cfg = false;
  auto operator<=>(const FluxSize&) const = default;
};

// `adapter_bytes`: of the adapters' slots and columns.
MemoryNeeds flux_memory_needs(const FluxFolder& folder, const FluxSize& size, std::int64_t adapter_bytes);

}  // namespace ditfleet::pipeline
