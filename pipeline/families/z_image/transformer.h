// The Z-Image transformer: latents and caption in, velocity out.
#pragma once

#include "pipeline/families/z_image/parameters.h"
#include "pipeline/nn/transformer/transformer.h"

namespace ditfleet::pipeline {

// Captions and images are filled up to a multiple of this number of tokens, which are attended.
inline constexpr std::int64_t kZImageMultiple = 32;
inline std::int64_t z_image_filled(std::int64_t tokens) {
  return (tokens + kZImageMultiple - 1) / kZImageMultiple * kZImageMultiple;
}

class ZImageTransformer : public Transformer {
 public:
  // Reads config.json and the weights. Throws what ConfigFile and Parameters throw.
  static ZImageTransformer load(const TransformerSource& source, Placement placement);
  const ZImageConfig& config() const { return config_; }

  // Prepares velocity() for a new size in the background. Does not block. Thread-safe.
  void prewarm(std::int64_t text_tokens, std::int64_t rows, std::int64_t columns, bool adapters) const;

  // The rows that modulate the blocks at `timesteps` of the schedule ([n] fp32, on the device): [n, 4 for each block of
  // the image and 1 for the last layer, D].
  at::Tensor modulation(const at::Tensor& timesteps) const;
  // Converts text tokens [1, L, text_width] to the refined caption [1, z_image_filled(L), D].
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // [1, image and caption tokens, 1, head_dim / 2] complex64 on the device, for filled numbers of tokens. `rows`,
  // `columns`: of the image's tokens of 2 × 2 latent pixels; 0: the caption alone.
  at::Tensor rope(std::int64_t text_tokens, std::int64_t rows, std::int64_t columns) const;
  // `latents`: [1, channels, h, w]. `text`: from embed_text(). `modulation`: of one step, [1, rows, D]. `rope`: from
  // rope(). Returns [1, channels, h, w] in the placement's type, with diffusers' sign. `team`: the ranks that share the
  // forward; each gets the whole result. Thread-safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const at::Tensor& modulation,
                      const at::Tensor& rope, const parallel::Team& team = {}) const;

 private:
  ZImageTransformer(ZImageConfig config, Placement placement)
      : Transformer(z_image_spec(config), std::move(placement)), config_(config) {}
  void open_libraries(const region::RegionHost& host) const override;

  ZImageConfig config_;
};

}  // namespace ditfleet::pipeline
