#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/upsample_nearest2d.h>

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <thread>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/engine/denoise_loop.h"
#include "pipeline/engine/family.h"
#include "pipeline/engine/generation.h"
#include "pipeline/engine/model_base.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/sampling/latents.h"
#include "pipeline/sampling/schedule.h"
#include "tests/test_family/families.h"

namespace ditfleet::tests {
namespace {

using namespace pipeline;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kChannels = 3, kPatch = 8;  // a latent pixel is 8 × 8 pixels

// A prompt "fault STAGE ACTION [PATH]" makes a stage (text, step or decode) crash, hang, sleep for 200 ms or run out of
// memory. With a file as PATH, the first attempt that gets there removes the file, and later ones run normally. With a
// folder, the fault is only in processes whose pid is the name of a file in it. The action slow sleeps for 10 ms
// everywhere and for 200 ms more in these processes: how much slower they are does not depend on the machine's load.
void fault(const std::string& prompt, std::string_view stage) {
  std::istringstream words(prompt);
  std::string word, at, action, path;
  words >> word >> at >> action >> path;
  if (word != "fault" || at != stage) return;
  if (action == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(10));
  std::error_code ignored;
  if (!path.empty() && !(std::filesystem::is_directory(path, ignored)
                             ? std::filesystem::exists(path + "/" + std::to_string(::getpid()), ignored)
                             : std::filesystem::remove(path, ignored)))
    return;
  if (action == "crash") std::abort();
  if (action == "memory") fail(Code::kOutOfMemory, "the test family was asked to run out of memory");
  if (action == "sleep" || action == "slow") std::this_thread::sleep_for(std::chrono::milliseconds(200));
  while (action == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
}

struct TestGeneration final : GenerationBase {
  Result<void> dump(const std::string&) const override {
    return Error{Code::kInvalidArgument, "the test family has no dump"};
  }
  std::string prompt;
  double guidance = 0, guidance_2 = 0, frame_rate = 0;
  at::Tensor text;     // [1, 1, channels]
  at::Tensor noise;    // [frames, channels, rows, columns], as are the latents
  at::Tensor latents;  // undefined before denoise()
  std::vector<float> sigmas;
};

// velocity = x · Wᵀ + b, plus the prompt's embedding if conditioned.
class TestNetwork {
 public:
  static TestNetwork load(const std::string& dir, Placement placement) {
    auto parameters = Parameters::open(dir, Library::kDiffusers, placement);
    return TestNetwork{parameters.linear("proj", kChannels, kChannels)};
  }
  at::Tensor velocity(const at::Tensor& latents, const at::Tensor& text, double guidance) const {
    const at::Tensor negative = apply_linear(proj, latents.permute({0, 2, 3, 1}));
    const at::Tensor positive = negative + text;
    return (negative + guidance * (positive - negative)).permute({0, 3, 1, 2});
  }
  LinearSlot proj;
};

class TestDenoiser final : public Denoiser {
 public:
  TestDenoiser(const TestNetwork& high, const TestNetwork& low, const TestGeneration& generation)
      : high_(high), low_(low), generation_(generation) {}
  at::Tensor velocity(std::int64_t step, const at::Tensor& latents) override {
    fault(generation_.prompt, "step");
    const bool first = 2 * step < static_cast<std::int64_t>(generation_.sigmas.size() - 1);
    return (first ? high_ : low_)
        .velocity(latents, generation_.text, first ? generation_.guidance : generation_.guidance_2);
  }

 private:
  const TestNetwork &high_, &low_;
  const TestGeneration& generation_;
};

Media to_video(const at::Tensor& latents, double frame_rate) {
  const at::Tensor pixels =
      unit_range(at::upsample_nearest2d(latents, {latents.size(2) * kPatch, latents.size(3) * kPatch}));
  Media video;
  for (std::int64_t frame = 0; frame < pixels.size(0); ++frame) {
    const Media one = to_media(pixels.narrow(0, frame, 1));
    video.width = one.width;
    video.height = one.height;
    video.rgb.insert(video.rgb.end(), one.rgb.begin(), one.rgb.end());
  }
  video.frames = static_cast<int>(pixels.size(0));
  video.frame_rate = frame_rate;
  return video;
}

class TestModel final : public ModelBase {
 public:
  TestModel(ModelInfo info, Placement placement, TestNetwork high, TestNetwork low, AdapterStore::Limits adapters)
      : ModelBase(std::move(info), placement, {"test", {{"transformer", {"transformer."}, {}}}}, adapters),
        high_(std::move(high)),
        low_(std::move(low)) {}

 private:
  std::unique_ptr<Generation> run_encode(const GenerationRequest& request) override {
    const auto begun = Clock::now();
    if (!request.loras.empty()) fail(Code::kInvalidArgument, "the test family takes no adapters", "loras");
    fault(request.prompt, "text");
    auto made = std::make_unique<TestGeneration>();
    made->prompt = request.prompt;
    const auto& fields = request.fields;
    made->guidance = fields.real("guidance_scale").value();
    made->guidance_2 = fields.real("guidance_scale_2").value();
    made->frame_rate = fields.real("fps").value();
    double mean = 0;
    for (const char c : request.prompt) mean += static_cast<unsigned char>(c) / 255.0 / request.prompt.size();
    made->text = at::full({1, 1, 1, kChannels}, mean, at::TensorOptions(placement().dtype).device(placement().device));
    std::vector<at::Tensor> frames;
    for (std::int64_t frame = 0; frame < fields.integer("frames").value(); ++frame)
      frames.push_back(draw_noise(request.seed + 1000 * frame, kChannels, *fields.integer("height") / kPatch,
                                  *fields.integer("width") / kPatch, placement().dtype));
    made->noise = at::cat(frames);
    made->sigmas = make_schedule({}, static_cast<int>(*fields.integer("num_inference_steps")), 1).sigmas;
    made->add_phase("text", begun);
    return made;
  }

  Result<void> run_denoise(Generation& generation, const StepCallback& on_step,
                           const std::function<void()>& wait) override {
    const auto begun = Clock::now();
    auto& own = dynamic_cast<TestGeneration&>(generation);
    const auto sigmas = static_cast<std::int64_t>(own.sigmas.size());
    FlowMatchEuler sampler(at::from_blob(own.sigmas.data(), {sigmas}).clone().to(placement().device));
    TestDenoiser denoiser(high_, low_, own);
    auto latents =
        denoise_loop(denoiser, sampler, own.noise.to(placement().device), sigmas - 1,
                     {on_step, [](const at::Tensor& estimate) { return to_video(estimate.narrow(0, 0, 1), 0); }, wait});
    if (!latents) return latents.error();
    own.latents = std::move(*latents);
    own.add_phase("denoise", begun);
    return {};
  }

  Media run_decode(Generation& generation, const FrameCallback&) override {
    const auto& own = dynamic_cast<TestGeneration&>(generation);
    fault(own.prompt, "decode");
    return to_video(own.latents, own.frame_rate);
  }
  bool uses_adapters(const Generation&) const override { return false; }
  void clear_adapter_columns() override {}

  const TestNetwork high_, low_;
};

std::unique_ptr<Model> load(const LoadContext& context) {
  ModelInfo info;
  info.name = context.source.name;
  info.dir = context.source.dir;
  info.size_multiple = kPatch;
  return std::make_unique<TestModel>(
      std::move(info), context.placement, TestNetwork::load(context.source.dir + "/transformer", context.placement),
      TestNetwork::load(context.source.dir + "/transformer_2", context.placement), context.adapters);
}

}  // namespace

const pipeline::Family& test_video_family() {
  static const pipeline::Family family{{"TestVideoPipeline"},
                                       load,
                                       [](const ModelSource&, region::ElementType, region::ArchFeatures,
                                          const region::CompileOptions&) { return region::AheadPrograms(); },
                                       [](const std::string&) -> std::unique_ptr<Tokenizers> {
                                         fail(Code::kInvalidArgument, "the test family has no tokenizers");
                                       }};
  return family;
}

}  // namespace ditfleet::tests
