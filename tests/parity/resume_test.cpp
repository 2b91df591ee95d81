// A request that goes on from a state in another process draws the same bits as one that was not interrupted.
// DITFLEET_TEST_COMPILE and DITFLEET_TEST_DEVICE run the same with compiled blocks and on a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::HasSubstr;

struct Sample {
  std::string set, name;  // of tests/fixtures/cache
  std::string folder;     // of tests/fixtures/SET
  bool cached = false;
  std::string lora = {};  // of tests/fixtures
};

constexpr std::int64_t kSteps = 5;

GenerationRequest request_of(const Sample& sample) {
  GenerationRequest request = golden::load({sample.set, sample.name, "cache"}).request;
  request.fields.set("num_inference_steps", kSteps);
  if (!sample.cached) request.fields.set("cache", 0.0);
  if (!sample.lora.empty()) request.loras = {{(golden::fixtures() / (sample.lora + ".safetensors")).string(), 0.8}};
  return request;
}

// Loads the model as another process would.
class Process {
 public:
  explicit Process(const Sample& sample) {
    EngineOptions options = golden::test_options("fp32", 1);
    options.lora_slots = sample.lora.empty() ? 0 : 1;
    engine_ = unwrap(Engine::create(options, {&flux_family(), &wan_family()}));
    model_ = unwrap(engine_->load_model({"m", golden::Case{sample.folder, {}, sample.set}.model_dir()}));
  }

  struct Drawn {
    std::string latents;  // of the dump
    std::vector<int> steps;
    std::vector<std::string> states;  // after each of `steps`, without the last one
    int skipped = 0;
  };

  Result<Drawn> draw(const GenerationRequest& request, const std::string& from = {}) {
    const auto generation = unwrap(model_->encode(request));
    if (!from.empty()) generation->go_on_from(from);
    Drawn drawn;
    auto done = model_->denoise(*generation, [&](const StepProgress& progress) {
      drawn.steps.push_back(progress.step);
      if (progress.step < progress.total) drawn.states.push_back(unwrap(progress.state(1 << 20)));
      const auto large = progress.state(100);
      EXPECT_EQ(large ? Code::kInternal : large.error().code, Code::kPayloadTooLarge);
      return true;
    });
    if (!done) return done.error();
    const std::string dump = ::testing::TempDir() + "resume-" + std::to_string(::getpid()) + ".safetensors";
    unwrap(generation->dump(dump));
    const at::Tensor latents = golden::read_tensor(dump, "latents").contiguous();
    drawn.latents.assign(static_cast<const char*>(latents.const_data_ptr()), latents.nbytes());
    drawn.skipped = generation->skipped_steps();
    return drawn;
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Model> model_;
};

class Resumes : public ::testing::TestWithParam<Sample> {};

TEST_P(Resumes, WithTheSameBits) {
  const GenerationRequest request = request_of(GetParam());
  const Process::Drawn whole = unwrap(Process(GetParam()).draw(request));
  ASSERT_EQ(whole.states.size(), static_cast<std::size_t>(kSteps - 1));
  if (GetParam().cached) {
    EXPECT_GT(whole.skipped, 0) << "the cache has no part in it";
  }
  Process other(GetParam());
  for (std::size_t i = 0; i < whole.states.size(); ++i) {
    const Process::Drawn rest = unwrap(other.draw(request, whole.states[i]));
    EXPECT_EQ(rest.steps,
              std::vector<int>(whole.steps.begin() + static_cast<std::ptrdiff_t>(i) + 1, whole.steps.end()));
    EXPECT_TRUE(rest.latents == whole.latents) << "after step " << i + 1;
    EXPECT_EQ(rest.skipped, whole.skipped) << "after step " << i + 1;
    // Whoever goes on can be interrupted as well.
    ASSERT_EQ(rest.states.size(), whole.states.size() - i - 1);
    for (std::size_t j = 0; j < rest.states.size(); ++j) EXPECT_TRUE(rest.states[j] == whole.states[i + 1 + j]);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, Resumes,
                         ::testing::Values(Sample{"flux", "guided", "dev"}, Sample{"flux", "guided", "dev", true},
                                           Sample{"flux", "plain", "dev", false, "lora/adapters/all"},
                                           Sample{"wan", "guided", "one"}, Sample{"wan", "guided", "one", true},
                                           Sample{"wan", "experts", "two"}, Sample{"wan", "experts", "two", true},
                                           Sample{"wan", "image", "ti2v"}),
                         [](const auto& info) {
                           return info.param.set + "_" + info.param.name + (info.param.cached ? "_cached" : "") +
                                  (info.param.lora.empty() ? "" : "_lora");
                         });

TEST(Resume, RefusesStatesThatAreDamagedOrOfAnotherRequest) {
  const Sample sample{"wan", "guided", "one"};
  Process run(sample);
  GenerationRequest request = request_of(sample);
  const std::string state = unwrap(run.draw(request)).states[1];
  for (const std::string& damaged : {state.substr(0, state.size() - 1), state.substr(0, 100), std::string("state")}) {
    const auto refused = run.draw(request, damaged);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kDataCorrupt);
    EXPECT_THAT(refused.error().message, HasSubstr("is no safetensors file"));
  }
  GenerationRequest other = request;
  other.fields.set("num_inference_steps", kSteps + 1);
  const auto refused = run.draw(other, state);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_THAT(refused.error().message, HasSubstr("of another request"));
  const auto euler = Process({"flux", "guided", "dev"}).draw(request_of({"flux", "guided", "dev"}), state);
  ASSERT_FALSE(euler.ok());
  EXPECT_THAT(euler.error().message, HasSubstr("of another request"));
}

}  // namespace
}  // namespace ditfleet::pipeline
