#include "pipeline/families/wan/wan.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/prompts.h"
#include "pipeline/families/wan/adapter_names.h"
#include "pipeline/families/wan/prompt_clean.h"
#include "pipeline/families/wan/transformer.h"
#include "pipeline/nn/text/clip_vision.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/nn/video_vae/preview.h"
#include "pipeline/nn/video_vae/video_vae.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "pipeline/sampling/latents.h"
#include "shared/core/excerpt.h"
#include "shared/core/text.h"
#include "shared/families/wan/wan.h"

namespace ditfleet::pipeline {
namespace {

// Latent frames after which decoding and encoding have reached their peaks: the caches of the convolutions are full.
constexpr std::int64_t kFramesToPeak = 3;
constexpr std::string_view kStoredTokenizer = "spiece_model";

// "1, 0.75, 0.5": from at most 1, falling, above 0.
std::vector<double> read_sigmas(std::string_view text) {
  std::vector<double> sigmas;
  for (std::string_view part : split(text, ',')) {
    part.remove_prefix(std::min(part.find_first_not_of(' '), part.size()));
    part = part.substr(0, part.find_last_not_of(' ') + 1);
    const auto sigma = number_of<double>(part, 0, 1);
    if (!sigma || *sigma == 0 || (!sigmas.empty() && *sigma >= sigmas.back()))
      fail(Code::kInvalidArgument,
           "sigmas must be falling numbers from 1 to above 0, separated by commas, such as 1, 0.75, 0.5, 0.25",
           "sigmas");
    sigmas.push_back(*sigma);
  }
  return sigmas;
}

// The folder's scheduler with what the request changes. Another class has its defaults and the folder's shift.
FlowSchedulerConfig scheduler_of(FlowSchedulerConfig c, const Settings& settings) {
  if (const std::string* sampler = settings.fields.text("sampler")) {
    if (*sampler != "euler" && *sampler != "unipc")
      fail(Code::kInvalidArgument, "sampler is \"" + excerpt(*sampler, 40) + "\"; it must be euler or unipc",
           "sampler");
    if ((*sampler == "unipc") != c.unipc) {
      c.unipc = !c.unipc;
      if (c.unipc)
        c.flow_shift = c.euler.shift;
      else
        c.euler = {.shift = c.flow_shift, .use_flow_sigmas = true};
    }
  }
  if (const auto shift = settings.fields.real("flow_shift"))
    (c.unipc ? c.flow_shift : c.euler.shift) = checked_flow_shift(*shift);
  return c;
}

// Follows diffusers' WanPipeline and WanImageToVideoPipeline: the first transformer at timesteps from boundary · 1000
// on, the second one below.
class WanDenoiser final : public Denoiser {
 public:
  WanDenoiser(std::vector<const WanTransformer*> transformers, double boundary, const Settings& settings,
              const Schedule& schedule, const Conditions& conditions)
      : transformers_(std::move(transformers)),
        boundary_(boundary),
        timesteps_(schedule.timesteps),
        scales_{settings.real("guidance_scale"), settings.real("guidance_scale_2", settings.real("guidance_scale"))},
        condition_(conditions.image),
        still_frames_(condition_.defined() && transformers_[0]->config().expand_timesteps ? 1 : 0) {
    for (const WanTransformer* transformer : transformers_) {
      const auto embed = [&](const EncodedPrompt& prompt) {
        return transformer->embed_text(prompt.tensors.at("prompt_embeds"));
      };
      texts_.push_back({embed(conditions.prompt), conditions.negative ? embed(*conditions.negative) : at::Tensor()});
      images_.push_back(conditions.image_embeds.defined() ? transformer->embed_image(conditions.image_embeds)
                                                          : at::Tensor());
    }
  }

