#include "pipeline/families/z_image/z_image.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/linspace.h>

#include <algorithm>
#include <array>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/prompts.h"
#include "pipeline/engine/step_window.h"
#include "pipeline/families/z_image/adapter_names.h"
#include "pipeline/families/z_image/transformer.h"
#include "pipeline/nn/text/qwen_encoder.h"
#include "pipeline/nn/vae/image_vae.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "pipeline/tokenizers/qwen_text.h"
#include "shared/families/z_image/z_image.h"

namespace ditfleet::pipeline {
namespace {

// Latents, guidance and velocities are fp32, as in diffusers.
class ZImageDenoiser final : public Denoiser {
 public:
  ZImageDenoiser(const ZImageTransformer& transformer, const Settings& settings, const Schedule& schedule,
                 const Conditions& conditions)
      : transformer_(transformer),
        timesteps_(schedule.timesteps),
        scale_(settings.real("guidance_scale")),
        normalization_(settings.real("cfg_normalization")),
        truncation_(settings.real("cfg_truncation", 1)),
        modulation_(modulation()) {
    texts_[0] = transformer.embed_text(conditions.prompt.tensors.at("prompt_embeds"));
    if (conditions.negative) texts_[1] = transformer.embed_text(conditions.negative->tensors.at("prompt_embeds"));
  }

  at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team& team,
                      BlockCache*) override {
    const at::Tensor& text = texts_[negative ? 1 : 0];
    at::Tensor& rope = ropes_[negative ? 1 : 0];
    if (!rope.defined()) rope = transformer_.rope(text.size(1), latents.size(2) / 2, latents.size(3) / 2);
    const auto [modulation, at] = modulation_.at(step);
    const at::Tensor rows = modulation.narrow(0, at, 1);
    return -transformer_.velocity(latents, text, rows, rope, team).to(c10::ScalarType::Float);
  }
  bool guides(std::int64_t step) const override {
    const float progress = (1000 - timesteps_[static_cast<std::size_t>(step)]) / 1000;
    return truncation_ > 1 || static_cast<double>(progress) <= truncation_;
  }
  at::Tensor guide(const at::Tensor& positive, const at::Tensor& negative, std::int64_t) const override {
    const at::Tensor guided = positive + scale_ * (positive - negative);
    if (!(normalization_ > 0)) return guided;
    const at::Tensor most = at::linalg_vector_norm(positive) * normalization_;
    return guided * at::clamp_max(most / at::linalg_vector_norm(guided), 1);
  }

 private:
  StepWindow<at::Tensor> modulation() const {
    return {static_cast<std::int64_t>(timesteps_.size()), [this](std::int64_t first, std::int64_t count) {
              return transformer_.modulation(on_device(
                  std::span(timesteps_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count)),
                  transformer_.placement().device));
            }};
  }
  double guidance_scale(std::int64_t) const override { return scale_; }

  const ZImageTransformer& transformer_;
  const std::vector<float> timesteps_;
  const double scale_, normalization_, truncation_;
  std::array<at::Tensor, 2> texts_, ropes_;  // of the prompt and of the negative one
  StepWindow<at::Tensor> modulation_;
};

class ZImageNetwork final : public Network {
 public:
  static std::unique_ptr<Network> load(Folder& folder);

  std::unique_ptr<Network> clone() const override { return std::make_unique<ZImageNetwork>(*this); }
  std::vector<TextEncoder*> text_encoders() override { return {&text_}; }
  std::vector<Transformer*> transformers() override { return {&transformer_}; }
  std::int64_t vae_bytes() const override { return vae_.bytes(); }
  LoraBase lora_base(std::vector<std::vector<BaseLinear>> linears) const override {
    return z_image_lora_base(std::move(linears[0]));
  }

  // Guidance is on above 0, not above 1.
  void complete(Settings& settings) const override {
    if (!(settings.real("guidance_scale") > 0)) return;
    const std::string* negative = settings.fields.text("negative_prompt");
    settings.negative = negative ? *negative : "";
  }

