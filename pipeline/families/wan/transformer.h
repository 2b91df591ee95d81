// Wan's transformer (diffusers WanTransformer3DModel): latents, timestep and text to a velocity.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline/families/wan/parameters.h"
#include "pipeline/nn/transformer/block_cache.h"
#include "pipeline/nn/transformer/transformer.h"

namespace ditfleet::pipeline {

// What the steps of a request have in common. `text`: of embed_text(). `rope`: of rope(). `image`: of embed_image(), if
// the model has an image_dim. `still_frames`: the number of first latent frames with timestep 0, which must be 0
// without expand_timesteps.
struct WanInputs {
  at::Tensor text, rope, image = {};
  std::int64_t still_frames = 0;
};

class WanTransformer : public Transformer {
 public:
  // Reads config.json and the weights. Throws what ConfigFile and Parameters throw.
  // `expand_timesteps`: see read_wan_config().
  static WanTransformer load(const TransformerSource& source, Placement placement, bool expand_timesteps = false);

  const WanConfig& config() const { return config_; }

  // Prewarms library plans for velocity() of latents of this size in the background, on request also with adapters.
  // `image`: its tokens. Does not block. Thread-safe.
  void prewarm(std::int64_t frames, std::int64_t rows, std::int64_t columns, std::int64_t text, std::int64_t image,
               std::int64_t still_frames, bool adapters) const;

  // Converts prompt_embeds [1, L, text_dim] to the blocks' input [1, L, D]. The same for all steps.
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // Converts CLIP's tokens of the images, [images, S, image_dim], to the blocks' input [1, images · S, D].
  at::Tensor embed_image(const at::Tensor& image_embeds) const;
  // The table that velocity() needs for latents [1, C, frames, rows, columns]. Throws what wan_rope_table throws.
  at::Tensor rope(std::int64_t frames, std::int64_t rows, std::int64_t columns) const;
  // `latents`: [1, in_channels, F, h, w] with even h and w; rounded to the model's type. `timestep`: 0 to 1000, not
  // rounded. Returns [1, out_channels, F, h, w] in the model's type.
  // `team`: the ranks that share the forward; each gets the whole result. `cache`: may skip all blocks but the first;
  // null: none is skipped.
  // Not thread-safe if compiled blocks have quantized weights.
  // Throws Failure: kInvalidArgument for another shape; the group's errors.
  at::Tensor velocity(const at::Tensor& latents, double timestep, const WanInputs& inputs,
                      const parallel::Team& team = {}, BlockCache* cache = nullptr) const;

 private:
  void compiled_blocks() override;
  WanTransformer(WanConfig config, Placement placement) : Transformer(wan_spec(config), placement), config_(config) {}
  // `time`: [1, 6, D] from time_proj; with expand_timesteps [2, 6, D], the first for the first `still` tokens of x.
  at::Tensor run_blocks(at::Tensor x, const WanInputs& inputs, const at::Tensor& time, const at::Tensor& rope,
                        std::int64_t still, region::Mode mode, const parallel::Sequence* sequence,
                        BlockCache* cache) const;

  WanConfig config_;
  at::Tensor tables_;  // [num_layers, 6, D]: of all blocks, if they are compiled
};

}  // namespace ditfleet::pipeline