  std::size_t expert(std::int64_t step) const override {
    return transformers_.size() > 1 && timestep(step) < boundary_ * 1000 ? 1 : 0;
  }
  at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team& team,
                      BlockCache* cache) override {
    const WanTransformer& transformer = *transformers_[expert(step)];
    at::Tensor input = latents.to(transformer.placement().dtype);
    if (still_frames_ > 0)
      input = with_picture(latents).to(transformer.placement().dtype);
    else if (condition_.defined())
      input = at::cat({input, condition_}, 1);
    if (!rope_.defined()) rope_ = transformer.rope(latents.size(2), latents.size(3), latents.size(4));
    const std::size_t which = expert(step);
    return transformer.velocity(input, timestep(step),
                                {texts_[which][negative ? 1 : 0], rope_, images_[which], still_frames_}, team, cache);
  }
  // The sampler also changes the picture's frame, which velocity() does not read.
  at::Tensor stepped(const at::Tensor& latents, std::int64_t step) const override {
    const bool last = static_cast<std::size_t>(step) + 1 == timesteps_.size();
    return last && still_frames_ > 0 ? with_picture(latents) : latents;
  }

 private:
  // The picture as the first frame of the latents, in fp32.
  at::Tensor with_picture(const at::Tensor& latents) const { return at::cat({condition_, latents.slice(2, 1)}, 2); }
  double timestep(std::int64_t step) const { return timesteps_[static_cast<std::size_t>(step)]; }
  double guidance_scale(std::int64_t step) const override { return scales_[expert(step)]; }

  const std::vector<const WanTransformer*> transformers_;
  const double boundary_;
  const std::vector<float> timesteps_;
  const std::array<double, 2> scales_;  // by expert
  const at::Tensor condition_;          // see WanNetwork::encode_image()
  const std::int64_t still_frames_;
  std::vector<std::array<at::Tensor, 2>> texts_;  // by expert: the prompt and the negative one, [1, L, inner_dim]
  std::vector<at::Tensor> images_;                // by expert: CLIP's tokens, [1, L, inner_dim]
  at::Tensor rope_;                               // the same for both transformers
};

class WanNetwork final : public Network {
 public:
  static std::unique_ptr<Network> load(Folder& folder);

  std::unique_ptr<Network> clone() const override { return std::make_unique<WanNetwork>(*this); }
  std::vector<TextEncoder*> text_encoders() override {
    if (vision_) return {&text_, &vision_->encoder};
    return {&text_};
  }
  std::vector<Transformer*> transformers() override {
    std::vector<Transformer*> all;
    for (WanTransformer& one : transformers_) all.push_back(&one);
    return all;
  }
  std::int64_t vae_bytes() const override { return vae_.bytes(); }
  LoraBase lora_base(std::vector<std::vector<BaseLinear>> linears) const override {
    return wan_lora_base(std::move(linears[0]));
  }

  void complete(Settings& settings) const override {
    settings.cache_threshold = settings.real("cache");
    if (settings.images.size() > 1 && settings.frames() == 1)
      fail(Code::kInvalidArgument, "a video of 1 frame has no last frame; use one image, or 5 frames or more", "image");
    if (!(settings.real("guidance_scale") > 1)) return;
    const std::string* negative = settings.fields.text("negative_prompt");
    settings.negative = negative ? *negative : "";
  }
  void prewarm(const Settings& settings) const override {
    const auto size = latent_size(settings);
    for (const WanTransformer& transformer : transformers_)
      transformer.prewarm(size[2], size[3], size[4], settings.text_tokens(), image_tokens(),
                          expands() && !settings.images.empty() ? 1 : 0, !settings.loras.empty());
  }

