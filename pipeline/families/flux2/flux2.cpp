#include "pipeline/families/flux2/flux2.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>

#include <array>
#include <optional>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/prompts.h"
#include "pipeline/families/flux2/adapter_names.h"
#include "pipeline/families/flux2/transformer.h"
#include "pipeline/nn/text/qwen_encoder.h"
#include "pipeline/nn/vae/image_vae.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "pipeline/sampling/latents.h"
#include "pipeline/tokenizers/qwen_text.h"
#include "shared/families/flux2/flux2.h"
#include "shared/media/resize.h"
#include "shared/media/sizes.h"

namespace ditfleet::pipeline {
namespace {

const std::vector<std::int64_t> kTextLayers{9, 18, 27};  // whose results are joined for each token

// compute_empirical_mu of diffusers' pipeline_flux2_klein.py, for an exponential shift.
double shift_of(std::int64_t image_tokens, int steps) {
  const auto tokens = static_cast<double>(image_tokens);
  const double of_200 = 0.00016927 * tokens + 0.45666666, of_10 = 8.73809524e-05 * tokens + 1.89833333;
  if (image_tokens > 4300) return of_200;
  const double slope = (of_200 - of_10) / 190;
  return slope * steps + (of_200 - 200 * slope);
}

class Flux2Denoiser final : public Denoiser {
 public:
  Flux2Denoiser(const Flux2Transformer& transformer, const Settings& settings, const Schedule& schedule,
                const Conditions& conditions, std::vector<TokenGrid> grids)
      : transformer_(transformer),
        scale_(settings.real("guidance_scale")),
        grids_(std::move(grids)),
        references_(conditions.image) {
    texts_[0] = transformer.embed_text(conditions.prompt.tensors.at("prompt_embeds"));
    if (conditions.negative) texts_[1] = transformer.embed_text(conditions.negative->tensors.at("prompt_embeds"));
    modulation_ = transformer.modulation(on_device(schedule.timesteps, transformer.placement().device));
  }

  at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team& team,
                      BlockCache*) override {
    const at::Tensor& text = texts_[negative ? 1 : 0];
    if (!rope_.defined()) rope_ = transformer_.rope(text.size(1), grids_);
    const at::Tensor rows = modulation_.narrow(0, step, 1);
    if (!references_.defined()) return transformer_.velocity(latents, text, rows, rope_, team);
    if (transformer_.config().cached_references) {
      const std::int64_t other = text.size(1) + latents.size(1);
      if (!cached_) cached_ = transformer_.references(references_, rope_.slice(1, other));
      return transformer_.velocity(latents, text, rows, rope_.slice(1, 0, other), team, &*cached_);
    }
    return transformer_.velocity(at::cat({latents, references_}, 1), text, rows, rope_, team)
        .slice(1, 0, latents.size(1));
  }

 private:
  double guidance_scale(std::int64_t) const override { return scale_; }

  const Flux2Transformer& transformer_;
  const double scale_;
  const std::vector<TokenGrid> grids_;  // of the latents and of the references
  const at::Tensor references_;         // see Flux2Network::encode_image()
  std::array<at::Tensor, 2> texts_;     // of the prompt and of the negative one
  at::Tensor modulation_, rope_;
  std::optional<Flux2Transformer::Cached> cached_;
};

class Flux2Network final : public Network {
 public:
  static std::unique_ptr<Network> load(Folder& folder);

  std::unique_ptr<Network> clone() const override { return std::make_unique<Flux2Network>(*this); }
  std::vector<TextEncoder*> text_encoders() override { return {&text_}; }
  std::vector<Transformer*> transformers() override { return {&transformer_}; }
  std::int64_t vae_bytes() const override { return vae_.bytes(); }
  LoraBase lora_base(std::vector<std::vector<BaseLinear>> linears) const override {
    return flux2_lora_base(std::move(linears[0]));
  }

  void complete(Settings& settings) const override {
    if (!(settings.real("guidance_scale") > 1)) return;
    if (distilled_)
      settings.warnings.push_back("guidance_scale has no effect on this model, which is distilled");
    else
      settings.negative = "";
  }
  void prewarm(const Settings& settings) const override {
    const std::int64_t tokens = rows(settings) * columns(settings);
    const std::int64_t references = tokens_of(grids(settings)) - tokens;
    const bool cached = transformer_.config().cached_references;
    transformer_.prewarm(settings.text_tokens(), cached ? tokens : tokens + references, cached ? references : 0,
                         !settings.loras.empty());
  }

