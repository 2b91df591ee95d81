// What a model family computes: a folder's networks, on a device or on tensors without memory, and the forwards of one
// request. DiffusionModel (diffusion_model.h) runs the stages; the memory plan runs the same code on meta tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/engine/settings.h"
#include "pipeline/lora/base.h"
#include "pipeline/nn/text/text_encoder.h"
#include "pipeline/nn/transformer/block_cache.h"
#include "pipeline/nn/transformer/transformer.h"
#include "pipeline/sampling/sampler.h"
#include "pipeline/sampling/schedule.h"

namespace ditfleet::pipeline {

// A prompt and what the text encoders make of it. The names are those of the dump.
struct EncodedPrompt {
  PromptIds ids;
  std::map<std::string, at::Tensor> tensors;
};

// What encode() has computed of a request.
struct Conditions {
  EncodedPrompt prompt;
  std::optional<EncodedPrompt> negative;  // see Settings::negative
  at::Tensor noise;                       // of noise_size(); on the CPU
  at::Tensor image;                       // of encode_image(); undefined: none
  at::Tensor image_embeds;                // of embed_image(); undefined: none
};

// The caches of a request's forwards, as in diffusers: one for each transformer and prompt. Used by one thread.
class BlockCaches {
 public:
  explicit BlockCaches(double threshold) : threshold_(threshold) {}
  // Frees the caches of other experts, because steps do not return to an earlier one.
  BlockCache& of(std::size_t expert, bool negative);
  // Whether the last forward was skipped: that of the prompt, unless this rank only runs that of the negative prompt.
  bool skipped() const { return !caches_.empty() && caches_.begin()->second.skipped(); }
  void visit(RunState& state);

 private:
  const double threshold_;
  std::size_t expert_ = 0;
  std::map<bool, BlockCache> caches_;  // by `negative`
};

// The forwards of one request. Used by one thread at a time.
class Denoiser {
 public:
  virtual ~Denoiser() = default;
  // The velocity that the transformer of this step predicts, with the shape of `latents`. `negative`: of the negative
  // prompt. `team`: the ranks that share the forward. `cache`: of this transformer and prompt; null: none.
  virtual at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team& team,
                              BlockCache* cache) = 0;
  // Which of Network::transformers() velocity() uses.
  virtual std::size_t expert(std::int64_t) const { return 0; }
  // The latents that the next step gets, of those that the sampler computed in this one.
  virtual at::Tensor stepped(const at::Tensor& latents, std::int64_t) const { return latents; }
  // Whether a step of a request with a negative prompt has two forwards.
  virtual bool guides(std::int64_t) const { return true; }
  // The velocity of a step with two forwards: classifier-free guidance, unless a family overrides it.
  virtual at::Tensor guide(const at::Tensor& positive, const at::Tensor& negative, std::int64_t step) const {
    return negative + guidance_scale(step) * (positive - negative);
  }

 protected:
  virtual double guidance_scale(std::int64_t step) const = 0;
};

// The networks of one folder. Immutable once loaded, except that adapt() changes a copy. Call const functions on any
// thread, in inference mode. They throw Failure and what LibTorch throws.
class Network {
 public:
  using FrameSink = std::function<void(const at::Tensor& frames)>;

  virtual ~Network() = default;
  virtual std::unique_ptr<Network> clone() const = 0;  // shares the weights

  // In the order of diffusers' names: text_encoder, text_encoder_2; then encoders of pictures, whose weights leave the
  // device as theirs. The network owns them.
  virtual std::vector<TextEncoder*> text_encoders() { return {}; }
  // transformer, transformer_2. Denoiser::expert() says which one a step uses. Of two, the first is for high and the
  // second for low noise levels, and adapters change no text encoder.
  virtual std::vector<Transformer*> transformers() { return {}; }
  virtual std::int64_t vae_bytes() const { return 0; }
  // The linears of the first transformer and of the text encoders, and their names in adapter files.
  virtual LoraBase lora_base(std::vector<std::vector<BaseLinear>> linears) const = 0;

  // Sets Settings::negative and cache_threshold, and fields that follow from other fields.
  virtual void complete(Settings&) const {}
  // Prepares velocity() for a new size in the background. Does not block.
  virtual void prewarm(const Settings&) const {}

  // The inputs of encode() for a prompt of the most ids that encode() takes.
  virtual PromptIds longest_ids(const Settings&) const { return {}; }
  virtual EncodedPrompt encode(PromptIds ids, const Settings& settings) const = 0;
  // Whether encode() reads Settings::images. Its results are then not cached.
  virtual bool encodes_images_with_text() const { return false; }
  // Whether encode_image() samples latents, with noise of noise_size() that is drawn before that of the steps. As in
  // diffusers, all images of a job share it: it is drawn from the seed of the first.
  virtual bool samples_image(const Settings&) const { return false; }
  // Settings::images as a condition; undefined: there are none. `noise`: see samples_image().
  virtual at::Tensor encode_image(const Settings&, const at::Tensor& noise) const {
    (void)noise;
    return {};
  }
  // What an encoder of pictures says about Settings::images; undefined: the model has none.
  virtual at::Tensor embed_image(const Settings&) const { return {}; }
  // The shape of the noise that diffusers draws.
  virtual std::vector<std::int64_t> noise_size(const Settings& settings) const = 0;
  virtual c10::ScalarType noise_type() const { return placement.dtype; }
  virtual Schedule schedule(const Settings& settings) const = 0;
  // Later steps of a request take no more memory than this number of steps.
  virtual int steps_in_memory() const { return 4; }
  virtual std::unique_ptr<Sampler> sampler(const Settings& settings, const Schedule& schedule) const = 0;
  // Computes the inputs that are the same in all steps. The result may refer to the arguments and to this network.
  virtual std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule& schedule,
                                             const Conditions& conditions) const = 0;
  // The latents of the first step, in any place and type.
  virtual at::Tensor first_latents(const Conditions& conditions, const Schedule&) const { return conditions.noise; }
  // What diffusers returns as output_type="latent", of the latents after the last step; decode() takes it.
  virtual at::Tensor finished(const at::Tensor& latents, const Settings&) const { return latents; }
  // Calls `sink` with frames [1, channels, H, W] or [1, channels, n, H, W] in [-1, 1], in order.
  virtual void decode(const at::Tensor& latents, const Settings& settings, const FrameSink& sink) const = 0;
  // A small picture of estimated latents, [1, channels, h, w] in [-1, 1].
  virtual at::Tensor preview(const at::Tensor& estimate, const Settings& settings) const = 0;

  Placement placement;
  job::ModelEntry entry;  // limits and defaults of requests
};

// Draws the noise of a request; in the dry run, tensors without memory stand for it. Encodes its images and prompts;
// embed() encodes one prompt.
Conditions encode_conditions(const Network& network, const Settings& settings,
                             const std::function<EncodedPrompt(const std::string& prompt)>& embed);

// The velocity of a step, with two forwards guided. An even number of ranks computes both at the same time; with caches
// (null: none) only two ranks do, because ranks that exchange tokens must all skip or all run the blocks.
at::Tensor guided_velocity(Denoiser& denoiser, std::int64_t step, const at::Tensor& latents, bool two_forwards,
                           const parallel::Team& team, BlockCaches* caches);

}  // namespace ditfleet::pipeline
