// Whole pictures through the engine against diffusers' FluxPipeline, from prompt to pixels, and what only this family
// promises beside the picture (tests/families has the rest). DITFLEET_TEST_DEVICE=cuda runs the same on a GPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using golden::test_device;

template <class T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message);
  return std::move(result).value();
}
void must(const Result<void>& result) {
  if (!result) throw std::runtime_error(result.error().message);
}

// One engine a precision and one model a folder, for the whole run. They must go before the process ends its
// libraries: LibTorch's device memory cannot be given back after that.
class Loaded : public ::testing::Environment {
 public:
  static Loaded& get() {
    static auto* const loaded = dynamic_cast<Loaded*>(::testing::AddGlobalTestEnvironment(new Loaded));
    return *loaded;
  }
  Model& model(const std::string& dir, bool bf16) {
    auto& engine = engines_[bf16];
    if (!engine) engine = must(Engine::create(golden::test_options(bf16 ? "bf16" : "fp32", 0), {&flux_family()}));
    auto& model = models_[{dir, bf16}];
    if (!model) model = must(engine->load_model({"golden", dir}));
    return *model;
  }
  void TearDown() override {
    for (const auto& [bf16, engine] : engines_) golden::expect_compiled(*engine);
    models_.clear();
    engines_.clear();
  }

 private:
  std::map<bool, std::unique_ptr<Engine>> engines_;
  std::map<std::pair<std::string, bool>, std::unique_ptr<Model>> models_;
};
const Loaded& kRegistered = Loaded::get();  // environments are to be added before the tests run

Model& model_of(const std::string& dir, bool bf16) { return Loaded::get().model(dir, bf16); }

golden::Case dev_plain() { return {"dev", "plain"}; }

struct PixelError {
  int most = 0;
  double mean = 0;
};
PixelError compare(const Media& image, const at::Tensor& reference) {
  EXPECT_EQ(reference.size(0), image.height);
  EXPECT_EQ(reference.size(1), image.width);
  EXPECT_EQ(image.rgb.size(), static_cast<std::size_t>(reference.numel()));
  PixelError error;
  for (std::size_t i = 0; i < image.rgb.size(); ++i) {
    const int d = std::abs(int{image.rgb[i]} - int{reference.const_data_ptr<std::uint8_t>()[i]});
    error.most = std::max(error.most, d);
    error.mean += d / static_cast<double>(image.rgb.size());
  }
  return error;
}

class FluxPipeline : public ::testing::TestWithParam<golden::Case> {};

TEST_P(FluxPipeline, DrawsWhatDiffusersDraws) {
  const golden::Golden golden = golden::load(GetParam());
  Model& model = model_of(GetParam().model_dir(), golden.bf16);
  auto prepared = must(model.encode(golden.request));
  must(model.denoise(*prepared, nullptr));
  const Media image = must(model.decode(*prepared));

  const auto dump =
      std::filesystem::temp_directory_path() / ("ditfleet_dump_" + std::to_string(::getpid()) + ".safetensors");
  must(prepared->dump(dump.string()));
  for (const char* exact : {"clip_ids", "t5_ids"})
    EXPECT_EQ(golden::distance(golden::read_tensor(dump.string(), exact), golden.tensor(exact)), 0) << exact;
  for (const char* name :
       {"pooled_prompt_embeds", "prompt_embeds", "noise", "sigmas", "timesteps", "latents", "image"}) {
    const at::Tensor got = golden::read_tensor(dump.string(), name);
    EXPECT_EQ(got.scalar_type(), golden.tensor(name).scalar_type()) << name;
    const double d = golden::distance(got, golden.tensor(name));
    RecordProperty(name, std::to_string(d));
    EXPECT_LE(d, golden.bf16 ? 4e-2 : 1e-4) << name;
  }
  std::filesystem::remove(dump);

  const PixelError error = compare(image, golden.tensor("pixels"));
  std::printf("%s/%s %s: pixels max %d mean %.4f\n", GetParam().folder.c_str(), GetParam().name.c_str(),
              golden.bf16 ? "bf16" : "fp32", error.most, error.mean);
  if (golden.bf16) {
    EXPECT_LE(error.mean, 2);
  } else {
    EXPECT_LE(error.most, 1);
    EXPECT_LE(error.mean, 0.02);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, FluxPipeline, ::testing::ValuesIn(golden::all_cases()),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

TEST(FluxEngine, WarnsOfTruncatedPrompts) {
  GenerationRequest request = golden::load(dev_plain()).request;
  request.fields.set("num_inference_steps", 1);
  Model& model = model_of(dev_plain().model_dir(), false);
  EXPECT_TRUE(must(model.encode(request))->warnings().empty());
  std::string longer;
  for (int i = 0; i < 200; ++i) longer += "red circle ";
  request.prompt = longer;
  const auto warnings = must(model.encode(request))->warnings();
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_NE(warnings[0].find("CLIP accepts 77 tokens"), std::string::npos) << warnings[0];
  EXPECT_NE(warnings[1].find("T5 accepts 64 tokens"), std::string::npos) << warnings[1];
  request.prompt = "";
  EXPECT_TRUE(must(model.encode(request))->warnings().empty());
}

TEST(FluxEngine, WarnsOfATrueCfgScaleWithoutANegativePrompt) {
  GenerationRequest request = golden::load(dev_plain()).request;
  Model& model = model_of(dev_plain().model_dir(), false);
  request.fields.set("true_cfg_scale", 4);
  const auto warnings = must(model.encode(request))->warnings();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("true_cfg_scale has no effect without a negative_prompt"), std::string::npos)
      << warnings[0];
  request.fields.set("negative_prompt", "");
  EXPECT_TRUE(must(model.encode(request))->warnings().empty());
}

TEST(FluxEngine, RefusesAScheduleThatDividesByZero) {
  GenerationRequest request = golden::load({"single", "plain"}).request;  // a folder with shift_terminal
  request.fields.set("num_inference_steps", 1);
  auto result = model_of(golden::Case{"single", "plain"}.model_dir(), false).encode(request);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().param, "num_inference_steps");
  EXPECT_NE(result.error().message.find("needs at least 2"), std::string::npos) << result.error().message;
}

TEST(FluxEngine, RefusesUnknownDevicesAndTypes) {
  const auto error = [](EngineOptions options) {
    auto engine = Engine::create(options, {&flux_family()});
    EXPECT_FALSE(engine);
    return engine ? Error{} : engine.error();
  };
  EXPECT_EQ(error({"tpu", "auto", 0}).code, Code::kInvalidArgument);
  EXPECT_NE(error({"tpu", "auto", 0}).message.find("auto, cpu, cuda or cuda:N"), std::string::npos);
  EXPECT_EQ(error({"cpu", "fp64", 0}).code, Code::kInvalidArgument);
  if (test_device() == "cpu" && !std::filesystem::exists("/dev/nvidia0")) {
    const Error none = error({"cuda", "auto", 0});
    EXPECT_EQ(none.code, Code::kUnavailable);
    EXPECT_NE(none.message.find("NVIDIA"), std::string::npos) << none.message;
    EXPECT_EQ(must(Engine::create({"auto", "auto", 0}, {&flux_family()}))->precision(), "fp32");
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
