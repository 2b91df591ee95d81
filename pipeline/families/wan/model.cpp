#include "pipeline/families/wan/model.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/round.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/denoise_loop.h"
#include "pipeline/sampling/latents.h"
#include "shared/media/resize.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kCachedPrompts = 16;

using Clock = std::chrono::steady_clock;

WanGeneration& own(Generation& generation) {
  auto* mine = dynamic_cast<WanGeneration*>(&generation);
  if (!mine) fail(Code::kInternal, "the generation is another model's");
  return *mine;
}

// The expert's transformer with the request's adapters.
const WanTransformer& transformer_of(const WanFolder& folder, const WanGeneration& generation, std::size_t expert) {
  if (const auto& adapted = generation.adapters.transformers[expert]) return *adapted;
  return expert ? *folder.transformer_2 : folder.transformer;
}

// The folder's scheduler with what the request changes. Another class has its defaults and the folder's shift.
FlowSchedulerConfig scheduler_of(const WanFolder& folder, const WanRequest& request) {
  FlowSchedulerConfig c = folder.scheduler;
  if (request.euler && *request.euler == c.unipc) {
    c.unipc = !*request.euler;
    if (c.unipc)
      c.flow_shift = c.euler.shift;
    else
      c.euler = {.shift = c.flow_shift, .use_flow_sigmas = true};
  }
  if (request.flow_shift) (c.unipc ? c.flow_shift : c.euler.shift) = *request.flow_shift;
  if (c.unipc && !request.sigmas.empty())
    fail(Code::kInvalidArgument, "sigmas are given, but the sampler is unipc; set sampler to euler", "sigmas");
  return c;
}

// Follows diffusers' WanPipeline and WanImageToVideoPipeline: the first transformer at timesteps from boundary · 1000
// on, the second one below.
class WanDenoiser final : public Denoiser {
 public:
  WanDenoiser(const WanFolder& folder, const WanGeneration& generation, c10::ScalarType dtype, ModelMemory& memory)
      : folder_(folder), generation_(generation), dtype_(dtype), memory_(memory) {}

  at::Tensor velocity(std::int64_t step, const at::Tensor& latents) override {
    const double timestep = generation_.schedule.timesteps[static_cast<std::size_t>(step)];
    const std::size_t expert = folder_.transformer_2 && timestep < folder_.boundary * 1000 ? 1 : 0;
    const WanTransformer& transformer = transformer_of(folder_, generation_, expert);
    memory_.use_blocks(expert);
    at::Tensor input = latents.to(dtype_);
    if (generation_.condition.defined()) input = at::cat({input, generation_.condition}, 1);
    if (!rope_.defined()) rope_ = transformer.rope(latents.size(2), latents.size(3), latents.size(4));
    const parallel::Team team = generation_.alone ? parallel::Team() : transformer.team();
    const auto forward = [&](bool negative, const parallel::Team& ranks) {
      const auto& text = negative ? generation_.negative_text : generation_.text;
      return transformer.velocity(input, timestep, text[expert], rope_, ranks);
    };
    const WanRequest& r = generation_.request;
    const double scale = expert ? r.guidance_scale_2.value_or(r.guidance_scale) : r.guidance_scale;
    return team.velocity(forward, generation_.negative ? std::optional(scale) : std::nullopt);
  }

 private:
  const WanFolder& folder_;
  const WanGeneration& generation_;
  const c10::ScalarType dtype_;
  ModelMemory& memory_;
  at::Tensor rope_;  // the same for both transformers
};

// Latents to RGB, for previews: a linear fit that ComfyUI publishes for this VAE's 16 channels (latent_formats.py,
// Wan21), with the bias in the last row.
constexpr std::array<std::array<float, 3>, 17> kRgb{{{-0.1299F, -0.1692F, 0.2932F},
                                                     {0.0671F, 0.0406F, 0.0442F},
                                                     {0.3568F, 0.2548F, 0.1747F},
                                                     {0.0372F, 0.2344F, 0.1420F},
                                                     {0.0313F, 0.0189F, -0.0328F},
                                                     {0.0296F, -0.0956F, -0.0665F},
                                                     {-0.3477F, -0.4059F, -0.2925F},
                                                     {0.0166F, 0.1902F, 0.1975F},
                                                     {-0.0412F, 0.0267F, -0.1364F},
                                                     {-0.1293F, 0.0740F, 0.1636F},
                                                     {0.0680F, 0.3019F, 0.1128F},
                                                     {0.0032F, 0.0581F, 0.0639F},
                                                     {-0.1251F, 0.0927F, 0.1699F},
                                                     {0.0060F, -0.0633F, 0.0005F},
                                                     {0.3477F, 0.2275F, 0.2950F},
                                                     {0.1984F, 0.0913F, 0.1861F},
                                                     {-0.1835F, -0.0868F, -0.3360F}}};

