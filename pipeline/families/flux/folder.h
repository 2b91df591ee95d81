// A diffusers FLUX folder as a whole: which parts it must have and how they must fit each other.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "pipeline/families/flux/transformer.h"
#include "pipeline/nn/text/clip_encoder.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/nn/vae/decoder.h"
#include "pipeline/sampling/schedule.h"

namespace ditfleet::pipeline {

struct FluxFolder {
  SchedulerConfig scheduler;
  ClipEncoder clip;
  T5Encoder t5;
  FluxTransformer transformer;
  VaeDecoder vae;
  std::vector<std::pair<std::string, std::int64_t>> load_us;  // as ModelInfo::load_us, tokenizers aside

  std::int64_t weight_bytes() const { return clip.bytes() + t5.bytes() + transformer.bytes() + vae.bytes(); }
  // Width and height of a picture are multiples of this.
  int size_multiple() const { return static_cast<int>(2 * vae.config().factor()); }
};

// `adapter_rank`: see FluxTransformer::load. Every configuration is read and the parts are compared before the first
// weight is. Throws Failure: kNotFound names the missing file or tensor, kDataCorrupt the file and what would be right;
// LibTorch's own exceptions when memory runs out, and what compiling the regions throws.
FluxFolder load_flux_folder(const std::string& dir, Placement placement,
                            std::shared_ptr<region::RegionHost> regions = nullptr, std::int64_t adapter_rank = 0);

}  // namespace ditfleet::pipeline
