// A complete Wan folder in diffusers' layout.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "pipeline/api/model.h"
#include "pipeline/engine/quantize.h"
#include "pipeline/families/wan/transformer.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/nn/video_vae/video_vae.h"
#include "pipeline/sampling/flow_scheduler.h"

namespace ditfleet::pipeline {

struct WanFolder {
  FlowSchedulerConfig scheduler;
  T5Encoder text;
  WanTransformer transformer;                   // of the high noise levels, if there are two
  std::optional<WanTransformer> transformer_2;  // of the low noise levels
  double boundary = 0;                          // timesteps below boundary · 1000 run on transformer_2
  VideoVae vae;
  bool from_image = false;  // the transformers' input has a mask and a condition beside the latents
  PartTimes load_times;     // as ModelInfo::load_times, without tokenizers
  ModelSource source = {};

  std::int64_t weight_bytes() const {
    return text.bytes() + transformer.bytes() + (transformer_2 ? transformer_2->bytes() : 0) + vae.bytes();
  }
  std::map<std::string, std::map<std::string, int>> linears() const;  // as ModelInfo::linears
  // Width and height must be multiples of this.
  int size_multiple() const;
};

// Reads every configuration and checks that the parts fit together before it reads weights. Throws Failure: kNotFound
// (a missing file or tensor), kDataCorrupt (the message contains the file and what would be right), kInvalidArgument
// (`quantize`, `transformer`). Throws LibTorch's exceptions when memory runs out, and what
// compiling regions throws. `adapter_rank`: see TransformerSource.
WanFolder load_wan_folder(const ModelSource& source, Placement placement,
                          std::shared_ptr<region::RegionHost> regions = nullptr, std::int64_t adapter_rank = 0);

// Throws Failure (kInvalidArgument) if `quantize` has another component or format than Wan supports. "transformer"
// quantizes both experts.
void check_wan_quantize(const ModelSource& source);

}  // namespace ditfleet::pipeline
