// The FLUX.2 transformer: packed latents and text in, velocity out.
#pragma once

#include "pipeline/families/flux2/parameters.h"
#include "pipeline/nn/rope.h"
#include "pipeline/nn/transformer/transformer.h"

namespace ditfleet::pipeline {

class Flux2Transformer : public Transformer {
 public:
  // Reads the weights, which may have BFL's names. Throws what Parameters throws.
  static Flux2Transformer load(const TransformerSource& source, const Flux2Config& config, Placement placement);
  const Flux2Config& config() const { return config_; }

  // Prepares velocity() for a new size in the background. Does not block. Thread-safe.
  // `references`: tokens that references() gets.
  void prewarm(std::int64_t text_tokens, std::int64_t image_tokens, std::int64_t references, bool adapters) const;

  // The rows that modulate all blocks at `timesteps` of the schedule ([n] fp32, on the device): [n, 17, D], those of
  // the image's and the text's stream, of single blocks and of the last norm.
  at::Tensor modulation(const at::Tensor& timesteps) const;
  // Converts text tokens [1, S_text, text_width] to the blocks' input [1, S_text, D].
  at::Tensor embed_text(const at::Tensor& prompt_embeds) const;
  // [1, text + rows · columns, 1, head_dim / 2] complex64 on the device, text tokens first.
  at::Tensor rope(std::int64_t text, const std::vector<TokenGrid>& grids) const;
  // The keys and values of reference pictures in each block, [1, S, heads, head_dim], for models with
  // Flux2Config::cached_references. They depend on no other token and no step. `tokens`: [1, S, channels]. `rope`: of
  // these tokens.
  struct Cached {
    std::vector<std::pair<at::Tensor, at::Tensor>> blocks;
  };
  Cached references(const at::Tensor& tokens, const at::Tensor& rope) const;
  // `latents`: [1, S_image, channels]. `text`: from embed_text(). `modulation`: of one step, [1, 17, D]. `rope`: from
  // rope(). Returns [1, S_image, channels]. `team`: the ranks that share the forward; each gets the whole result.
  // `cached`: of references(), or null; then each rank computes all. Thread-safe.
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, const at::Tensor& modulation,
                      const at::Tensor& rope, const parallel::Team& team = {}, const Cached* cached = nullptr) const;

 private:
  Flux2Transformer(Flux2Config config, Placement placement)
      : Transformer(flux2_spec(config), std::move(placement)), config_(config) {}
  void open_libraries(const region::RegionHost& host) const override;
  at::Tensor last_layer(const at::Tensor& image, const at::Tensor& modulation) const;

  Flux2Config config_;
};

}  // namespace ditfleet::pipeline
