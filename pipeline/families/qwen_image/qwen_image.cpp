#include "pipeline/families/qwen_image/qwen_image.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/prompts.h"
#include "pipeline/engine/step_window.h"
#include "pipeline/families/qwen_image/prompts.h"
#include "pipeline/families/qwen_image/transformer.h"
#include "pipeline/nn/text/qwen_encoder.h"
#include "pipeline/nn/text/qwen_processor.h"
#include "pipeline/nn/text/qwen_vision.h"
#include "pipeline/nn/video_vae/preview.h"
#include "pipeline/nn/video_vae/video_vae.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "pipeline/sampling/latents.h"
#include "shared/families/qwen_image/qwen_image.h"
#include "shared/media/resize.h"
#include "shared/media/sizes.h"

namespace ditfleet::pipeline {
namespace {

using families::QwenImageKind;

// What the text encoder of several pictures sees of each.
constexpr std::int64_t kSeenPixels = 384 * 384;
// Ids of a prompt for an edit, which diffusers does not limit. The transformer has 4096 positions.
constexpr int kMostEditIds = 3072;

int most_pictures(QwenImageKind kind) {
  return kind == QwenImageKind::kText ? 0 : kind == QwenImageKind::kEdit ? 1 : families::kMostQwenPictures;
}

class QwenImageDenoiser final : public Denoiser {
 public:
  QwenImageDenoiser(const QwenImageTransformer& transformer, const Settings& settings, const Schedule& schedule,
                    const Conditions& conditions, std::vector<TokenGrid> grids)
      : transformer_(transformer),
        timesteps_(schedule.timesteps),
        scale_(settings.real("true_cfg_scale")),
        grids_(std::move(grids)),
        pictures_(conditions.image),
        modulation_(modulation()) {
    texts_[0] = transformer.embed_text(conditions.prompt.tensors.at("prompt_embeds"));
    if (conditions.negative) texts_[1] = transformer.embed_text(conditions.negative->tensors.at("prompt_embeds"));
  }

  at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team& team,
                      BlockCache*) override {
    const at::Tensor& text = texts_[negative ? 1 : 0];
    at::Tensor& rope = ropes_[negative ? 1 : 0];
    if (!rope.defined()) rope = transformer_.rope(text.size(1), grids_);
    const auto [modulation, at] = modulation_.at(step);
    const at::Tensor rows = modulation.steps.narrow(0, at, 1);
    return transformer_.velocity(latents, pictures_, text, rows, modulation.zero, rope, team);
  }
  // Each token keeps the norm of the prompt's own prediction.
  at::Tensor guide(const at::Tensor& positive, const at::Tensor& negative, std::int64_t) const override {
    const at::Tensor guided = negative + scale_ * (positive - negative);
    const auto norm = [](const at::Tensor& of) { return at::linalg_vector_norm(of, 2, {-1}, /*keepdim=*/true); };
    return guided * (norm(positive) / norm(guided));
  }

 private:
  StepWindow<QwenImageTransformer::Modulation> modulation() const {
    return {static_cast<std::int64_t>(timesteps_.size()), [this](std::int64_t first, std::int64_t count) {
              return transformer_.modulation(on_device(
                  std::span(timesteps_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)),
                  transformer_.placement().device));
            }};
  }
  double guidance_scale(std::int64_t) const override { return scale_; }

  const QwenImageTransformer& transformer_;
  const std::vector<float> timesteps_;
  const double scale_;
  const std::vector<TokenGrid> grids_;       // of the image and of the pictures
  const at::Tensor pictures_;                // packed: see QwenImageNetwork::encode_image()
  std::array<at::Tensor, 2> texts_, ropes_;  // of the prompt and of the negative one
  StepWindow<QwenImageTransformer::Modulation> modulation_;
};

class QwenImageNetwork final : public Network {
 public:
  static std::unique_ptr<Network> load(Folder& folder);

