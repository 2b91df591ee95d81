// The Qwen-Image transformer: packed latents and text in, velocity out.
#pragma once

#include <vector>

#include "pipeline/families/qwen_image/parameters.h"
#include "pipeline/nn/rope.h"
#include "pipeline/nn/transformer/transformer.h"

namespace ditfleet::pipeline {

class QwenImageTransformer : public Transformer {
 public:
  // Reads config.json and the weights. Without `pictures`, velocity() never gets any, and zero_cond_t has no effect.
  // Throws what ConfigFile and Parameters throw.
  static QwenImageTransformer load(const TransformerSource& source, Placement placement, bool pictures);
  const QwenImageConfig& config() const { return config_; }

  // Prepares velocity() for a new size in the background. Does not block. Thread-safe.
  void prewarm(std::int64_t text_tokens, std::int64_t image_tokens, std::int64_t picture_tokens, bool adapters) const;

  // The rows that modulate the blocks.
  struct Modulation {
    at::Tensor steps;  // [n, 12 for each block and 2 for the last norm, D]: of the image, then of the text
    at::Tensor zero;   // at timestep 0, of pictures: [1, 6 for each block, D]; undefined without zero_cond_t
  };
  // `timesteps`: of the schedule, [n] fp32 on the device.
  Modulation modulation(const at::Tensor& timesteps) const;
  // Converts text tokens [1, S_text, text_width] to the blocks' input [1, S_text, D].
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // [1, text and pictures' tokens, 1, head_dim / 2] complex64 on the device, text first. `grids`: of the image, then of
  // further pictures.
  at::Tensor rope(std::int64_t text, const std::vector<TokenGrid>& grids) const;
  // `latents`: [1, S_image, channels]. `pictures`: of further pictures, [1, S_pictures, channels]; undefined: none,
  // which zero_cond_t does not allow. `text`: from embed_text(). `rows`: of one step, [1, .., D], and `zero`: from
  // modulation(). `rope`: from rope(). Returns [1, S_image, channels]. `team`: the ranks that share the forward; each
  // gets the whole result. Thread-safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& pictures, const at::Tensor& text,
                      const at::Tensor& rows, const at::Tensor& zero, const at::Tensor& rope,
                      const parallel::Team& team = {}) const;

 private:
  QwenImageTransformer(QwenImageConfig config, Placement placement)
      : Transformer(qwen_image_spec(config), std::move(placement)), config_(config) {}
  void open_libraries(const region::RegionHost& host) const override;
  at::Tensor last_layer(const at::Tensor& image, const at::Tensor& rows) const;

  QwenImageConfig config_;
};

}  // namespace ditfleet::pipeline