  PromptIds longest_ids(const Settings& settings) const override {
    const std::int64_t tokens = std::min<std::int64_t>(settings.text_tokens(), most_tokens());
    return {{{"qwen3_ids", std::vector<std::int32_t>(static_cast<std::size_t>(tokens))}}, {}};
  }
  EncodedPrompt encode(PromptIds ids, const Settings&) const override {
    const auto tokens = static_cast<std::int64_t>(ids.ids.at("qwen3_ids").size()), most = most_tokens();
    if (tokens > most)
      fail(Code::kInvalidArgument,
           "the prompt has " + std::to_string(tokens) + " tokens, and the transformer's axes_lens positions for " +
               std::to_string(most) + "; set max_sequence_length to at most " + std::to_string(most),
           "max_sequence_length");
    at::Tensor embeds = text_.encode(ids.ids.at("qwen3_ids"), {}, {text_.config().num_hidden_layers - 1})[0];
    return {std::move(ids), {{"prompt_embeds", std::move(embeds)}}};
  }
  std::vector<std::int64_t> noise_size(const Settings& settings) const override {
    const std::int64_t factor = vae_.config().factor();
    return {1, transformer_.config().channels, settings.height() / factor, settings.width() / factor};
  }
  c10::ScalarType noise_type() const override { return c10::ScalarType::Float; }
  Schedule schedule(const Settings& settings) const override {
    const auto size = noise_size(settings);
    const int steps = settings.steps();
    const at::Tensor levels = at::linspace(1, 1.0 / steps, steps, at::TensorOptions(c10::ScalarType::Float));
    const auto* first = levels.const_data_ptr<float>();
    return make_schedule(scheduler_, steps, size[2] / 2 * (size[3] / 2), {first, first + steps});
  }
  int steps_in_memory() const override { return kStepsTogether; }
  std::unique_ptr<Sampler> sampler(const Settings&, const Schedule& schedule) const override {
    return make_flow_sampler({.unipc = false}, schedule, placement.device);
  }
  std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule& schedule,
                                     const Conditions& conditions) const override {
    auto made = std::make_unique<ZImageDenoiser>(transformer_, settings, schedule, conditions);
    const auto size = noise_size(settings);
    for (const auto* prompt : {&conditions.prompt, conditions.negative ? &*conditions.negative : nullptr})
      if (prompt)
        transformer_.prewarm(z_image_filled(prompt->tensors.at("prompt_embeds").size(1)), size[2] / 2, size[3] / 2,
                             !settings.loras.empty());
    return made;
  }
  void decode(const at::Tensor& latents, const Settings&, const FrameSink& sink) const override {
    sink(vae_.decode(latents.to(placement.dtype)));
  }
  at::Tensor preview(const at::Tensor& estimate, const Settings&) const override {
    return vae_.preview(estimate.to(placement.dtype));
  }

 private:
  ZImageNetwork(SchedulerConfig scheduler, QwenEncoder text, ZImageTransformer transformer, ImageVae vae)
      : scheduler_(scheduler), text_(std::move(text)), transformer_(std::move(transformer)), vae_(std::move(vae)) {}
  // The caption has the positions from 1 on, and the image the next one.
  std::int64_t most_tokens() const {
    return (transformer_.config().lengths[0] - 2) / kZImageMultiple * kZImageMultiple;
  }

  const SchedulerConfig scheduler_;
  QwenEncoder text_;
  ZImageTransformer transformer_;
  ImageVae vae_;
};