ModelMemory::Source memory_source(const WanFolder& folder, const AdapterStore& adapters, PartSequence& none,
                                  std::shared_ptr<WanNeeds> needs) {
  ModelMemory::Source source{.parts = {{&folder.text.parts()}, &none, {folder.transformer.parts().blocks.get()}}};
  if (folder.transformer_2) source.parts.blocks.push_back(folder.transformer_2->parts().blocks.get());
  source.ranks = static_cast<bool>(folder.transformer.team());
  if (!needs) return source;
  source.small = needs->video(25);
  source.large = needs->video(81);
  source.needs = [needs = std::move(needs)](const RequestSize& size) { return needs->of(size); };
  source.unallocated = [&] { return adapters.unallocated_slot_bytes(); };
  return source;
}

// The middle frame of estimated latents. A VAE with another number of channels is seen through those that both have.
Media preview(const at::Tensor& estimate) {
  const at::Tensor frame =
      estimate.select(2, estimate.size(2) / 2)[0].to(c10::kCPU, c10::ScalarType::Float);  // [C, h, w]
  const auto channels = std::min<std::int64_t>(frame.size(0), 16);
  const at::Tensor factors = at::from_blob(const_cast<float*>(kRgb[0].data()), {17, 3});
  const at::Tensor rgb =
      at::addmm(factors[16], frame.narrow(0, 0, channels).reshape({channels, -1}).t(), factors.narrow(0, 0, channels));
  if (!are_finite({rgb})[0]) fail(Code::kDataCorrupt, "the current estimate contains NaN or infinity");
  return to_media(unit_range(rgb.t().reshape({1, 3, frame.size(1), frame.size(2)})));
}

// The condition of an image (WanGeneration::condition) for latents of the noise's shape.
at::Tensor encode_image(const VideoVae& vae, const Media& image, const WanRequest& r, const at::Tensor& noise) {
  const Media resized = resize_lanczos(image, r.width, r.height);
  const at::Tensor bytes = at::from_blob(const_cast<std::uint8_t*>(resized.rgb.data()), {r.height, r.width, 3},
                                         at::TensorOptions(c10::ScalarType::Byte));
  const at::Tensor picture = bytes.permute({2, 0, 1}).to(c10::ScalarType::Float) / 255 * 2 - 1;
  // The frames after the picture are zeros, which is mid-grey.
  at::Tensor video = at::zeros({1, 3, r.num_frames, r.height, r.width}, picture.options());
  video.select(2, 0).copy_(picture);
  const at::Tensor latents = vae.encode(video);
  // One channel for each pixel frame of a latent frame. The picture's frame counts four times.
  at::Tensor mask =
      at::zeros({1, VideoVaeConfig::kTemporalFactor, noise.size(2), noise.size(3), noise.size(4)}, latents.options());
  mask.select(2, 0).fill_(1);
  return at::cat({mask, latents}, 1);
}

}  // namespace

WanModel::WanModel(ModelInfo info, Placement placement, WanFolder folder, WanPrompts prompts,
                   AdapterStore::Limits adapters, std::shared_ptr<DeviceMemory> memory, std::shared_ptr<WanNeeds> needs)
    : ModelBase(std::move(info), placement, lora_base(folder), adapters, folder.transformer.team()),
      folder_(std::move(folder)),
      prompts_(std::move(prompts)),
      embeddings_(kCachedPrompts),
      no_modulation_(placement, "none", /*repeats=*/false),
      memory_(std::move(memory), this->info().name,
              memory_source(folder_, adapter_store(), no_modulation_, std::move(needs))) {}

RequestSize WanModel::size_of(const WanRequest& request) const {
  return WanNeeds::size(request, folder_.size_multiple());
}

WanText WanModel::embed(const std::string& prompt, int max_sequence_length) {
  return embeddings_.get(std::to_string(max_sequence_length) + "/" + prompt, [&] {
    WanPromptIds made = prompts_.ids(prompt, max_sequence_length);
    WanText text;
    // Padding is masked, so it is left out, and its embeddings are zeros.
    const at::Tensor embeds = folder_.text.encode(made.ids);
    text.embeds = at::constant_pad_nd(embeds, {0, 0, 0, max_sequence_length - embeds.size(1)});
    text.ids = std::move(made.ids);
    text.warnings = std::move(made.warnings);
    return text;
  });
}

