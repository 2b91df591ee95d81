#include <ATen/TensorOperators.h>
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
#include "pipeline/engine/family.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "pipeline/sampling/schedule.h"
#include "tests/test_family/families.h"

namespace ditfleet::tests {
namespace {

using namespace pipeline;

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

// velocity = x · Wᵀ + b, plus the prompt's embedding if conditioned.
class TestDenoiser final : public Denoiser {
 public:
  TestDenoiser(const LinearSlot& high, const LinearSlot& low, const Settings& settings, const Conditions& conditions)
      : high_(high), low_(low), settings_(settings), text_(conditions.prompt.tensors.at("prompt_embeds")) {}
  at::Tensor velocity(std::int64_t step, const at::Tensor& latents, bool negative, const parallel::Team&,
                      BlockCache*) override {
    fault(settings_.prompt, "step");
    at::Tensor made = apply_linear(is_first(step) ? high_ : low_, latents.permute({0, 2, 3, 1}));
    if (!negative) made = made + text_;
    return made.permute({0, 3, 1, 2});
  }

 private:
  bool is_first(std::int64_t step) const { return 2 * step < settings_.steps(); }
  double guidance_scale(std::int64_t step) const override {
    return settings_.real(is_first(step) ? job::Field("guidance_scale") : job::Field("guidance_scale_2"));
  }

  const LinearSlot &high_, &low_;
  const Settings& settings_;
  const at::Tensor text_;  // [1, 1, 1, channels]
};

class TestNetwork final : public Network {
 public:
  static std::unique_ptr<Network> load(Folder& folder) {
    const auto linear = [&](const char* name) {
      return Parameters::open(folder.dir(name), Library::kDiffusers, folder.context.placement)
          .linear("proj", kChannels, kChannels);
    };
    auto made = std::make_unique<TestNetwork>();
    made->high_ = linear("transformer");
    made->low_ = linear("transformer_2");
    return made;
  }
  std::unique_ptr<Network> clone() const override { return std::make_unique<TestNetwork>(*this); }
  LoraBase lora_base(std::vector<std::vector<BaseLinear>>) const override {
    return {"test", {{"transformer", {"transformer."}, {}}}};
  }

  void complete(Settings& settings) const override {
    if (!settings.loras.empty()) fail(Code::kInvalidArgument, "the test family takes no adapters", "loras");
    settings.negative = "";
  }
  EncodedPrompt encode(PromptIds ids, const Settings& settings) const override {
    double mean = 0;
    for (const auto c : ids.ids.at("prompt_ids")) mean += c / 255.0 / settings.prompt.size();
    return {std::move(ids),
            {{"prompt_embeds",
              at::full({1, 1, 1, kChannels}, mean, at::TensorOptions(placement.dtype).device(placement.device))}}};
  }
  std::vector<std::int64_t> noise_size(const Settings& settings) const override {
    fault(settings.prompt, "text");
    return {settings.frames(), kChannels, settings.height() / kPatch, settings.width() / kPatch};
  }
  Schedule schedule(const Settings& settings) const override { return make_schedule({}, settings.steps(), 1); }
  std::unique_ptr<Sampler> sampler(const Settings&, const Schedule& schedule) const override {
    return make_flow_sampler({.unipc = false}, schedule, placement.device);
  }
  std::unique_ptr<Denoiser> denoiser(const Settings& settings, const Schedule&,
                                     const Conditions& conditions) const override {
    return std::make_unique<TestDenoiser>(high_, low_, settings, conditions);
  }
  void decode(const at::Tensor& latents, const Settings& settings, const FrameSink& sink) const override {
    fault(settings.prompt, "decode");
    const at::Tensor pixels = at::upsample_nearest2d(latents, {latents.size(2) * kPatch, latents.size(3) * kPatch});
    sink(pixels.permute({1, 0, 2, 3}).unsqueeze(0));
  }
  at::Tensor preview(const at::Tensor& estimate, const Settings&) const override {
    return at::upsample_nearest2d(estimate.narrow(0, 0, 1), {estimate.size(2) * kPatch, estimate.size(3) * kPatch});
  }

 private:
  LinearSlot high_, low_;
};

// A token is a byte.
class TestTokenizers final : public Tokenizers {
 public:
  PromptIds ids(const std::string& prompt, int) const override {
    const auto* bytes = reinterpret_cast<const unsigned char*>(prompt.data());
    return {{{"prompt_ids", {bytes, bytes + prompt.size()}}}, {}};
  }
  Result<TokenIds> tokenize(const std::string& prompt, int) const override {
    return TokenIds{{"bytes", ids(prompt, 0).ids.at("prompt_ids")}};
  }
};

}  // namespace

const pipeline::Family& test_video_family() {
  static const pipeline::Family family{.description = &kTestVideo,
                                       .components = {},
                                       .load = TestNetwork::load,
                                       .load_tokenizers = [](const ModelSource&) -> std::unique_ptr<Tokenizers> {
                                         return std::make_unique<TestTokenizers>();
                                       },
                                       .spec = nullptr,
                                       .small = {64, 64, 5},
                                       .typical = {64, 64, 9}};
  return family;
}

}  // namespace ditfleet::tests
