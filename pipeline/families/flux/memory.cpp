#include "pipeline/families/flux/memory.h"

#include <algorithm>

namespace ditfleet::pipeline {
namespace {

std::int64_t ahead_of(const PartSequence* parts) { return parts ? parts->ahead_bytes() : 0; }
std::int64_t bytes_of(const PartSequence* parts) { return parts ? parts->bytes() : 0; }

}  // namespace

MemoryNeeds flux_memory_needs(const FluxFolder& folder, const FluxSize&, std::int64_t adapter_bytes) {
  MemoryNeeds needs;
  const FluxParts& flux = folder.transformer.parts();
  needs.text = {bytes_of(folder.clip.parts()) + bytes_of(folder.t5.parts()),
                std::max(ahead_of(folder.clip.parts()), ahead_of(folder.t5.parts()))};
  needs.modulation = {bytes_of(flux.modulation.get()), ahead_of(flux.modulation.get())};
  needs.blocks = {bytes_of(flux.blocks.get()), ahead_of(flux.blocks.get())};
  needs.fixed = folder.weight_bytes() - needs.text.bytes - needs.modulation.bytes - needs.blocks.bytes + adapter_bytes;
  return needs;
}

}  // namespace ditfleet::pipeline