  PromptIds longest_ids(const Settings& settings) const override {
    return {{{"prompt_ids", std::vector<std::int32_t>(static_cast<std::size_t>(settings.text_tokens()))}}, {}};
  }
  EncodedPrompt encode(PromptIds ids, const Settings& settings) const override {
    // Padding is masked, so it is left out, and its embeddings are zeros.
    const at::Tensor embeds = text_.encode(ids.ids.at("prompt_ids"));
    return {std::move(ids),
            {{"prompt_embeds", at::constant_pad_nd(embeds, {0, 0, 0, settings.text_tokens() - embeds.size(1)})}}};
  }
  // Mask and encoded images, [1, 4 + channels, latent frames, rows, columns] in the pipeline's type. With
  // expand_timesteps only the encoded image, [1, channels, 1, rows, columns] in fp32, if there is one.
  at::Tensor encode_image(const Settings& settings, const at::Tensor& noise) const override;
  at::Tensor embed_image(const Settings& settings) const override;
  std::vector<std::int64_t> noise_size(const Settings& settings) const override { return latent_size(settings); }
  c10::ScalarType noise_type() const override { return c10::ScalarType::Float; }
  Schedule schedule(const Settings& settings) const override;
  std::unique_ptr<Sampler> sampler(const Settings& settings, const Schedule& schedule) const override {
    return make_flow_sampler(scheduler_of(scheduler_, settings), schedule, placement.device);
  }
  std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule& schedule,
                                     const Conditions& conditions) const override {
    std::vector<const WanTransformer*> all;
    for (const WanTransformer& one : transformers_) all.push_back(&one);
    return std::make_unique<WanDenoiser>(std::move(all), boundary_, settings, schedule, conditions);
  }
  void decode(const at::Tensor& latents, const Settings&, const FrameSink& sink) const override {
    vae_.decode(latents.is_meta() ? latents.narrow(2, 0, std::min(latents.size(2), kFramesToPeak)) : latents, sink);
  }
  at::Tensor preview(const at::Tensor& estimate, const Settings&) const override;

 private:
  // CLIP, of Wan 2.1 image to video.
  struct Vision {
    ClipProcessorConfig processor;
    ClipVision encoder;
  };

  WanNetwork(FlowSchedulerConfig scheduler, T5Encoder text, std::optional<Vision> vision,
             std::vector<WanTransformer> transformers, double boundary, VideoVae vae, bool from_image)
      : scheduler_(scheduler),
        text_(std::move(text)),
        vision_(std::move(vision)),
        transformers_(std::move(transformers)),
        boundary_(boundary),
        vae_(std::move(vae)),
        from_image_(from_image) {}
  std::int64_t images() const { return transformers_[0].config().pos_embed_seq_len > 0 ? 2 : 1; }  // that CLIP gets
  std::int64_t image_tokens() const { return vision_ ? images() * vision_->encoder.config().tokens() : 0; }
  bool expands() const { return transformers_[0].config().expand_timesteps; }
  std::vector<std::int64_t> latent_size(const Settings& settings) const {
    const std::int64_t factor = vae_.config().spatial_factor();
    return {1, vae_.config().z_dim, wan_latent_frames(settings.frames()), settings.height() / factor,
            settings.width() / factor};
  }

  const FlowSchedulerConfig scheduler_;
  T5Encoder text_;
  std::optional<Vision> vision_;
  std::vector<WanTransformer> transformers_;  // one, or those of high and of low noise levels
  const double boundary_;                     // timesteps below boundary · 1000 run on the second
  VideoVae vae_;
  const bool from_image_;  // the transformers' input has a mask and a condition beside the latents
};