  std::unique_ptr<Network> clone() const override { return std::make_unique<QwenImageNetwork>(*this); }
  std::vector<TextEncoder*> text_encoders() override {
    return vision_ ? std::vector<TextEncoder*>{&text_, &*vision_} : std::vector<TextEncoder*>{&text_};
  }
  std::vector<Transformer*> transformers() override { return {&transformer_}; }
  std::int64_t vae_bytes() const override { return vae_.bytes(); }
  LoraBase lora_base(std::vector<std::vector<BaseLinear>> linears) const override {
    return {"Qwen-Image",
            {{"transformer", kTransformerPrefixes, std::move(linears[0])}},
            /*takes_diff_b=*/false,
            "img_in"};
  }

  void complete(Settings& settings) const override {
    if (!(settings.real("true_cfg_scale") > 1)) return;
    if (const std::string* negative = settings.fields.text("negative_prompt")) settings.negative = *negative;
  }

  PromptIds longest_ids(const Settings& settings) const override {
    const std::int64_t count = vision_ ? kMostEditIds : kQwenImageDropped + settings.text_tokens();
    std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
    for (int i = 0; i < most_pictures(kind_); ++i) ids[static_cast<std::size_t>(2 * i)] = text_.config().image_token;
    return {{{"qwen_ids", std::move(ids)}}, {}};
  }
  bool encodes_images_with_text() const override { return vision_.has_value(); }
  EncodedPrompt encode(PromptIds ids, const Settings& settings) const override {
    std::vector<std::int32_t>& all = ids.ids.at("qwen_ids");
    std::vector<PictureTokens> pictures;
    if (vision_) {
      std::vector<std::int64_t> counts;
      for (const auto& picture : settings.images) {
        pictures.push_back(vision_->encode(processor_.patches(seen(*picture))));
        counts.push_back(pictures.back().tokens.size(0));
      }
      all = unwrap(expand_pictures(all, text_.config().image_token, counts, most_pictures(kind_)));
    }
    const at::Tensor states =
        text_.encode(all, {}, {text_.config().num_hidden_layers}, pictures, entry.grid_positions.value_or(false))[0];
    return {std::move(ids), {{"prompt_embeds", states.slice(1, vision_ ? kQwenEditDropped : kQwenImageDropped)}}};
  }
  // The latents of the pictures, each of a megapixel: [1, tokens, channels].
  at::Tensor encode_image(const Settings& settings, const at::Tensor&) const override {
    std::vector<at::Tensor> all;
    for (const auto& picture : settings.images) {
      const media::Size size = size_of(*picture);
      const at::Tensor pixels = to_pixels(*picture, size.width, size.height, placement.device).to(placement.dtype);
      all.push_back(pack_latents(vae_.encode(pixels.unsqueeze(2)).squeeze(2)));
    }
    return all.empty() ? at::Tensor() : at::cat(all, 1).to(placement.dtype);
  }
  std::vector<std::int64_t> noise_size(const Settings& settings) const override {
    const auto [rows, columns] = grids(settings)[0];
    return {1, 1, vae_.config().z_dim, 2 * rows, 2 * columns};
  }
  Schedule schedule(const Settings& settings) const override {
    SchedulerConfig scheduler = scheduler_;
    std::optional<double> mu;
    if (const auto shift = settings.fields.real("flow_shift")) {  // that of every size, as distilled adapters need
      mu = std::log(checked_flow_shift(*shift));
      scheduler.use_dynamic_shifting = true;
      scheduler.linear_time_shift = false;
      scheduler.shift_terminal.reset();
    }
    return make_schedule(scheduler, settings.steps(), grids(settings)[0].tokens(), {}, mu);
  }
  int steps_in_memory() const override { return kStepsTogether; }
  std::unique_ptr<Sampler> sampler(const Settings&, const Schedule& schedule) const override {
    return make_flow_sampler({.unipc = false}, schedule, placement.device);
  }
  std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule& schedule,
                                     const Conditions& conditions) const override {
    auto all = grids(settings);
    const std::int64_t pictures = conditions.image.defined() ? conditions.image.size(1) : 0;
    for (const auto* prompt : {&conditions.prompt, conditions.negative ? &*conditions.negative : nullptr})
      if (prompt)
        transformer_.prewarm(prompt->tensors.at("prompt_embeds").size(1), all[0].tokens(), pictures,
                             !settings.loras.empty());
    return std::make_unique<QwenImageDenoiser>(transformer_, settings, schedule, conditions, std::move(all));
  }
  at::Tensor first_latents(const Conditions& conditions, const Schedule&) const override {
    return pack_latents(conditions.noise.squeeze(1));
  }
  void decode(const at::Tensor& latents, const Settings& settings, const FrameSink& sink) const override {
    vae_.decode(unpacked(latents, settings), [&](const at::Tensor& frames) { sink(frames.squeeze(2)); });
  }
  at::Tensor preview(const at::Tensor& estimate, const Settings& settings) const override {
    return video_preview(unpacked(estimate, settings));
  }

 private:
  QwenImageNetwork(QwenImageKind kind, SchedulerConfig scheduler, QwenEncoder text, std::optional<QwenVision> vision,
                   QwenProcessor processor, QwenImageTransformer transformer, VideoVae vae)
      : kind_(kind),
        scheduler_(scheduler),
        text_(std::move(text)),
        vision_(std::move(vision)),
        processor_(processor),
        transformer_(std::move(transformer)),
        vae_(std::move(vae)) {}
  // What the text encoder sees of a picture.
  Media seen(const Media& picture) const {
    const media::Size size = media::qwen_size({picture.width, picture.height},
                                              kind_ == QwenImageKind::kEditPlus ? kSeenPixels : media::kMegapixel);
    return media::resize_lanczos(picture, size.width, size.height);
  }
  // In which the VAE reads a picture.
  media::Size size_of(const Media& picture) const {
    return media::floored(media::qwen_size({picture.width, picture.height}),
                          static_cast<int>(2 * vae_.config().spatial_factor()));
  }
  // The tokens, of 2 × 2 latent pixels, of the image and of the pictures.
  std::vector<TokenGrid> grids(const Settings& settings) const {
    const std::int64_t side = 2 * vae_.config().spatial_factor();
    std::vector<TokenGrid> all{{settings.height() / side, settings.width() / side}};
    for (const auto& picture : settings.images) {
      const media::Size size = size_of(*picture);
      all.push_back({size.height / side, size.width / side});
    }
    return all;
  }
  // [1, channels, 1, h, w].
  at::Tensor unpacked(const at::Tensor& tokens, const Settings& settings) const {
    const auto [rows, columns] = grids(settings)[0];
    return unpack_latents(tokens, rows, columns).unsqueeze(2);
  }

  const QwenImageKind kind_;
  const SchedulerConfig scheduler_;
  QwenEncoder text_;
  std::optional<QwenVision> vision_;  // of models that edit
  const QwenProcessor processor_;
  QwenImageTransformer transformer_;
  VideoVae vae_;
};