std::unique_ptr<Network> ZImageNetwork::load(Folder& folder) {
  const LoadContext& c = folder.context;
  folder.refuse_vae_dtype();
  const auto scheduler = read_scheduler_config(ConfigFile(folder.dir("scheduler") + "/scheduler_config.json"));
  const auto qwen3 = read_qwen3_config(folder.config("text_encoder"));
  const auto config = read_z_image_config(folder.config("transformer"));
  const auto vae = read_vae_config(folder.config("vae"));
  folder.must_match("transformer's cap_feat_dim", config.text_width, "text_encoder's hidden_size", qwen3.hidden_size);
  folder.must_match("transformer's in_channels", config.channels, "vae's latent_channels", vae.latent_channels);
  if (vae.batch_norm_eps) folder.config("vae").refuse("_class_name is AutoencoderKLFlux2; it must be AutoencoderKL");
  auto text = folder.load("text_encoders", [&] {
    // The transformer reads what the last layer but one makes.
    return QwenEncoder::load(folder.files("text_encoder"), c.placement, qwen3.num_hidden_layers - 1, c.regions,
                             folder.quantize("text_encoder"));
  });
  auto transformer = folder.load(
      "transformer", [&] { return ZImageTransformer::load(folder.transformer("transformer"), c.placement); });
  auto decoder = folder.load("vae", [&] { return ImageVae::load(folder.files("vae"), c.placement, c.regions); });
  return std::unique_ptr<Network>(new ZImageNetwork(scheduler, text.get(), transformer.get(), decoder.get()));
}

FileAbout about(std::string_view component, const Checkpoint& file) {
  // Lumina 2's blocks have the same names.
  if (component == "transformer") return {file.contains("x_pad_token") ? "Z-Image transformer" : "", ""};
  if (component == "text_encoder") return {"Qwen3 text encoder", ""};
  if (file.extent({"decoder.mid.block_1.conv1.weight", "decoder.mid_block.resnets.0.conv1.weight"}, 4) >= 0) return {};
  const std::int64_t channels = file.extent({"decoder.conv_in.weight"}, 1);
  return {"VAE of images",
          channels == 16 ? "" : "it has " + std::to_string(channels) + " latent channels; Z-Image's has 16"};
}

std::unique_ptr<Tokenizers> load_tokenizers(const ModelSource& source) {
  std::vector<Prompts::Encoder> encoders;
  encoders.push_back({.name = "qwen3",
                      .shown = "Qwen3",
                      .ids = "qwen3_ids",
                      .tokenizer = unwrap(Tokenizer::load_qwen(source.dir + "/tokenizer")),
                      .clean = [](const std::string& prompt) { return qwen_chat(prompt, /*thinking=*/true); }});
  return std::make_unique<Prompts>(std::move(encoders));
}

}  // namespace

const Family& z_image_family() {
  static const Family family{
      .description = &families::kZImage,
      .components = {{"scheduler", "FlowMatchEulerDiscreteScheduler"},
                     {"tokenizer", "Qwen2Tokenizer"},
                     {"transformer",
                      "ZImageTransformer2DModel",
                      Library::kDiffusers,
                      {"fp8", "nf4"},
                      false,
                      {"model.diffusion_model.", "diffusion_model."},
                      {"noise_refiner.0.attention.norm_q.weight", "noise_refiner.0.attention.q_norm.weight"}},
                     {"text_encoder",
                      "Qwen3Model",
                      Library::kTransformers,
                      {"nf4"},
                      false,
                      kQwen3Prefixes,
                      kQwen3Tensors,
                      "Qwen3ForCausalLM"},
                     {"vae",
                      "AutoencoderKL",
                      Library::kDiffusers,
                      {},
                      false,
                      {"vae.", "first_stage_model."},
                      {"decoder.conv_in.weight"}}},
      .load = ZImageNetwork::load,
      .load_tokenizers = load_tokenizers,
      .about = about,
      .spec = [](const ConfigFile& config, const ConfigFile&) { return z_image_spec(read_z_image_config(config)); },
      .small = {512, 512, 1},
      .typical = {1024, 1024, 1}};
  return family;
}

}  // namespace ditfleet::pipeline