std::unique_ptr<Network> WanNetwork::load(Folder& folder) {
  const LoadContext& c = folder.context;
  const std::string& vae_dtype = c.source.vae_dtype;
  if (vae_dtype != "" && vae_dtype != "fp32" && vae_dtype != "bf16")
    fail(Code::kInvalidArgument, "vae_dtype is \"" + vae_dtype + "\"; it must be fp32 or bf16", "vae_dtype");
  const ConfigFile index = folder.index();
  const bool expand = expands_timesteps(index),
             from_image = !expand && index.text("_class_name", "") == "WanImageToVideoPipeline";
  std::vector<std::string> names{"transformer"};
  if (folder.has("transformer_2")) names.push_back("transformer_2");
  const std::optional<double> boundary = index.optional_number("boundary_ratio");
  if ((names.size() > 1) != boundary.has_value())
    index.refuse(names.size() > 1
                     ? "transformer_2 needs a boundary_ratio, such as 0.875"
                     : "boundary_ratio needs a transformer_2; set it to null for a model with one transformer");
  if (boundary && !(*boundary > 0 && *boundary < 1)) index.refuse("boundary_ratio must be between 0 and 1");

  const auto scheduler = read_flow_scheduler_config(ConfigFile(folder.dir("scheduler") + "/scheduler_config.json"));
  const auto umt5 = read_t5_config(folder.config("text_encoder"));
  const auto vae = read_video_vae_config(folder.config("vae"));
  folder.must_match("vae's pixels per latent pixel", vae.spatial_factor(),
                    expand ? "those of a model with expand_timesteps" : "those of a model without expand_timesteps",
                    expand ? 16 : 8);
  const auto first = read_wan_config(folder.config("transformer"));
  // The image_encoder of a folder whose transformer does not read it is left out.
  std::optional<ClipVisionConfig> clip;
  std::optional<ClipProcessorConfig> processor;
  if (first.image_dim > 0) {
    if (!from_image || !folder.has("image_encoder"))
      index.refuse("a transformer with an image_dim needs WanImageToVideoPipeline and an image_encoder");
    clip = read_clip_vision_config(folder.config("image_encoder"));
    processor = read_clip_processor_config(ConfigFile(folder.dir("image_processor") + "/preprocessor_config.json"));
    folder.must_match("image_processor's crop_size", processor->size, "image_encoder's image_size", clip->image_size);
  }
  for (const std::string& name : names) {
    const auto wan = read_wan_config(folder.config(name));
    folder.must_match(name + "'s text_dim", wan.text_dim, "text_encoder's d_model", umt5.d_model);
    if (from_image)
      folder.must_match(name + "'s in_channels", wan.in_channels, "twice vae's z_dim plus 4",
                        2 * vae.z_dim + VideoVaeConfig::kTemporalFactor);
    else
      folder.must_match(name + "'s in_channels", wan.in_channels, "vae's z_dim", vae.z_dim);
    folder.must_match(name + "'s image_dim", wan.image_dim, "image_encoder's hidden_size",
                      clip ? clip->layers.hidden_size : 0);
    if (wan.pos_embed_seq_len > 0)
      folder.must_match(name + "'s pos_embed_seq_len", wan.pos_embed_seq_len, "twice image_encoder's tokens",
                        2 * clip->tokens());
    folder.must_match(name + "'s out_channels", wan.out_channels, "vae's z_dim", vae.z_dim);
    // Adapters are read for both transformers at once.
    folder.must_match(name + "'s num_layers", wan.num_layers, "transformer's", first.num_layers);
    folder.must_match(name + "'s width", wan.width(), "transformer's", first.width());
    folder.must_match(name + "'s ffn_dim", wan.ffn_dim, "transformer's", first.ffn_dim);
    folder.must_match(name + "'s freq_dim", wan.freq_dim, "transformer's", first.freq_dim);
  }
  auto text = folder.load("text_encoders", [&] {
    return T5Encoder::load(folder.files("text_encoder"), c.placement, c.regions, folder.quantize("text_encoder"));
  });
  std::future<ClipVision> vision;
  if (clip)
    vision = folder.load("image_encoder", [&] { return ClipVision::load(folder.files("image_encoder"), c.placement); });
  auto transformers = folder.load("transformer", [&] {
    std::vector<WanTransformer> experts;
    for (const std::string& name : names)
      experts.push_back(WanTransformer::load(folder.transformer(name), c.placement, expand));
    return experts;
  });
  Placement vae_placement = for_convolutions(c.placement);
  if (!vae_dtype.empty())
    vae_placement.dtype = vae_dtype == "bf16" ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
  auto decoder = folder.load("vae", [&] {
    return VideoVae::load(folder.files("vae"), vae_placement, /*with_encoder=*/from_image || expand, c.regions);
  });
  std::optional<Vision> loaded;
  if (clip) loaded = Vision{*processor, vision.get()};
  return std::unique_ptr<Network>(new WanNetwork(scheduler, text.get(), std::move(loaded), transformers.get(),
                                                 boundary.value_or(0), decoder.get(), from_image));
}