std::unique_ptr<Network> QwenImageNetwork::load(Folder& folder) {
  const LoadContext& c = folder.context;
  folder.refuse_vae_dtype();
  const auto scheduler = read_scheduler_config(ConfigFile(folder.dir("scheduler") + "/scheduler_config.json"));
  const auto qwen = read_qwen25_vl_config(folder.config("text_encoder"));
  const auto config = read_qwen_image_config(folder.config("transformer"));
  const auto vae = read_video_vae_config(folder.config("vae"));
  const auto kind = families::qwen_image_kind(folder.index().text("_class_name", ""));
  const bool edits = kind != QwenImageKind::kText;
  QwenProcessor processor;
  if (edits) {
    processor = read_qwen_processor(folder.dir("processor"));
    const auto vision = read_qwen_vision_config(folder.config("text_encoder"));
    folder.must_match("text_encoder's out_hidden_size", vision.out_hidden_size, "its hidden_size", qwen.hidden_size);
    folder.must_match("processor's patch_size", processor.patch_size, "text_encoder's", vision.patch_size);
    folder.must_match("processor's merge_size", processor.merge_size, "text_encoder's", vision.merge_size);
    folder.must_match("processor's temporal_patch_size", processor.temporal_patch_size, "text_encoder's",
                      vision.temporal_patch_size);
  }
  folder.must_match("transformer's joint_attention_dim", config.text_width, "text_encoder's hidden_size",
                    qwen.hidden_size);
  folder.must_match("transformer's in_channels", config.channels, "four times vae's z_dim", 4 * vae.z_dim);
  auto texts = folder.load("text_encoders", [&] {
    const std::string quantize = folder.quantize("text_encoder");
    auto text =
        QwenEncoder::load(folder.files("text_encoder"), c.placement, qwen.num_hidden_layers, c.regions, quantize);
    std::optional<QwenVision> vision;
    if (edits) vision = QwenVision::load(folder.files("text_encoder"), c.placement, c.regions, quantize);
    return std::pair(std::move(text), std::move(vision));
  });
  auto transformer = folder.load(
      "transformer", [&] { return QwenImageTransformer::load(folder.transformer("transformer"), c.placement, edits); });
  auto decoder = folder.load("vae", [&] {
    return VideoVae::load(folder.files("vae"), for_convolutions(c.placement), /*with_encoder=*/edits, c.regions);
  });
  auto [text, vision] = texts.get();
  return std::unique_ptr<Network>(new QwenImageNetwork(kind, scheduler, std::move(text), std::move(vision), processor,
                                                       transformer.get(), decoder.get()));
}

