// Whole pictures through the engine against diffusers' FluxPipeline, from prompt to pixels, and what the engine
// promises beside the picture. DITFLEET_TEST_DEVICE=cuda runs the same on a GPU.
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

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

TEST(FluxEngine, TellsEveryStepAndShowsPreviews) {
  const golden::Golden golden = golden::load(dev_plain());
  Model& model = model_of(dev_plain().model_dir(), false);
  auto prepared = must(model.encode(golden.request));
  std::vector<int> steps;
  Media last;
  must(model.denoise(*prepared, [&](const StepProgress& p) {
    steps.push_back(p.step);
    EXPECT_EQ(p.total, *golden.request.fields.integer("num_inference_steps"));
    last = must(p.preview());
    EXPECT_EQ(last.width, *golden.request.fields.integer("width"));  // small enough to be shown whole
    EXPECT_EQ(last.height, *golden.request.fields.integer("height"));
    return true;
  }));
  EXPECT_EQ(steps, (std::vector<int>{1, 2, 3}));
  // After the last step the estimate is the picture.
  EXPECT_LE(compare(must(model.decode(*prepared)), golden.tensor("pixels")).most, 1);
  EXPECT_LE(compare(last, golden.tensor("pixels")).most, 1);
  std::vector<std::string> names;
  for (const auto& [name, us] : prepared->phases_us()) {
    names.push_back(name);
    EXPECT_GT(us, 0);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"text", "denoise", "vae"}));
}

TEST(FluxEngine, PreviewsOfLargePicturesAreSmall) {
  GenerationRequest request = golden::load(dev_plain()).request;
  request.fields.set("width", 512);
  request.fields.set("height", 256);
  request.fields.set("num_inference_steps", 1);
  Model& model = model_of(dev_plain().model_dir(), false);
  auto prepared = must(model.encode(request));
  must(model.denoise(*prepared, [&](const StepProgress& p) {
    const Media preview = must(p.preview());
    EXPECT_EQ(preview.width, 256);
    EXPECT_EQ(preview.height, 128);
    return true;
  }));
}

TEST(FluxEngine, CancelsAtAStepAndCanStartAgain) {
  const golden::Golden golden = golden::load(dev_plain());
  Model& model = model_of(dev_plain().model_dir(), false);
  auto prepared = must(model.encode(golden.request));
  const auto canceled = model.denoise(*prepared, [](const StepProgress& p) { return p.step < 2; });
  ASSERT_FALSE(canceled);
  EXPECT_EQ(canceled.error().code, Code::kCanceled);
  EXPECT_EQ(canceled.error().message, "canceled after step 2 of 3");
  EXPECT_FALSE(model.decode(*prepared));
  must(model.denoise(*prepared, nullptr));
  EXPECT_LE(compare(must(model.decode(*prepared)), golden.tensor("pixels")).most, 1);
}

TEST(FluxEngine, StagesOfDifferentUnitsRunAtOnce) {
  const golden::Golden golden = golden::load(dev_plain());
  Model& model = model_of(dev_plain().model_dir(), false);
  std::atomic<bool> stop = false;
  std::thread texts([&] {
    for (int i = 0; !stop; ++i) {
      GenerationRequest other = golden.request;
      other.prompt = "another prompt " + std::to_string(i);
      EXPECT_TRUE(model.encode(other));
    }
  });
  for (int i = 0; i < 3; ++i) {
    auto prepared = must(model.encode(golden.request));
    must(model.denoise(*prepared, nullptr));
    EXPECT_LE(compare(must(model.decode(*prepared)), golden.tensor("pixels")).most, 1);
  }
  stop = true;
  texts.join();
}

#ifndef __SANITIZE_ADDRESS__  // whose allocator ends the process instead
// Leaves next to no memory on the device the test runs on, until it is destroyed.
class MemoryShortage {
 public:
  MemoryShortage() {
    if (test_device() == "cpu") {
      getrlimit(RLIMIT_AS, &before_);
      long pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      rlimit tight = before_;
      tight.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE)) + (rlim_t{16} << 20);
      setrlimit(RLIMIT_AS, &tight);
      return;
    }
    for (std::int64_t size = std::int64_t{1} << 34; size >= std::int64_t{1} << 25;) {
      try {
        ballast_.push_back(
            at::empty({size}, at::TensorOptions().dtype(c10::ScalarType::Byte).device(c10::DeviceType::CUDA)));
      } catch (const std::exception&) {
        size /= 2;
      }
    }
  }
  ~MemoryShortage() {
    if (test_device() == "cpu") setrlimit(RLIMIT_AS, &before_);
  }

 private:
  rlimit before_{};
  std::vector<at::Tensor> ballast_;
};

TEST(FluxEngine, SurvivesMemoryThatRunsOut) {
  const golden::Golden golden = golden::load(dev_plain());
  Model& model = model_of(dev_plain().model_dir(), false);
  GenerationRequest large = golden.request;
  large.fields.set("width", 2048);
  large.fields.set("height", 2048);
  large.fields.set("num_inference_steps", 1);
  auto prepared = must(model.encode(golden.request));
  must(model.denoise(*prepared, nullptr));  // so that every thread and workspace is there
  {
    const MemoryShortage shortage;
    const auto drawn = [&]() -> Result<Media> {
      auto generation = model.encode(large);
      if (!generation) return generation.error();
      if (auto denoised = model.denoise(**generation, nullptr); !denoised) return denoised.error();
      return model.decode(**generation);
    }();
    ASSERT_FALSE(drawn);
    EXPECT_EQ(drawn.error().code, Code::kOutOfMemory) << drawn.error().message;
    EXPECT_NE(drawn.error().message.find("out of memory"), std::string::npos) << drawn.error().message;
  }
  EXPECT_LE(compare(must(model.decode(*prepared)), golden.tensor("pixels")).most, 1);
}
#endif

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

TEST(FluxEngine, RefusesBadRequests) {
  Model& model = model_of(dev_plain().model_dir(), false);
  EXPECT_EQ(model.info().size_multiple, 16);
  const GenerationRequest good = golden::load(dev_plain()).request;
  const auto refusal = [&](auto&& spoil) {
    GenerationRequest request = good;
    spoil(request);
    auto result = model.encode(request);
    EXPECT_FALSE(result);
    if (result) return std::string();
    EXPECT_EQ(result.error().code, Code::kInvalidArgument);
    return result.error().param + ": " + result.error().message;
  };
  EXPECT_EQ(refusal([](auto& r) { r.fields.set("width", 100); }),
            "width: width is 100, which is not a multiple of 16 as model 'golden' needs; use 96 or 112");
  EXPECT_NE(refusal([](auto& r) { r.fields.set("height", 0); }).find("accepts 16 to 2048"), std::string::npos);
  EXPECT_NE(refusal([](auto& r) { r.fields.set("num_inference_steps", 0); }).find("accepts 1 to 200"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& r) { r.fields.set("max_sequence_length", 513); }).find("accepts 1 to 512"),
            std::string::npos);
  EXPECT_NE(refusal([](auto& r) { r.fields.set("guidance_scale", NAN); }).find("guidance_scale"), std::string::npos);
  EXPECT_NE(refusal([](auto& r) { r.prompt = "\xff"; }).find("UTF-8"), std::string::npos);
  EXPECT_NE(refusal([](auto& r) { r.loras.push_back({"x", NAN}); }).find("finite"), std::string::npos);
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
