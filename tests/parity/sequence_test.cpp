// Ranks as processes that share each forward of a transformer draw what one process draws.
// DITFLEET_TEST_COMPILE=cpu_jit runs the same with compiled blocks. With DITFLEET_TEST_DEVICE=cuda each rank has a GPU,
// and exchanges by copy engines and by NCCL draw the same bits.
#include <gtest/gtest.h>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/families/z_image/z_image.h"
#include "pipeline/parallel/shared_memory.h"
#include "tests/parity/flux_golden.h"
#include "tests/unit/pipeline/parallel/parallel_fixture.h"

namespace ditfleet::pipeline {
namespace {

using parallel::testing::run_processes;

constexpr std::chrono::seconds kWait{20};

struct Sample {
  std::string set, folder;  // "demo": a folder in deploy/demo-model
  std::vector<int> ranks;
  std::string negative = {};  // with classifier-free guidance, unless it is empty
  std::string quantize = {};  // of the transformer
  std::string lora = {};      // of tests/fixtures
  int width = 0, height = 0, frames = 0;
  bool bf16 = false;
  double cache = 0;  // threshold
  bool attention8 = false;
  std::string image = {};  // the case that has it
};

bool is_video(const Sample& s) { return s.frames > 0; }

std::string model_of(const Sample& s) {
  const auto demo = golden::fixtures() / "../../deploy/demo-model";
  if (s.set == "demo") return demo / (is_video(s) ? "video/model" : "model");
  return golden::Case{s.folder, {}, s.set}.model_dir();
}

std::string name_of(const Sample& s) {
  return s.set + "_" + s.folder + (s.negative.empty() ? "" : "_guided") + (s.quantize.empty() ? "" : "_" + s.quantize) +
         (s.lora.empty() ? "" : "_lora") + (s.bf16 ? "_bf16" : "") + (s.cache > 0 ? "_cached" : "") +
         (s.attention8 ? "_attention8" : "") + (s.image.empty() ? "" : "_image");
}

GenerationRequest request_of(const Sample& s) {
  GenerationRequest request;
  request.prompt = "a red bicycle by the sea";
  request.seed = 7;
  request.fields.set("width", std::int64_t{s.width});
  request.fields.set("height", std::int64_t{s.height});
  request.fields.set("num_inference_steps", std::int64_t{3});
  request.fields.set("max_sequence_length", std::int64_t{19});
  if (is_video(s)) request.fields.set("frames", std::int64_t{s.frames});
  if (is_video(s) || s.set == "flux2") request.fields.set("guidance_scale", s.negative.empty() ? 1.0 : 4.0);
  if (s.set == "z_image") request.fields.set("guidance_scale", s.negative.empty() ? 0.0 : 4.0);
  if (!s.negative.empty()) {
    request.fields.set("negative_prompt", s.negative);
    if (!is_video(s)) request.fields.set("true_cfg_scale", 3.0);
  }
  if (s.cache > 0) request.fields.set("cache", s.cache);
  if (!s.lora.empty()) request.loras = {{(golden::fixtures() / s.lora).string(), 0.8}};
  if (!s.image.empty()) request.images = golden::load({s.folder, s.image, s.set}).request.images;
  if (s.folder == "clip") request.fields.set("max_sequence_length", std::int64_t{512});
  return request;
}

struct Drawn {
  at::Tensor latents;
  Media media;
  std::int64_t programs = 0;
  int skipped = 0;  // steps
};

// What this rank draws of two requests, of which one is canceled. `previews`: after each step.
Drawn draw(const Sample& s, const RankOptions& ranks, std::vector<Media>* previews) {
  EngineOptions options = golden::test_options(s.bf16 ? "bf16" : "fp32", 1);
  options.ranks = ranks;
  options.lora_slots = s.lora.empty() ? 0 : 1;
  const auto engine = unwrap(Engine::create(
      options, {&flux_family(), &wan_family(), &z_image_family(), &flux2_family(), &qwen_image_family()}));
  ModelSource source{"m", model_of(s)};
  if (!s.quantize.empty()) source.quantize["transformer"] = s.quantize;
  if (s.attention8) source.attention = "fp8";
  const auto model = unwrap(engine->load_model(source));
  {
    auto canceled = unwrap(model->encode(request_of(s)));
    // Only rank 0 is asked.
    const auto end = model->denoise(*canceled, [&](const StepProgress& p) { return ranks.rank > 0 || p.step < 2; });
    if (end || end.error().code != Code::kCanceled)
      fail(Code::kInternal, "not canceled: " + (end ? "no error" : end.error().message));
  }
  auto generation = unwrap(model->encode(request_of(s)));
  unwrap(model->denoise(*generation, [&](const StepProgress& p) {
    if (previews) previews->push_back(unwrap(p.preview()));
    return true;
  }));
  Drawn drawn{.media = unwrap(model->decode(*generation))};
  const std::string dump = ::testing::TempDir() + "sequence-" + std::to_string(::getpid()) + ".safetensors";
  unwrap(generation->dump(dump));
  drawn.latents = golden::read_tensor(dump, "latents");
  std::filesystem::remove(dump);
  drawn.skipped = generation->skipped_steps();
  drawn.programs = engine->region_counts().compiles;
  return drawn;
}

class Ranks : public ::testing::TestWithParam<Sample> {};

TEST_P(Ranks, DrawWhatOneDraws) {
  const Sample& s = GetParam();
  const bool on_gpus = golden::test_device() != "cpu";
  if (s.set == "demo" && !on_gpus) GTEST_SKIP() << "runs on GPUs";
  const int gpus = on_gpus ? parallel::testing::gpus() : 0;
  // All in processes of their own, because LibTorch's threads do not survive a fork.
  const std::string file = ::testing::TempDir() + "sequence-" + name_of(s) + ".pt";
  for (const int size : s.ranks) {
    if (on_gpus && gpus < size) GTEST_SKIP() << "needs " << size << " GPUs, but the driver reports " << gpus;
    const auto memory = unwrap(Engine::create_rank_memory(size, kWait));
    const auto other_memory = unwrap(Engine::create_rank_memory(size, kWait));
    run_processes(size, [&](int rank) -> std::string {
      std::vector<Media> previews, alone_previews;
      const Drawn shared =
          draw(s, {.memory = memory.get(), .rank = rank, .size = size, .wait = kWait}, rank == 0 ? &previews : nullptr);
      if (on_gpus) {
        const Drawn by_nccl =
            draw(s, {.memory = other_memory.get(), .rank = rank, .size = size, .wait = kWait, .copy_engines = false},
                 nullptr);
        if (!by_nccl.latents.equal(shared.latents) || by_nccl.media.rgb != shared.media.rgb)
          return "copy engines and NCCL draw different bits";
      }
      if (rank > 0) return {};
      const Drawn alone = draw(s, {}, &alone_previews);
      const bool same_forward = !s.negative.empty() && size == 2;
      const double apart = golden::distance(shared.latents, alone.latents);
      std::fprintf(stderr, "%s, %d ranks: %.2g apart\n", name_of(s).c_str(), size, apart);
      // fp8 rounds activations, so that a difference of one bit becomes one of 6 %.
      const double limit = same_forward                          ? 0
                           : s.bf16                              ? (s.quantize.empty() ? 4e-2 : 8e-2)
                           : s.quantize == "fp8" || s.attention8 ? 2e-2
                                                                 : 3 * 2e-5;
      if (!(apart <= limit)) return "latents are apart";
      if (shared.skipped != alone.skipped || (s.cache > 0) != (alone.skipped > 0))
        return std::to_string(shared.skipped) + " steps were skipped, alone " + std::to_string(alone.skipped);
      if (shared.programs != alone.programs) return "other programs were compiled";
      int largest = 0;
      double mean = 0;
      for (std::size_t i = 0; i < alone.media.rgb.size(); ++i) {
        const int difference = std::abs(int{shared.media.rgb[i]} - int{alone.media.rgb[i]});
        largest = std::max(largest, difference);
        mean += difference / static_cast<double>(alone.media.rgb.size());
      }
      std::fprintf(stderr, "pixels: mean %.3f, largest %d\n", mean, largest);
      // In bf16 and fp8 edges move, so that single pixels differ by much.
      const bool by_mean = s.bf16 && !s.quantize.empty();
      const int most = same_forward ? 0 : by_mean ? 1 : s.bf16 || s.quantize == "fp8" || s.attention8 ? 16 : 1;
      if ((by_mean ? mean : largest) > most) return "pixels are " + std::to_string(largest) + " apart";
      if (previews.size() != 3 || previews[2].rgb.size() != alone_previews[2].rgb.size()) return "no previews";
      return {};
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Samples, Ranks,
    ::testing::Values(
        Sample{"wan", "one", {2}, "", "", "", 48, 32, 9}, Sample{"wan", "two", {3}, "", "", "", 16, 16, 5},
        Sample{"wan", "euler", {2}, "rain", "", "", 32, 48, 5}, Sample{"wan", "one", {2}, "", "", "", 32, 32, 5, true},
        Sample{"wan", "one", {2}, "", "nf4", "", 32, 32, 5}, Sample{"flux", "dev", {2}, "", "", "", 48, 80},
        Sample{"flux", "dev", {2}, "rain", "", "", 48, 80}, Sample{"flux", "double", {3}, "", "", "", 112, 48},
        Sample{"flux", "schnell", {5}, "", "", "", 80, 64}, Sample{"flux", "dev", {2}, "", "", "", 64, 64, 0, true},
        Sample{"quant", "width48", {3}, "", "fp8", "", 64, 64},
        Sample{"flux", "dev", {2}, "", "", "lora/adapters/all.safetensors", 48, 80},
        Sample{"wan", "two", {3}, "", "", "wan/lora/adapters/peft.safetensors", 32, 32, 5},
        Sample{"flux", "dev", {2}, "", "", "", 48, 80, 0, false, 0.9},
        Sample{"flux", "double", {3}, "rain", "", "", 112, 48, 0, false, 0.9},
        Sample{"wan", "euler", {2}, "rain", "", "", 32, 48, 5, false, 0.9},
        Sample{"wan", "one", {2}, "", "", "", 48, 32, 9, false, 0.9},
        Sample{"flux", "dev", {2}, "", "", "", 48, 80, 0, false, 0, true},
        Sample{"wan", "one", {2}, "", "", "", 48, 32, 9, false, 0, true},
        // Of 2 ranks, the second one's tokens belong to later frames; of 12 tokens of one frame, both have some.
        Sample{"wan", "ti2v", {2}, "", "", "", 96, 64, 5}, Sample{"wan", "ti2v", {2}, "rain", "", "", 96, 64, 5},
        Sample{"wan", "ti2v", {2}, "", "", "", 96, 64, 5, false, 0, false, "image"},
        Sample{"wan", "ti2v", {2}, "", "fp8", "", 64, 128, 1, false, 0, false, "image"},
        Sample{"wan", "ti2v", {2}, "", "", "", 64, 96, 9, false, 0.9, false, "image"},
        Sample{"wan", "clip", {2}, "", "", "wan/lora/adapters/image.safetensors", 48, 32, 5, false, 0, false, "five"},
        Sample{"z_image", "turbo", {2, 4}, "", "", "", 48, 80}, Sample{"z_image", "turbo", {2}, "rain", "", "", 48, 80},
        Sample{"z_image", "base", {5}, "rain", "", "", 64, 48},
        Sample{"z_image", "turbo", {2}, "", "", "", 64, 64, 0, true},
        Sample{"z_image", "turbo", {4}, "", "fp8", "", 64, 64},
        Sample{"z_image", "turbo", {2}, "", "", "layouts/z_image/blocks/kohya.safetensors", 48, 80},
        Sample{"flux2", "klein", {2, 4}, "", "", "", 48, 80}, Sample{"flux2", "base", {2}, "rain", "", "", 40, 56},
        Sample{"flux2", "klein", {2}, "", "", "", 64, 64, 0, true},
        Sample{"flux2", "klein", {2}, "", "nf4", "", 64, 64},
        Sample{"flux2", "klein", {4}, "", "", "layouts/flux2/blocks/kohya.safetensors", 48, 80},
        Sample{"qwen_image", "image", {2}, "", "", "", 48, 80},
        Sample{"qwen_image", "zero_image", {2}, "rain", "", "", 96, 64},
        Sample{"qwen_image", "image", {2}, "", "", "", 64, 64, 0, true},
        Sample{"qwen_image", "plus", {2}, "", "", "", 48, 80, 0, false, 0, false, "two"},
        Sample{"qwen_image", "zero", {2}, "", "", "", 96, 64, 0, false, 0, false, "one"},
        Sample{"qwen_image", "image", {2}, "", "fp8", "", 64, 64},
        Sample{"qwen_image", "image", {2}, "", "", "layouts/qwen_image/blocks/kohya.safetensors", 48, 80}),
    [](const auto& info) { return name_of(info.param); });

// The demo models have 6 and 4 heads.
constexpr char kNight[] = "../../deploy/demo-model/loras/night.safetensors";
INSTANTIATE_TEST_SUITE_P(Demo, Ranks,
                         ::testing::Values(Sample{"demo", "image", {2}, "", "", "", 128, 128, 0, true},
                                           Sample{"demo", "image", {2}, "", "fp8", "", 128, 128, 0, true},
                                           Sample{"demo", "image", {2}, "", "", kNight, 128, 128, 0, true},
                                           Sample{"demo", "image", {2}, "", "fp8", kNight, 128, 128, 0, true},
                                           Sample{"demo", "image", {2}, "rain", "", "", 128, 128, 0, true},
                                           Sample{"demo", "video", {2, 4}, "", "", "", 64, 64, 9, true},
                                           Sample{"demo", "video", {2, 4}, "", "fp8", "", 64, 64, 9, true},
                                           Sample{"demo", "video", {2, 4}, "rain", "", "", 64, 64, 9, true}),
                         [](const auto& info) { return name_of(info.param); });

}  // namespace
}  // namespace ditfleet::pipeline
