#include "pipeline/families/flux/flux.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/prompts.h"
#include "pipeline/engine/step_window.h"
#include "pipeline/families/flux/adapter_names.h"
#include "pipeline/families/flux/rope.h"
#include "pipeline/families/flux/transformer.h"
#include "pipeline/nn/text/clip_encoder.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/nn/vae/image_vae.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "pipeline/sampling/latents.h"
#include "shared/families/flux/flux.h"
#include "shared/media/resize.h"
#include "shared/media/sizes.h"

namespace ditfleet::pipeline {
namespace {

// The inputs of the steps are computed on the text thread while another image is denoised, because FLUX's modulation
// weights are 6 GB and adapters on them need further products.
class FluxDenoiser final : public Denoiser {
 public:
  FluxDenoiser(const FluxTransformer& flux, const Settings& settings, const Schedule& schedule,
               const Conditions& conditions, std::vector<TokenGrid> grids, at::Tensor mask)
      : flux_(flux),
        timesteps_(on_device(schedule.timesteps, flux.placement().device)),
        guidance_(settings.real("guidance_scale")),
        scale_(settings.real("true_cfg_scale")),
        text_tokens_(settings.text_tokens()),
        grids_(std::move(grids)),
        sigmas_(schedule.sigmas),
        picture_(conditions.image.defined() ? pack_latents(conditions.image) : at::Tensor()),
        mask_(std::move(mask)),
        noise_(mask_.defined() ? pack_latents(conditions.noise).to(picture_.options()) : at::Tensor()) {
    passes_.push_back(pass_of(conditions.prompt));
    if (conditions.negative) passes_.push_back(pass_of(*conditions.negative));
  }

  at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team& team,
                      BlockCache* cache) override {
    if (!rope_.defined()) rope_ = rope_table(flux_.config(), text_tokens_, grids_, flux_.placement());
    Pass& pass = passes_[negative ? 1 : 0];
    const auto [table, at] = pass.modulation.at(step);
    const StepModulation modulation = table.step(at);
    if (grids_.size() == 1) return flux_.velocity(latents, pass.text, modulation, rope_, team, cache);
    return flux_.velocity(at::cat({latents, picture_}, 1), pass.text, modulation, rope_, team, cache)
        .slice(1, 0, latents.size(1));
  }
  // As FluxInpaintPipeline: what the mask keeps is the picture with the noise of the next step.
  at::Tensor stepped(const at::Tensor& latents, std::int64_t step) const override {
    if (!mask_.defined()) return latents;
    const auto next = static_cast<std::size_t>(step) + 1;
    const at::Tensor kept = next + 1 < sigmas_.size() ? add_noise(picture_, noise_, sigmas_[next]) : picture_;
    return (1 - mask_) * kept + mask_ * latents;
  }

 private:
  struct Pass {
    at::Tensor text;  // [1, max_sequence_length, D]: the prompt as input of the blocks
    StepWindow<ModulationTable> modulation;
  };
  Pass pass_of(const EncodedPrompt& prompt) const {
    const at::Tensor pooled = prompt.tensors.at("pooled_prompt_embeds");  // [1, pooled_projection_dim]
    return {flux_.embed_text(prompt.tensors.at("prompt_embeds")),
            {timesteps_.size(0), [this, pooled](std::int64_t first, std::int64_t count) {
               return flux_.modulation(timesteps_.narrow(0, first, count), guidance_, pooled);
             }}};
  }
  double guidance_scale(std::int64_t) const override { return scale_; }

  const FluxTransformer& flux_;
  const at::Tensor timesteps_;  // [steps] fp32, on the device
  const double guidance_, scale_;
  const std::int64_t text_tokens_;
  const std::vector<TokenGrid> grids_;  // of the latents, and of a picture beside them
  const std::vector<float> sigmas_;
  const at::Tensor picture_;       // packed: see FluxNetwork::encode_image()
  const at::Tensor mask_, noise_;  // [1, tokens, in_channels] on the device; undefined without a mask
  std::vector<Pass> passes_;
  at::Tensor rope_;
};

// The tokens of a picture: of the preferred size with the nearest aspect ratio, or of its own size.
TokenGrid kontext_grid(const Media& picture, const Settings& settings, int side) {
  const media::Size own{picture.width, picture.height};
  const media::Size size = settings.integer("auto_resize", 1) ? media::kontext_size(own, side) : own;
  return {size.height / side, size.width / side};
}

class FluxNetwork final : public Network {
 public:
  static std::unique_ptr<Network> load(Folder& folder);