Schedule WanNetwork::schedule(const Settings& settings) const {
  const FlowSchedulerConfig scheduler = scheduler_of(scheduler_, settings);
  std::vector<double> sigmas;
  if (const std::string* text = settings.fields.text("sigmas")) {
    sigmas = read_sigmas(*text);
    if (static_cast<int>(sigmas.size()) != settings.steps())
      fail(Code::kInvalidArgument,
           "sigmas has " + std::to_string(sigmas.size()) + " numbers, but num_inference_steps is " +
               std::to_string(settings.steps()) + "; they must agree",
           "sigmas");
    if (scheduler.unipc)
      fail(Code::kInvalidArgument, "sigmas are given, but the sampler is unipc; set sampler to euler", "sigmas");
  }
  return make_flow_schedule(scheduler, settings.steps(), sigmas);
}

at::Tensor WanNetwork::encode_image(const Settings& settings, const at::Tensor&) const {
  const auto& pictures = settings.images;
  if (!from_image_ && pictures.empty()) return {};
  const bool dry = placement.device.is_meta();
  auto size = latent_size(settings);
  std::int64_t frames = expands() ? 1 : settings.frames();
  if (dry) frames = std::min(frames, wan_frames(kFramesToPeak));
  // The frames without a picture are zeros, which is mid-grey.
  at::Tensor video = at::zeros({1, 3, frames, settings.height(), settings.width()},
                               at::TensorOptions(c10::ScalarType::Float).device(dry ? placement.device : c10::kCPU));
  for (std::size_t i = 0; i < pictures.size() && !dry; ++i)
    video.select(2, i == 0 ? 0 : frames - 1)
        .copy_(to_pixels(*pictures[i], settings.width(), settings.height(), video.device()));
  at::Tensor latents = vae_.encode(video);
  if (expands()) return latents;
  if (dry) latents = at::empty(size, latents.options());
  // One channel for each pixel frame of a latent frame. The first frame counts four times.
  size[1] = VideoVaeConfig::kTemporalFactor;
  at::Tensor mask = at::zeros(size, latents.options());
  mask.select(2, 0).fill_(1);
  if (pictures.size() > 1) mask.select(2, size[2] - 1).select(1, size[1] - 1).fill_(1);
  return at::cat({mask, latents}, 1).to(placement.dtype);
}

at::Tensor WanNetwork::embed_image(const Settings& settings) const {
  if (!vision_) return {};
  const std::int64_t size = vision_->processor.size;
  if (placement.device.is_meta())
    return vision_->encoder.hidden(
        at::empty({images(), 3, size, size}, at::TensorOptions(c10::ScalarType::Float).device(placement.device)));
  std::vector<at::Tensor> pixels;
  for (const auto& picture : settings.images) pixels.push_back(clip_pixels(*picture, vision_->processor));
  return vision_->encoder.hidden(at::cat(pixels));
}

at::Tensor WanNetwork::preview(const at::Tensor& estimate, const Settings&) const {
  if (estimate.size(1) == kPreviewChannels) return video_preview(estimate);
  at::Tensor picture;
  vae_.decode(small_frame(estimate), [&](const at::Tensor& frames) { picture = frames.select(2, 0); });
  return picture;
}

// Both transformers of Wan 2.2 have the tensors of Wan 2.1's.
// `images`: that it reads through CLIP.
std::vector<std::string> known_models(std::int64_t inputs, std::int64_t width, int images, const Checkpoint& file) {
  const auto has_block = [&](int number) {
    const std::string block = "blocks." + std::to_string(number);
    return file.contains(block + ".ffn.2.weight") || file.contains(block + ".ffn.net.2.weight");
  };
  if (inputs == 16 && width == 1536 && has_block(29) && !has_block(30)) return {"Wan2.1-T2V-1.3B"};
  if (inputs == 48 && width == 3072 && has_block(29) && !has_block(30)) return {"Wan2.2-TI2V-5B"};
  if (width != 5120 || !has_block(39) || has_block(40)) return {};
  if (inputs == 36)
    return {images == 0 ? "Wan2.2-I2V-A14B" : images == 1 ? "Wan2.1-I2V-14B-480P" : "Wan2.1-FLF2V-14B-720P"};
  return inputs == 16 ? std::vector<std::string>{"Wan2.1-T2V-14B", "Wan2.2-T2V-A14B"} : std::vector<std::string>();
}