  PromptIds longest_ids(const Settings& settings) const override {
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(settings.text_tokens()));
    return {{{"qwen3_ids", ids}, {"qwen3_mask", ids}}, {}};
  }
  EncodedPrompt encode(PromptIds ids, const Settings&) const override {
    at::Tensor embeds = at::cat(text_.encode(ids.ids.at("qwen3_ids"), ids.ids.at("qwen3_mask"), kTextLayers), 2);
    return {std::move(ids), {{"prompt_embeds", std::move(embeds)}}};
  }
  // The references' tokens, [1, tokens, channels] on the device.
  at::Tensor encode_image(const Settings& settings, const at::Tensor& noise) const override;
  std::vector<std::int64_t> noise_size(const Settings& settings) const override {
    return {1, transformer_.config().channels, rows(settings), columns(settings)};
  }
  Schedule schedule(const Settings& settings) const override {
    const std::int64_t tokens = rows(settings) * columns(settings);
    return make_schedule(scheduler_, settings.steps(), tokens, {}, shift_of(tokens, settings.steps()));
  }
  std::unique_ptr<Sampler> sampler(const Settings&, const Schedule& schedule) const override {
    return make_flow_sampler({.unipc = false}, schedule, placement.device);
  }
  std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule& schedule,
                                     const Conditions& conditions) const override {
    return std::make_unique<Flux2Denoiser>(transformer_, settings, schedule, conditions, grids(settings));
  }
  at::Tensor first_latents(const Conditions& conditions, const Schedule&) const override {
    return conditions.noise.flatten(2).transpose(1, 2);
  }
  at::Tensor finished(const at::Tensor& latents, const Settings& settings) const override {
    const at::Tensor packed = latents.transpose(1, 2).unflatten(2, {rows(settings), columns(settings)});
    return unpack_latents(vae_.denormalized(packed).flatten(2).transpose(1, 2), rows(settings), columns(settings));
  }
  void decode(const at::Tensor& latents, const Settings&, const FrameSink& sink) const override {
    sink(vae_.decode(latents));
  }
  at::Tensor preview(const at::Tensor& estimate, const Settings& settings) const override {
    return vae_.preview(finished(estimate.to(placement.dtype), settings));
  }

 private:
  Flux2Network(SchedulerConfig scheduler, bool distilled, QwenEncoder text, Flux2Transformer transformer, ImageVae vae)
      : scheduler_(scheduler),
        distilled_(distilled),
        text_(std::move(text)),
        transformer_(std::move(transformer)),
        vae_(std::move(vae)) {}
  // The image's tokens, of 2 × 2 latent pixels.
  std::int64_t rows(const Settings& settings) const { return settings.height() / (2 * vae_.config().factor()); }
  std::int64_t columns(const Settings& settings) const { return settings.width() / (2 * vae_.config().factor()); }
  media::KleinSizes sizes_of(const Media& picture) const {
    return media::klein_sizes({picture.width, picture.height}, static_cast<int>(2 * vae_.config().factor()));
  }
  std::vector<TokenGrid> grids(const Settings& settings) const {
    std::vector<TokenGrid> all{{rows(settings), columns(settings)}};
    for (const auto& picture : settings.images) {
      const media::Size size = sizes_of(*picture).cropped;
      all.push_back({size.height / (2 * vae_.config().factor()), size.width / (2 * vae_.config().factor())});
    }
    return all;
  }

  const SchedulerConfig scheduler_;
  const bool distilled_;
  QwenEncoder text_;
  Flux2Transformer transformer_;
  ImageVae vae_;
};

at::Tensor Flux2Network::encode_image(const Settings& settings, const at::Tensor&) const {
  std::vector<at::Tensor> tokens;
  for (const auto& picture : settings.images) {
    const auto [resized, cropped] = sizes_of(*picture);
    at::Tensor pixels;
    if (placement.device.is_meta()) {
      pixels = to_pixels(*picture, cropped.width, cropped.height, placement.device);
    } else {
      const Media small = media::resize_lanczos(*picture, resized.width, resized.height);
      pixels = to_pixels(media::crop_center(small, cropped.width, cropped.height), cropped.width, cropped.height,
                         placement.device);
    }
    const at::Tensor moments = vae_.moments(pixels.to(placement.device, placement.dtype));
    const at::Tensor packed = pack_latents(vae_.latents(moments, {})).transpose(1, 2).unsqueeze(3);
    tokens.push_back(vae_.normalized(packed).squeeze(3).transpose(1, 2));
  }
  return tokens.empty() ? at::Tensor() : at::cat(tokens, 1);
}