  std::unique_ptr<Network> clone() const override { return std::make_unique<FluxNetwork>(*this); }
  std::vector<TextEncoder*> text_encoders() override { return {&clip_, &t5_}; }
  std::vector<Transformer*> transformers() override { return {&transformer_}; }
  std::int64_t vae_bytes() const override { return vae_.bytes(); }
  LoraBase lora_base(std::vector<std::vector<BaseLinear>> linears) const override {
    return flux_lora_base(std::move(linears[0]), std::move(linears[1]), std::move(linears[2]));
  }

  void complete(Settings& settings) const override {
    settings.cache_threshold = settings.real("cache");
    if (!(settings.real("true_cfg_scale") > 1)) return;
    if (const std::string* negative = settings.fields.text("negative_prompt"))
      settings.negative = *negative;
    else
      settings.warnings.push_back("true_cfg_scale has no effect without a negative_prompt (which may be empty)");
  }
  void prewarm(const Settings& settings) const override {
    transformer_.prewarm(settings.text_tokens(), tokens_of(grids(settings)));
  }

  PromptIds longest_ids(const Settings& settings) const override {
    const auto ids = [](std::int64_t count) { return std::vector<std::int32_t>(static_cast<std::size_t>(count)); };
    return {{{"clip_ids", ids(clip_.config().max_position_embeddings)}, {"t5_ids", ids(settings.text_tokens())}}, {}};
  }
  EncodedPrompt encode(PromptIds ids, const Settings&) const override {
    at::Tensor pooled = clip_.pooled(ids.ids.at("clip_ids")), tokens = t5_.encode(ids.ids.at("t5_ids"));
    return {std::move(ids), {{"pooled_prompt_embeds", std::move(pooled)}, {"prompt_embeds", std::move(tokens)}}};
  }
  // FLUX.1 Kontext gets the mean of the picture's latents as tokens beside those of the noise. The others begin with a
  // sample.
  bool samples_image(const Settings& settings) const override { return !settings.images.empty() && !kontext_; }
  // [1, in_channels / 4, rows, columns] on the device.
  at::Tensor encode_image(const Settings& settings, const at::Tensor& noise) const override;
  std::vector<std::int64_t> noise_size(const Settings& settings) const override {
    const TokenGrid grid = grids(settings)[0];
    return {1, transformer_.config().in_channels / 4, 2 * grid.rows, 2 * grid.columns};
  }
  Schedule schedule(const Settings& settings) const override;
  int steps_in_memory() const override { return kStepsTogether; }
  std::unique_ptr<Sampler> sampler(const Settings&, const Schedule& schedule) const override {
    return make_flow_sampler({.unipc = false}, schedule, placement.device);
  }
  std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule& schedule,
                                     const Conditions& conditions) const override {
    return std::make_unique<FluxDenoiser>(transformer_, settings, schedule, conditions, grids(settings),
                                          settings.mask ? mask(settings) : at::Tensor());
  }
  at::Tensor first_latents(const Conditions& conditions, const Schedule& schedule) const override {
    const at::Tensor& picture = conditions.image;
    if (kontext_ || !picture.defined()) return pack_latents(conditions.noise);
    return pack_latents(add_noise(picture, conditions.noise.to(picture.options()), schedule.sigmas[0]));
  }
  void decode(const at::Tensor& latents, const Settings& settings, const FrameSink& sink) const override {
    sink(vae_.decode(unpacked(latents, settings)));
  }
  at::Tensor preview(const at::Tensor& estimate, const Settings& settings) const override {
    return vae_.preview(unpacked(estimate.to(placement.dtype), settings));
  }

 private:
  FluxNetwork(std::string dir, SchedulerConfig scheduler, ClipEncoder clip, T5Encoder t5, FluxTransformer transformer,
              ImageVae vae, bool kontext)
      : dir_(std::move(dir)),
        scheduler_(scheduler),
        clip_(std::move(clip)),
        t5_(std::move(t5)),
        transformer_(std::move(transformer)),
        vae_(std::move(vae)),
        kontext_(kontext) {}
  // The tokens, of 2 × 2 latent pixels, of the image that is made, and of Kontext's picture.
  std::vector<TokenGrid> grids(const Settings& settings) const {
    const std::int64_t side = 2 * vae_.config().factor();
    std::vector<TokenGrid> all{{settings.height() / side, settings.width() / side}};
    if (kontext_)
      for (const auto& picture : settings.images)
        all.push_back(kontext_grid(*picture, settings, static_cast<int>(side)));
    return all;
  }
  at::Tensor unpacked(const at::Tensor& latents, const Settings& settings) const {
    const TokenGrid grid = grids(settings)[0];
    return unpack_latents(latents, grid.rows, grid.columns);
  }
  at::Tensor mask(const Settings& settings) const;