std::unique_ptr<Generation> WanModel::run_encode(const GenerationRequest& asked) {
  const auto start = Clock::now();
  auto p = std::make_unique<WanGeneration>();
  p->request = read_wan_request(asked, folder_.size_multiple(), folder_.transformer_2.has_value(), folder_.from_image);
  const WanRequest& r = p->request;
  memory_.check(size_of(r));
  const std::int64_t factor = folder_.vae.config().spatial_factor();
  const at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(r.seed));
  p->noise = at::randn({1, folder_.vae.config().z_dim, (r.num_frames - 1) / 4 + 1, r.height / factor, r.width / factor},
                       generator, at::TensorOptions().dtype(c10::ScalarType::Float));
  for (const WanTransformer* transformer :
       {&folder_.transformer, folder_.transformer_2 ? &*folder_.transformer_2 : nullptr})
    if (transformer)
      transformer->prewarm(p->noise.size(2), p->noise.size(3), p->noise.size(4), r.max_sequence_length,
                           !r.loras.empty());
  p->scheduler = scheduler_of(folder_, r);
  p->schedule = make_flow_schedule(p->scheduler, r.num_inference_steps, r.sigmas);
  memory_.run_encode(size_of(r), [&] {
    if (asked.image) p->condition = encode_image(folder_.vae, *asked.image, r, p->noise).to(placement().dtype);
    p->adapters = adapt(folder_, adapter_store(), r.loras);
    p->prompt = embed(r.prompt, r.max_sequence_length);
    if (r.guidance_scale > 1) p->negative = embed(r.negative_prompt, r.max_sequence_length);
    for (std::size_t expert = 0; expert < (folder_.transformer_2 ? 2 : 1); ++expert) {
      const WanTransformer& transformer = transformer_of(folder_, *p, expert);
      p->text[expert] = transformer.embed_text(p->prompt.embeds);
      if (p->negative) p->negative_text[expert] = transformer.embed_text(p->negative->embeds);
    }
  });
  for (const auto& warning : r.warnings) p->add_warning(warning);
  for (const auto& warning : p->adapters.warnings) p->add_warning(warning);
  for (const auto& warning : p->prompt.warnings) p->add_warning(warning);
  if (p->negative)
    for (const auto& warning : p->negative->warnings) p->add_warning("negative " + warning);
  synchronize_current(placement().device);
  memory_.trim();
  p->add_phase("text", start);
  return p;
}

Result<void> WanModel::run_denoise(Generation& generation, const StepCallback& on_step,
                                   const std::function<void()>& wait) {
  const auto start = Clock::now();
  WanGeneration& p = own(generation);
  auto latents = memory_.run_steps(size_of(p.request), on_step, [&](const StepCallback& callback) {
    for (const auto& transformer : p.adapters.transformers)
      if (transformer) transformer->load_adapters();
    WanDenoiser denoiser(folder_, p, placement().dtype, memory_);
    const auto sampler = make_flow_sampler(p.scheduler, p.schedule, placement().device);
    return denoise_loop(denoiser, *sampler, p.noise.to(placement().device),
                        static_cast<std::int64_t>(p.schedule.timesteps.size()), {callback, preview, wait});
  });
  p.add_phase("denoise", start);
  if (!latents) return latents.error();
  p.latents = std::move(*latents);
  return {};
}

bool WanModel::uses_adapters(const Generation& generation) const {
  const auto* mine = dynamic_cast<const WanGeneration*>(&generation);
  return mine && !mine->adapters.held.empty();
}

void WanModel::clear_adapter_columns() {
  folder_.transformer.clear_adapters();
  if (folder_.transformer_2) folder_.transformer_2->clear_adapters();
}

Media WanModel::decode_frames(const WanGeneration& p, const FrameCallback& on_frames) const {
  Media video;
  video.width = p.request.width;
  video.height = p.request.height;
  video.frames = 0;
  video.frame_rate = p.request.frame_rate;
  video.rgb.reserve(static_cast<std::size_t>(p.request.num_frames) * static_cast<std::size_t>(p.request.width) *
                    static_cast<std::size_t>(p.request.height) * 3);
  folder_.vae.decode(p.latents, [&](const at::Tensor& frames) {
    if (!are_finite({frames})[0]) fail(Code::kDataCorrupt, "[decode] the VAE's output contains NaN or infinity");
    const Media part = to_media(unit_range(frames));
    video.rgb.insert(video.rgb.end(), part.rgb.begin(), part.rgb.end());
    video.frames += part.frames;
    if (on_frames) on_frames(video);
  });
  return video;
}

Media WanModel::run_decode(Generation& generation, const FrameCallback& on_frames) {
  const auto start = Clock::now();
  WanGeneration& p = own(generation);
  if (!p.latents.defined()) fail(Code::kInternal, "[decode] denoise() has not been run");
  if (!are_finite({p.latents})[0])
    fail(p.adapters.held.empty() ? Code::kDataCorrupt : Code::kInvalidArgument,
         p.adapters.held.empty() ? "[decode] the latents after denoising contain NaN or infinity; check the model's "
                                   "weights, or use another precision (worker.dtype)"
                                 : "[decode] the latents after denoising contain NaN or infinity with adapters; use "
                                   "smaller strengths or other adapters");
  const RequestSize size = size_of(p.request);
  memory_.make_room_to_decode(size);
  Media video = memory_.run(size, [&] { return decode_frames(p, on_frames); });
  memory_.trim();
  memory_.observe(size);
  p.add_phase("vae", start);
  return video;
}

}  // namespace ditfleet::pipeline
