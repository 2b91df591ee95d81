// A complete FLUX folder in diffusers' layout.
#pragma once

#include <string>

#include "pipeline/api/model.h"
#include "pipeline/engine/quantize.h"
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
  PartTimes load_times;  // as ModelInfo::load_times, without tokenizers
  ModelSource source = {};

  std::int64_t weight_bytes() const { return clip.bytes() + t5.bytes() + transformer.bytes() + vae.bytes(); }
  std::map<std::string, std::map<std::string, int>> linears() const {  // as ModelInfo::linears
    return {{"transformer", transformer.linears()}, {"text_encoder", clip.linears()}, {"text_encoder_2", t5.linears()}};
  }
  // Width and height of an image must be multiples of this.
  int size_multiple() const { return static_cast<int>(2 * vae.config().factor()); }
};

// The first stored weight with a NaN or an infinity, such as "transformer: proj_out.weight", or a remark that there is
// none. Reads all weights. Throws the errors of Checkpoint as Failure.
std::string not_finite_weight(const ModelSource& source);

// Throws Failure (kInvalidArgument) if `quantize` has another component or format than FLUX supports.
void check_quantize(const ModelSource& source);

// Opens the weight files of the transformer and the text encoders, and reads their headers. Returns whether a linear of
// them is stored quantized, or is to be quantized on load. Components without weights are left out. Throws Failure:
// kDataCorrupt, kInvalidArgument (`quantize` for a component that is stored quantized), kNotFound
// (`source.transformer`).
bool has_quantized_linears(const ModelSource& source);

// `source`: its name is not used. Reads every configuration and checks that the parts fit together before it reads
// weights. `adapter_rank`: see TransformerSource. Throws Failure: kNotFound (a missing file or tensor),
// kDataCorrupt (the message contains the file and what would be right), kInvalidArgument (`quantize`). Throws
// LibTorch's exceptions when memory runs out, and what compiling regions throws.
FluxFolder load_flux_folder(const ModelSource& source, Placement placement,
                            std::shared_ptr<region::RegionHost> regions = nullptr, std::int64_t adapter_rank = 0);

}  // namespace ditfleet::pipeline