std::unique_ptr<Network> Flux2Network::load(Folder& folder) {
  const LoadContext& c = folder.context;
  folder.refuse_vae_dtype();
  const auto scheduler = read_scheduler_config(ConfigFile(folder.dir("scheduler") + "/scheduler_config.json"));
  const auto qwen3 = read_qwen3_config(folder.config("text_encoder"));
  const auto config = read_flux2_config(folder.config("transformer"), folder.index());
  const auto vae = read_vae_config(folder.config("vae"));
  const bool distilled = folder.index().boolean("is_distilled", false) || config.cached_references;
  if (qwen3.num_hidden_layers < kTextLayers.back())
    folder.config("text_encoder")
        .refuse("num_hidden_layers is " + std::to_string(qwen3.num_hidden_layers) +
                "; the transformer reads what layers 9, 18 and 27 make");
  folder.must_match("transformer's joint_attention_dim", config.text_width, "three times text_encoder's hidden_size",
                    3 * qwen3.hidden_size);
  folder.must_match("transformer's in_channels", config.channels, "four times vae's latent_channels",
                    4 * vae.latent_channels);
  if (!vae.batch_norm_eps) folder.config("vae").refuse("_class_name is AutoencoderKL; it must be AutoencoderKLFlux2");
  auto text = folder.load("text_encoders", [&] {
    return QwenEncoder::load(folder.files("text_encoder"), c.placement, kTextLayers.back(), c.regions,
                             folder.quantize("text_encoder"));
  });
  auto transformer = folder.load(
      "transformer", [&] { return Flux2Transformer::load(folder.transformer("transformer"), config, c.placement); });
  auto decoder = folder.load("vae", [&] { return ImageVae::load(folder.files("vae"), c.placement, c.regions); });
  return std::unique_ptr<Network>(new Flux2Network(scheduler, distilled, text.get(), transformer.get(), decoder.get()));
}

FileAbout about(std::string_view component, const Checkpoint& file) {
  if (component == "transformer") return {"FLUX.2 transformer", ""};
  if (component == "text_encoder") return {"Qwen3 text encoder", ""};
  return {file.contains("bn.running_mean") ? "VAE of FLUX.2" : "", ""};
}

std::unique_ptr<Tokenizers> load_tokenizers(const ModelSource& source) {
  std::vector<Prompts::Encoder> encoders;
  encoders.push_back({.name = "qwen3",
                      .shown = "Qwen3",
                      .ids = "qwen3_ids",
                      .tokenizer = unwrap(Tokenizer::load_qwen(source.dir + "/tokenizer")),
                      .pads = true,
                      .clean = [](const std::string& prompt) { return qwen_chat(prompt, /*thinking=*/false); },
                      .mask = "qwen3_mask"});
  return std::make_unique<Prompts>(std::move(encoders));
}

}  // namespace

const Family& flux2_family() {
  static const Family family{
      .description = &families::kFlux2,
      .components = {{"scheduler", "FlowMatchEulerDiscreteScheduler"},
                     {"tokenizer", "Qwen2Tokenizer"},
                     {"transformer",
                      "Flux2Transformer2DModel",
                      Library::kDiffusers,
                      {"fp8", "nf4"},
                      false,
                      {"model.diffusion_model.", "diffusion_model."},
                      {"double_stream_modulation_img.lin.weight", "double_stream_modulation_img.linear.weight"}},
                     {"text_encoder",
                      "Qwen3ForCausalLM",
                      Library::kTransformers,
                      {"nf4"},
                      false,
                      kQwen3Prefixes,
                      kQwen3Tensors,
                      "Qwen3Model"},
                     {"vae",
                      "AutoencoderKLFlux2",
                      Library::kDiffusers,
                      {},
                      false,
                      {"vae.", "first_stage_model."},
                      {"bn.running_mean"}}},
      .load = Flux2Network::load,
      .load_tokenizers = load_tokenizers,
      .about = about,
      .spec = [](const ConfigFile& config,
                 const ConfigFile& index) { return flux2_spec(read_flux2_config(config, index)); },
      .small = {512, 512, 1},
      .typical = {1024, 1024, 1}};
  return family;
}

}  // namespace ditfleet::pipeline