  const std::string dir_;
  const SchedulerConfig scheduler_;
  ClipEncoder clip_;
  T5Encoder t5_;
  FluxTransformer transformer_;
  ImageVae vae_;
  const bool kontext_;
};

// 1 where the mask is at least half white, at the latent pixel's first pixel; packed.
at::Tensor FluxNetwork::mask(const Settings& settings) const {
  const auto size = noise_size(settings);
  if (placement.device.is_meta())
    return pack_latents(at::empty(size, at::TensorOptions(placement.dtype).device(placement.device)));
  const std::vector<std::uint8_t> grey =
      media::grey(media::resize_lanczos(*settings.mask, settings.width(), settings.height()));
  const std::int64_t factor = vae_.config().factor();
  const at::Tensor bytes = at::from_blob(const_cast<std::uint8_t*>(grey.data()), {settings.height(), settings.width()},
                                         at::TensorOptions(c10::ScalarType::Byte));
  const at::Tensor white = bytes.slice(0, 0, {}, factor).slice(1, 0, {}, factor) >= 128;
  return pack_latents(white.to(placement.dtype).expand(size).contiguous()).to(placement.device);
}

at::Tensor FluxNetwork::encode_image(const Settings& settings, const at::Tensor& noise) const {
  if (settings.images.empty()) return {};
  const TokenGrid grid = grids(settings).back();
  const std::int64_t side = 2 * vae_.config().factor();
  const at::Tensor pixels =
      to_pixels(*settings.images[0], grid.columns * side, grid.rows * side, placement.device).to(placement.dtype);
  return vae_.latents(vae_.moments(pixels.to(placement.device)), noise);
}

std::unique_ptr<Network> FluxNetwork::load(Folder& folder) {
  const LoadContext& c = folder.context;
  folder.refuse_vae_dtype();
  const auto scheduler = read_scheduler_config(ConfigFile(folder.dir("scheduler") + "/scheduler_config.json"));
  const auto clip = read_clip_config(folder.config("text_encoder"));
  const auto t5 = read_t5_config(folder.config("text_encoder_2"));
  const auto flux = read_flux_config(folder.config("transformer"));
  const auto vae = read_vae_config(folder.config("vae"));
  folder.must_match("transformer's pooled_projection_dim", flux.pooled_projection_dim, "text_encoder's hidden_size",
                    clip.layers.hidden_size);
  folder.must_match("transformer's joint_attention_dim", flux.joint_attention_dim, "text_encoder_2's d_model",
                    t5.d_model);
  folder.must_match("a quarter of transformer's in_channels", flux.in_channels / 4, "vae's latent_channels",
                    vae.latent_channels);
  if (folder.tokenizers) {
    const int length = dynamic_cast<const Prompts&>(*folder.tokenizers).encoders()[0].length;
    if (length > clip.max_position_embeddings)
      fail(Code::kDataCorrupt, folder.dir("tokenizer") + "/tokenizer_config.json: model_max_length is " +
                                   std::to_string(length) + "; text_encoder has positions for " +
                                   std::to_string(clip.max_position_embeddings));
  }
  auto texts = folder.load("text_encoders", [&] {
    auto first =
        ClipEncoder::load(folder.files("text_encoder"), c.placement, c.regions, folder.quantize("text_encoder"));
    return std::pair(std::move(first), T5Encoder::load(folder.files("text_encoder_2"), c.placement, c.regions,
                                                       folder.quantize("text_encoder_2")));
  });
  auto transformer =
      folder.load("transformer", [&] { return FluxTransformer::load(folder.transformer("transformer"), c.placement); });
  auto decoder = folder.load("vae", [&] { return ImageVae::load(folder.files("vae"), c.placement, c.regions); });
  auto [first, second] = texts.get();
  return std::unique_ptr<Network>(new FluxNetwork(c.source.dir, scheduler, std::move(first), std::move(second),
                                                  transformer.get(), decoder.get(),
                                                  families::is_flux_kontext(folder.index().text("_class_name", ""))));
}

Schedule FluxNetwork::schedule(const Settings& settings) const {
  const int steps = settings.steps();
  Schedule schedule = make_schedule(scheduler_, steps, grids(settings)[0].tokens());
  if (std::all_of(schedule.sigmas.begin(), schedule.sigmas.end(), [](float sigma) { return std::isfinite(sigma); })) {
    const int left_out = samples_image(settings) ? steps - job::steps_of(settings.fields) : 0;
    schedule.sigmas.erase(schedule.sigmas.begin(), schedule.sigmas.begin() + left_out);
    schedule.timesteps.erase(schedule.timesteps.begin(), schedule.timesteps.begin() + left_out);
    return schedule;
  }
  // shift_terminal divides 0 by 0 if there is only one step; a shift that is not above 0 does so with any number.
  if (steps == 1)
    fail(Code::kInvalidArgument, "num_inference_steps is 1, but this model's scheduler needs at least 2",
         "num_inference_steps");
  fail(Code::kDataCorrupt, "[encode] this model's scheduler cannot compute a schedule of " + std::to_string(steps) +
                               " steps; check shift (above 0) and shift_terminal (below 1) in " + dir_ +
                               "/scheduler/scheduler_config.json");
}

