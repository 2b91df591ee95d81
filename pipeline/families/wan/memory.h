// What a Wan model needs of the device's memory.
#pragma once

#include <memory>
#include <utility>

#include "pipeline/engine/fit.h"
#include "pipeline/families/wan/folder.h"
#include "pipeline/families/wan/generation.h"
#include "pipeline/memory/measured_needs.h"

namespace ditfleet::pipeline {

// A Wan folder on tensors without memory. It reads configuration and headers.
class WanNeeds {
 public:
  // Throws what load_wan_folder() throws.
  explicit WanNeeds(const LoadContext& context);

  // What the bytes of this request depend on. Throws what read_wan_request() throws.
  RequestSize size(const GenerationRequest& request) const;
  static RequestSize size(const WanRequest& request, int size_multiple);
  static std::int64_t frames(const RequestSize& size) { return 4 * (size[0] - 1) + 1; }
  // Runs the model's stages for a new size and remembers the result. Thread-safe.
  MemoryNeeds of(const RequestSize& size);
  // A video of 832 × 480 with this number of frames, and its width × height × frames. 0: the request that needs least.
  std::pair<RequestSize, std::int64_t> video(int frames) const;

 private:
  MemoryNeeds measure(const RequestSize& size) const;

  const Placement placement_;
  MemoryNeeds weights_;  // without the bytes of a request
  WanFolder folder_;
  MeasuredNeeds known_;
};

}  // namespace ditfleet::pipeline
