// What a FLUX model needs of the device's memory.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "pipeline/engine/family.h"
#include "pipeline/families/flux/folder.h"
#include "pipeline/memory/model_memory.h"
#include "pipeline/memory/plan.h"

namespace ditfleet::pipeline {

// A FLUX folder on tensors without memory. It reads configuration and headers, and compiles nothing.
class FluxNeeds {
 public:
  // Throws what load_flux_folder() throws.
  explicit FluxNeeds(const LoadContext& context);

  // `rows`, `columns`: of the image, in tokens. `text_tokens`: max_sequence_length.
  static RequestSize size(std::int64_t rows, std::int64_t columns, std::int64_t text_tokens, std::int64_t steps,
                          bool true_cfg);
  // Runs the model's stages for a new size, which takes some 10 ms, and remembers the result. Thread-safe.
  MemoryNeeds of(const RequestSize& size);
  // Two square images with their pixels, for ModelMemory.
  std::pair<RequestSize, std::int64_t> square(std::int64_t side) const;

 private:
  MemoryNeeds measure(const RequestSize& size) const;

  const Placement placement_;
  MemoryNeeds weights_;  // without the bytes of a request
  FluxFolder folder_;
  std::mutex mutex_;
  std::map<RequestSize, MemoryNeeds> known_;
};

}  // namespace ditfleet::pipeline