FileAbout about(std::string_view component, const Checkpoint&) {
  return {component == "transformer" ? "Qwen-Image transformer" : "Qwen2.5-VL text encoder", ""};
}

std::unique_ptr<Tokenizers> load_tokenizers(const ModelSource& source) {
  const auto kind = families::qwen_image_kind(ConfigFile(source.dir + "/model_index.json").text("_class_name", ""));
  const bool edits = kind != QwenImageKind::kText;
  // QwenEncoder's ids have a place for each picture that a request may have; see expand_pictures().
  std::string (*const cleans[])(const std::string&) = {
      [](const std::string& prompt) { return qwen_image_chat(prompt); },
      [](const std::string& prompt) { return qwen_edit_chat(prompt, 1, /*numbered=*/false); },
      [](const std::string& prompt) { return qwen_edit_chat(prompt, families::kMostQwenPictures, /*numbered=*/true); }};
  std::vector<Prompts::Encoder> encoders;
  encoders.push_back({.name = "qwen25_vl",
                      .shown = "Qwen2.5-VL",
                      .ids = "qwen_ids",
                      .tokenizer = unwrap(Tokenizer::load_qwen(source.dir + "/tokenizer", /*qwen3=*/false)),
                      .length = edits ? kMostEditIds : 0,
                      .clean = cleans[static_cast<std::size_t>(kind)],
                      .uncounted = edits ? 0 : static_cast<int>(kQwenImageDropped)});
  return std::make_unique<Prompts>(std::move(encoders));
}

}  // namespace

const Family& qwen_image_family() {
  static const Family family{
      .description = &families::kQwenImage,
      .components = {{"scheduler", "FlowMatchEulerDiscreteScheduler"},
                     {"tokenizer", "Qwen2Tokenizer"},
                     {"processor", "Qwen2VLProcessor", {}, {}, /*optional=*/true},
                     {"transformer",
                      "QwenImageTransformer2DModel",
                      Library::kDiffusers,
                      {"fp8", "nf4"},
                      false,
                      {"model.diffusion_model.", "diffusion_model."},
                      {"transformer_blocks.0.img_mod.1.weight"}},
                     {"text_encoder",
                      "Qwen2_5_VLForConditionalGeneration",
                      Library::kTransformers,
                      {"nf4"},
                      false,
                      kQwen25VlPrefixes,
                      kQwen25VlTensors},
                     {"vae", "AutoencoderKLQwenImage", Library::kDiffusers, {}, false, {"vae.", "first_stage_model."}}},
      .load = QwenImageNetwork::load,
      .load_tokenizers = load_tokenizers,
      .about = about,
      .spec = [](const ConfigFile& config,
                 const ConfigFile&) { return qwen_image_spec(read_qwen_image_config(config)); },
      .small = {512, 512, 1},
      .typical = {1024, 1024, 1}};
  return family;
}

}  // namespace ditfleet::pipeline