FileAbout about(std::string_view component, const Checkpoint& file) {
  if (component == "transformer") {
    const std::int64_t inputs = file.extent({"patch_embedding.weight"}, 1);
    const auto has = [&](const char* own, const char* diffusers) {
      return file.contains(own) || file.contains(std::string("condition_embedder.image_embedder.") + diffusers);
    };
    const int images = !has("img_emb.proj.1.weight", "norm1.weight") ? 0 : has("img_emb.emb_pos", "pos_embed") ? 2 : 1;
    const std::string text = std::string("Wan transformer, ") +
                             (inputs == 36   ? "image"
                              : inputs == 48 ? "text and image"
                                             : "text") +
                             " to video" +
                             (images == 0   ? ""
                              : images == 1 ? " with CLIP"
                                            : " with CLIP, first and last frame");
    const std::int64_t width = file.extent({"patch_embedding.weight"}, 0);
    return {text + ", " + std::to_string(width) + " wide", "", known_models(inputs, width, images, file)};
  }
  if (component == "image_encoder") return {"CLIP image encoder", ""};
  if (component == "text_encoder") return {is_umt5(file) ? "UMT5 text encoder" : "", ""};
  const std::int64_t channels = file.extent({"decoder.conv1.weight", "decoder.conv_in.weight"}, 1);
  return {channels == 48 ? "VAE of videos, of TI2V-5B" : "VAE of videos", ""};
}

// The tokenizer that ComfyUI keeps in the file of UMT5's weights; empty: there is none.
std::string stored_tokenizer(const ModelSource& source) {
  const auto given = source.files.find("text_encoder");
  if (given == source.files.end()) return {};
  const auto file = unwrap(SafetensorsFile::open(given->second));
  for (const TensorEntry& entry : file.entries())
    if (entry.name.ends_with(kStoredTokenizer)) {
      const TensorView view = unwrap(file.view(entry));
      return {reinterpret_cast<const char*>(view.bytes.data()), view.bytes.size()};
    }
  return {};
}

std::unique_ptr<Tokenizers> load_tokenizers(const ModelSource& source) {
  std::vector<Prompts::Encoder> encoders;
  encoders.push_back(
      {"umt5", "UMT5", "prompt_ids", unwrap(Tokenizer::load_t5(source.dir + "/tokenizer", stored_tokenizer(source)))});
  encoders.back().clean = [](const std::string& prompt) { return prompt_clean(prompt); };
  return std::make_unique<Prompts>(std::move(encoders));
}

}  // namespace

const Family& wan_family() {
  static const Family family{
      .description = &families::kWan,
      .components =
          {{"transformer",
            "WanTransformer3DModel",
            Library::kDiffusers,
            {"fp8", "nf4"},
            false,
            {"model.diffusion_model.", "diffusion_model."},
            {"blocks.0.self_attn.q.weight", "blocks.0.attn1.to_q.weight"}},
           {"transformer_2",
            "WanTransformer3DModel",
            Library::kDiffusers,
            {},
            /*optional=*/true,
            {"model.diffusion_model.", "diffusion_model."}},
           {"image_encoder",
            "CLIPVisionModel",
            Library::kTransformers,
            {},
            /*optional=*/true,
            {},
            {"vision_model.embeddings.class_embedding", "embeddings.class_embedding"},
            "CLIPVisionModelWithProjection"},
           {"text_encoder", "UMT5EncoderModel", Library::kTransformers, {"nf4"}, false, kT5Prefixes, kT5Tensors},
           {"vae",
            "AutoencoderKLWan",
            Library::kDiffusers,
            {},
            false,
            {"vae.", "first_stage_model."},
            {"decoder.middle.0.residual.0.gamma", "decoder.mid_block.resnets.0.norm1.gamma"}}},
      .load = WanNetwork::load,
      .load_tokenizers = load_tokenizers,
      .about = about,
      .spec = [](const ConfigFile& config,
                 const ConfigFile& index) { return wan_spec(read_wan_config(config, expands_timesteps(index))); },
      .small = {832, 480, 25},
      .typical = {832, 480, 81}};
  return family;
}

}  // namespace ditfleet::pipeline