FileAbout about(std::string_view component, const Checkpoint& file) {
  if (component == "transformer") {
    if (file.contains("single_stream_modulation.lin.weight") || file.contains("single_stream_modulation.linear.weight"))
      return {};  // the successor's
    const std::int64_t inputs = file.extent({"img_in.weight", "x_embedder.weight"}, 1);
    const bool guided = file.contains("guidance_in.in_layer.weight") ||
                        file.contains("time_text_embed.guidance_embedder.linear_1.weight");
    const std::string text = std::string("FLUX.1 transformer, ") + (guided ? "with guidance as dev" : "as schnell");
    if (inputs == 384 || inputs == 128)
      return {text, "it has " + std::to_string(inputs) + " input channels, as " +
                        (inputs == 384 ? "Fill" : "Control (Canny, Depth)") + ", which is not supported"};
    const bool whole = file.extent({"img_in.weight", "x_embedder.weight"}, 0) == 3072 &&
                       (file.contains("single_blocks.37.linear2.weight") ||
                        file.contains("single_transformer_blocks.37.proj_out.weight"));
    if (whole) return {text, "", {guided ? "FLUX.1-dev" : "FLUX.1-schnell"}};
    return {text, "", {}};
  }
  if (component == "text_encoder") {
    const std::int64_t width =
        file.extent({"text_model.embeddings.token_embedding.weight", "embeddings.token_embedding.weight"}, 1);
    return {"CLIP text encoder",
            width == 1280 ? "it is 1280 wide, as Stable Diffusion XL's second; FLUX.1 has CLIP-L" : ""};
  }
  if (component == "text_encoder_2") return {is_umt5(file) ? "" : "T5 text encoder", ""};
  const std::int64_t channels = file.extent({"decoder.conv_in.weight"}, 1);
  if (file.extent({"decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight"}, 4) >= 0) return {};
  return {"VAE of images", channels == 4 ? "it has 4 latent channels, as Stable Diffusion's; FLUX.1's has 16" : ""};
}

std::unique_ptr<Tokenizers> load_tokenizers(const ModelSource& source) {
  Tokenizer clip = unwrap(Tokenizer::load_clip(source.dir + "/tokenizer")),
            t5 = unwrap(Tokenizer::load_t5(source.dir + "/tokenizer_2"));
  const int length = *clip.model_max_length();
  std::vector<Prompts::Encoder> encoders;
  encoders.push_back({"clip", "CLIP", "clip_ids", std::move(clip), length, /*pads=*/true});
  encoders.push_back({"t5", "T5", "t5_ids", std::move(t5), 0, /*pads=*/true});
  return std::make_unique<Prompts>(std::move(encoders));
}

}  // namespace

const Family& flux_family() {
  static const Family family{
      .description = &families::kFlux,
      .components =
          {{"scheduler", "FlowMatchEulerDiscreteScheduler"},
           {"tokenizer", "CLIPTokenizer"},
           {"tokenizer_2", "T5Tokenizer"},
           {"transformer",
            "FluxTransformer2DModel",
            Library::kDiffusers,
            {"fp8", "nf4"},
            false,
            {"model.diffusion_model.", "diffusion_model."},
            {"double_blocks.0.img_attn.qkv.weight", "transformer_blocks.0.attn.add_q_proj.weight"}},
           {"text_encoder",
            "CLIPTextModel",
            Library::kTransformers,
            {"nf4"},
            false,
            {"text_encoders.clip_l.transformer."},
            {"text_model.embeddings.token_embedding.weight", "embeddings.token_embedding.weight"}},
           {"text_encoder_2", "T5EncoderModel", Library::kTransformers, {"nf4"}, false, kT5Prefixes, kT5Tensors},
           {"vae",
            "AutoencoderKL",
            Library::kDiffusers,
            {},
            false,
            {"vae.", "first_stage_model."},
            {"decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight"}}},
      .load = FluxNetwork::load,
      .load_tokenizers = load_tokenizers,
      .about = about,
      .spec = [](const ConfigFile& config, const ConfigFile&) { return flux_spec(read_flux_config(config)); },
      .small = {512, 512, 1},
      .typical = {1024, 1024, 1}};
  return family;
}

}  // namespace ditfleet::pipeline
