// Weights that leave the device and come back: results are those of weights that stay, bit for bit, in every format and
// with adapters.
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/memory/part_sequence.h"
#include "pipeline/weights/safetensors.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

std::unique_ptr<WeightPart> part_of(const at::Tensor& tensor) {
  auto part = std::make_unique<WeightPart>(tensor.device());
  part->add(tensor);
  return part;
}

TEST(WeightPart, ComesBackAsItWas) {
  memory_use(kCpu);  // counts from now on
  const at::Tensor a = at::rand({3, 5}), view = a.narrow(0, 1, 2), b = at::rand({7}), a_was = a.clone(),
                   b_was = b.clone();
  WeightPart part(kCpu);
  part.add(a);
  part.add(view);  // shares a's storage
  part.add(b);
  EXPECT_EQ(part.bytes(), 2 * 512);
  const std::int64_t before = memory_use(kCpu).now;
  part.leave();
  EXPECT_LT(memory_use(kCpu).now, before);
  EXPECT_FALSE(is_on_device(a));
  for (int i = 0; i < 2; ++i) {
    part.enter();
    EXPECT_TRUE(at::equal(a, a_was));
    EXPECT_TRUE(at::equal(view, a_was.narrow(0, 1, 2)));
    EXPECT_TRUE(at::equal(b, b_was));
    a.zero_();  // the host's copy does not follow
    part.leave();
  }
}

TEST(WeightPart, SharesItsHostCopy) {
  const auto copies = [] {
    std::size_t count = 0;
    for (const auto& file : std::filesystem::directory_iterator("/dev/shm"))
      count += file.path().filename().string().starts_with("ditfleet-");
    return count;
  };
  const std::size_t before = copies();
  {
    const at::Tensor a = at::rand({1 << 20}), other = at::zeros({1 << 20}), a_was = a.clone();
    WeightPart first(kCpu), second(kCpu), third(kCpu);
    const std::string key = "offload_test/" + std::to_string(::getpid());
    first.add(a);
    first.share(key);
    first.leave();
    EXPECT_EQ(copies(), before + 1);
    second.add(other);
    second.share(key);
    second.leave();
    EXPECT_EQ(copies(), before + 1);
    second.enter();
    EXPECT_TRUE(at::equal(other, a_was)) << "the second part finds the bytes of the first";
    third.add(at::zeros({5}));
    third.share(key);  // of another size: not the same bytes
    third.leave();
    EXPECT_EQ(copies(), before + 2);
  }
  EXPECT_EQ(copies(), before) << "the last user removes the copy";
}

TEST(PartSequence, KeepsWhatFitsSpreadEvenly) {
  PartSequence sequence(Placement{kCpu, c10::ScalarType::Float, /*on_host=*/true}, "test", /*repeats=*/true);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 12; ++i) {
    tensors.push_back(at::rand({256}));  // 1 KiB
    sequence.add(part_of(tensors.back()));
  }
  const auto kept = [&] {
    std::string text;
    for (const at::Tensor& tensor : tensors) text += is_on_device(tensor) ? 'x' : '.';
    return text;
  };
  const auto keep = [&](std::int64_t parts) {
    sequence.keep(parts * 1024 + 100);
    return kept();
  };
  EXPECT_EQ(keep(0), "............");
  EXPECT_EQ(keep(12), "xxxxxxxxxxxx");
  EXPECT_EQ(keep(6), ".x.x.x.x.x.x");
  EXPECT_EQ(keep(4), "..x..x..x..x");
  EXPECT_EQ(keep(9), ".xxx.xxx.xxx");
  EXPECT_EQ(keep(1), "..........x.");
  PartSequence::Pass pass(&sequence);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    pass.begin(i);
    EXPECT_TRUE(is_on_device(tensors[i]));
    pass.end(i);
    EXPECT_EQ(is_on_device(tensors[i]), i == 10);
  }
}

TEST(PartSequence, KeepsNothingWhenMemoryRunsOut) {
  PartSequence sequence(Placement{kCpu, c10::ScalarType::Float, /*on_host=*/true}, "test", /*repeats=*/true);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) {
    tensors.push_back(at::zeros({1 << 20}));
    sequence.add(part_of(tensors.back()));
  }
  limit_memory(kCpu, memory_use(kCpu).now + (10 << 20));
  EXPECT_THROW(sequence.keep(sequence.bytes()), c10::OutOfMemoryError);
  for (const at::Tensor& tensor : tensors) EXPECT_FALSE(is_on_device(tensor));
  sequence.keep(8 << 20);
  EXPECT_EQ(sequence.kept_bytes(), 8 << 20);
  limit_memory(kCpu, 0);
}

// Bytes beside weights, predicted from tensors without memory and observed, over sizes, formats and models.
TEST(Prediction, IsWithinTenPercentOfWhatIsObserved) {
  struct Model {
    std::filesystem::path folder;
    std::string dtype;
    std::map<std::string, std::string> quantize;
  };
  const std::filesystem::path demo = std::string(DITFLEET_SOURCE_DIR "/deploy/demo-model/model");
  const Model models[] = {{demo, "fp32", {}},
                          {demo, "bf16", {}},
                          {demo, "bf16", {{"transformer", "fp8"}, {"text_encoder_2", "nf4"}}},
                          {demo, "fp32", {{"transformer", "nf4"}}},
                          {golden::fixtures() / "flux/dev/model", "fp32", {}},
                          {golden::fixtures() / "flux/schnell/model", "fp32", {}}};
  std::mt19937 random(1);
  for (const Model& which : models) {
    EngineOptions options{golden::test_device(), which.dtype, 1, golden::test_compile()};
    options.memory.limit = std::int64_t{8} << 30;
    auto engine = unwrap(Engine::create(options, {&flux_family()}));
    auto model = unwrap(engine->load_model({"m", which.folder.string(), "", which.quantize}));
    for (int i = 0; i < 6; ++i) {
      const std::int64_t multiple = model->info().size_multiple;
      const auto side = [&] {
        return multiple * std::uniform_int_distribution<std::int64_t>(2, 512 / multiple)(random);
      };
      GenerationRequest request;
      request.prompt = "a red circle " + std::to_string(i);
      request.fields.set("width", side());
      request.fields.set("height", side());
      request.fields.set("num_inference_steps", std::uniform_int_distribution<std::int64_t>(1, 5)(random));
      request.fields.set("max_sequence_length", std::uniform_int_distribution<std::int64_t>(16, 256)(random));
      if (i % 2) {
        request.fields.set("true_cfg_scale", 2.0);
        request.fields.set("negative_prompt", "blue");
      }
      auto generation = unwrap(model->encode(request));
      unwrap(model->denoise(*generation, nullptr));
      unwrap(model->decode(*generation));
      const MemoryReport report = model->memory();
      const auto predicted = static_cast<double>(report.predicted_bytes),
                 observed = static_cast<double>(report.observed_bytes);
      EXPECT_NEAR(predicted, observed, 0.1 * observed + (1 << 20)) << which.folder << ' ' << which.dtype;
      EXPECT_GE(predicted, observed - (64 << 20));
    }
  }
  limit_memory(kCpu, 0);
}

// Draws with the demo model.
GenerationRequest demo_request(int seed, int side) {
  GenerationRequest request;
  request.prompt = "a red circle above star " + std::to_string(seed % 5);
  request.seed = seed;
  request.fields.set("width", side);
  request.fields.set("height", side);
  request.fields.set("num_inference_steps", 2);
  request.fields.set("max_sequence_length", 32);
  return request;
}

Result<Media> draw_one(Model& model, const GenerationRequest& request) {
  auto generation = model.encode(request);
  if (!generation) return generation.error();
  if (auto denoised = model.denoise(**generation, nullptr); !denoised) return denoised.error();
  return model.decode(**generation);
}

class DemoModels : public ::testing::Test {
 protected:
  // An engine whose tensors may take `limit` bytes.
  std::unique_ptr<Engine> open(std::int64_t limit) {
    EngineOptions options{golden::test_device(), "fp32", 1, golden::test_compile()};
    options.memory.limit = limit > 0 ? memory_use(kCpu).now + limit : 0;
    return unwrap(Engine::create(options, {&flux_family()}));
  }
  std::pair<std::vector<Media>, std::int64_t> expected(const std::vector<GenerationRequest>& requests);
  static std::unique_ptr<Model> load(Engine& engine, const std::string& name) {
    return unwrap(engine.load_model({name, DITFLEET_SOURCE_DIR "/deploy/demo-model/model"}));
  }
  ~DemoModels() override { limit_memory(kCpu, 0); }
};

// The picture of each request, and the bytes of the weights.
std::pair<std::vector<Media>, std::int64_t> DemoModels::expected(const std::vector<GenerationRequest>& requests) {
  const auto engine = open(0);
  const auto model = load(*engine, "reference");
  std::vector<Media> pictures;
  for (const auto& request : requests) pictures.push_back(unwrap(draw_one(*model, request)));
  return {std::move(pictures), model->info().weight_bytes};
}

TEST_F(DemoModels, TwoThatDoNotFitTogetherTakeTurns) {
  std::mt19937 random(2);
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 100; ++i) requests.push_back(demo_request(i, 64 << random() % 2));
  const auto [pictures, bytes] = expected(requests);
  const auto engine = open(bytes * 17 / 10);
  const std::unique_ptr<Model> models[] = {load(*engine, "a"), load(*engine, "b")};
  std::int64_t switches = 0, last = -1;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::int64_t which = random() % 2;
    switches += which != std::exchange(last, which);
    ASSERT_TRUE(unwrap(draw_one(*models[which], requests[i])).rgb == pictures[i].rgb) << i;
    EXPECT_EQ(models[which]->memory().plan, "resident");
    EXPECT_FALSE(models[1 - which]->memory().resident);
  }
  // Neither can stay, so each switch is a load.
  EXPECT_LE(models[0]->memory().loads + models[1]->memory().loads, switches * 12 / 10);
}

TEST_F(DemoModels, ALargerRequestTakesTheOtherModelsPlace) {
  const auto [pictures, bytes] = expected({demo_request(1, 64), demo_request(2, 64), demo_request(3, 256)});
  const auto engine = open(2 * bytes + (24 << 20));
  const auto a = load(*engine, "a"), b = load(*engine, "b");
  EXPECT_TRUE(unwrap(draw_one(*a, demo_request(1, 64))).rgb == pictures[0].rgb);
  EXPECT_TRUE(unwrap(draw_one(*b, demo_request(2, 64))).rgb == pictures[1].rgb);
  EXPECT_TRUE(a->memory().resident && b->memory().resident) << "both fit beside small images";
  EXPECT_TRUE(unwrap(draw_one(*a, demo_request(3, 256))).rgb == pictures[2].rgb);
  EXPECT_EQ(a->memory().plan, "resident");
  EXPECT_EQ(a->memory().step_downs, 0);
  EXPECT_FALSE(b->memory().resident);
}

// As the worker's threads do: adapters come and go while other requests run whose blocks are copied.
TEST_F(DemoModels, AdaptersAreForgottenWhileBlocksMove) {
  EngineOptions options{golden::test_device(), "fp32", 1, golden::test_compile()};
  options.memory.offload = "block";
  options.lora_slots = 1;
  options.max_lora_rank = 16;
  const auto engine = unwrap(Engine::create(options, {&flux_family()}));
  const auto model = load(*engine, "a");
  const auto adapter = std::filesystem::path(DITFLEET_SOURCE_DIR "/deploy/demo-model/loras");
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(adapter))
    if (entry.path().extension() == ".safetensors") file = entry.path().string();
  const Media plain = unwrap(draw_one(*model, demo_request(1, 64)));
  auto adapted = demo_request(1, 64);
  adapted.loras = {{file, 1.0, "style"}};
  const Media styled = unwrap(draw_one(*model, adapted));
  EXPECT_FALSE(styled.rgb == plain.rgb);
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) {
      unwrap(model->prefetch(adapted.loras));
      model->forget_adapter("style");
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(unwrap(draw_one(*model, demo_request(1, 64))).rgb == plain.rgb);
    if (i % 5 == 0) {
      EXPECT_TRUE(unwrap(draw_one(*model, adapted)).rgb == styled.rgb);
    }
  }
  done = true;
  other.join();
}

TEST_F(DemoModels, RequestsThatAreTooLargeLeaveTheOthersAlone) {
  std::mt19937 random(3);
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 200; ++i) requests.push_back(demo_request(i, std::array{64, 96, 128, 160}[random() % 4]));
  const auto [pictures, bytes] = expected(requests);
  const auto engine = open(bytes + (64 << 20));
  const auto model = load(*engine, "a");
  for (std::size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(unwrap(draw_one(*model, requests[i])).rgb == pictures[i].rgb) << i;
    if (i % 20 != 7) continue;
    const auto picture = draw_one(*model, demo_request(1, 1024));
    ASSERT_FALSE(picture);
    EXPECT_EQ(picture.error().code, Code::kOutOfMemory);
    EXPECT_THAT(picture.error().message, ::testing::AllOf(::testing::HasSubstr("decoding"), ::testing::HasSubstr("MiB"),
                                                          ::testing::HasSubstr("block: ")));
  }
  EXPECT_EQ(model->memory().step_downs, 0) << "they are refused before they run";
}

TEST_F(DemoModels, MemoryThatOthersTakeMeanwhileCostsAStepDown) {
  const auto [pictures, bytes] = expected({demo_request(2, 128)});
  const auto engine = open(bytes * 2);
  const auto model = load(*engine, "a");
  unwrap(draw_one(*model, demo_request(1, 128)));
  EXPECT_EQ(model->memory().plan, "resident");
  auto generation = unwrap(model->encode(demo_request(2, 128)));
  std::vector<at::Tensor> others;
  unwrap(model->denoise(*generation, [&](const StepProgress& progress) {
    if (progress.step == 1 && others.empty())
      others.push_back(at::zeros({memory_info(kCpu).free - (4 << 20)}, c10::ScalarType::Byte));
    return true;
  }));
  EXPECT_TRUE(unwrap(model->decode(*generation)).rgb == pictures[0].rgb);
  EXPECT_GE(model->memory().step_downs, 1);
  EXPECT_NE(model->memory().plan, "resident");
}

TEST_F(DemoModels, ALimitThatHoldsNoImageIsRefusedAtLoad) {
  const auto engine = open(3 << 20);
  const auto model = engine->load_model({"a", DITFLEET_SOURCE_DIR "/deploy/demo-model/model"});
  ASSERT_FALSE(model);
  EXPECT_EQ(model.error().code, Code::kOutOfMemory);
  EXPECT_THAT(model.error().message, ::testing::HasSubstr("3.0 MiB"));
}

TEST_F(DemoModels, QuantizeAutoTakesWhatTheLimitRequires) {
  const std::string dir = DITFLEET_SOURCE_DIR "/deploy/demo-model/model";
  using Formats = std::map<std::string, std::string>;
  const auto plan = [&](std::int64_t limit, const Formats& formats) {
    auto request = demo_request(1, 16);
    request.fields.set("max_sequence_length", 1);
    request.fields.set("num_inference_steps", 1);
    return unwrap(open(limit)->plan({"a", dir, "", formats}, request));
  };
  const Formats any{{"*", "auto"}}, fp8{{"transformer", "fp8"}, {"text_encoder_2", "nf4"}},
      nf4{{"transformer", "nf4"}, {"text_encoder_2", "nf4"}};
  EXPECT_EQ(plan(0, any).quantize, Formats());
  EXPECT_EQ(plan(std::int64_t{1} << 30, any).quantize, Formats());
  const std::int64_t enough = plan(0, fp8).choice.plan->bytes;
  EXPECT_EQ(plan(enough, any).quantize, fp8);
  EXPECT_EQ(plan(plan(0, nf4).choice.plan->bytes, any).quantize, nf4);
  const auto engine = open(enough);
  const auto model = unwrap(engine->load_model({"a", dir, "", any}));
  EXPECT_EQ(model->info().linears.at("transformer").size(), 2U);  // fp8 and fp32
}

TEST(Containment, NamesTheWeightThatIsNotFinite) {
  namespace fs = std::filesystem;
  const fs::path dir = fs::temp_directory_path() / ("not_finite_" + std::to_string(::getpid()));
  fs::copy(golden::fixtures() / "flux/dev/model", dir, fs::copy_options::recursive);
  const fs::path file = dir / "transformer/diffusion_pytorch_model.safetensors";
  const std::string name = "single_transformer_blocks.0.proj_mlp.weight";
  const auto entry = *unwrap(SafetensorsFile::open(file.string())).find(name);
  {
    std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(entry.end - 4));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    out.write(reinterpret_cast<const char*>(&nan), sizeof nan);
  }
  EngineOptions options{golden::test_device(), "fp32", 1, golden::test_compile()};
  const auto engine = unwrap(Engine::create(options, {&flux_family()}));
  const auto model = unwrap(engine->load_model({"a", dir.string()}));
  const auto picture = draw_one(*model, demo_request(1, 4 * model->info().size_multiple));
  ASSERT_FALSE(picture);
  EXPECT_EQ(picture.error().code, Code::kDataCorrupt);
  EXPECT_THAT(picture.error().message, ::testing::EndsWith("weight " + name + " of transformer is not finite"));
  fs::remove_all(dir);
}

struct Case {
  std::string name, folder;  // a fixture of `flux` or `quant`
  bool bf16;
  std::string adapter = {};  // for the folder's model
};

// What a model drew, or why it did not.
struct Drawn {
  std::vector<Media> pictures;
  std::optional<Error> error;
  std::int64_t peak = 0;  // device memory beyond what was in use before
};

class Offload : public ::testing::TestWithParam<Case> {
 protected:
  // Draws with a model of its own: without and with adapters, at two sizes. `limit` is beyond what is in use.
  static Drawn draw(const std::string& offload, std::int64_t limit = 0) {
    const Case& which = GetParam();
    EngineOptions options{golden::test_device(), which.bf16 ? "bf16" : "fp32", 1, golden::test_compile()};
    options.lora_slots = 1;
    options.max_lora_rank = 16;
    const std::int64_t before = memory_use(kCpu).now;
    options.memory = {.offload = offload, .limit = limit > 0 ? before + limit : 0};
    reset_memory_peak(kCpu);
    Drawn drawn;
    drawn.error = draw_all(options, drawn.pictures);
    drawn.peak = memory_use(kCpu).peak - before;
    limit_memory(kCpu, 0);
    return drawn;
  }

 private:
  static std::optional<Error> draw_all(const EngineOptions& options, std::vector<Media>& pictures) {
    auto engine = Engine::create(options, {&flux_family()});
    if (!engine) return engine.error();
    const auto folder = golden::fixtures() / GetParam().folder, file = folder / "transformer.safetensors";
    auto model =
        (*engine)->load_model({"m", (folder / "model").string(), std::filesystem::exists(file) ? file.string() : ""});
    if (!model) return model.error();
    for (const std::int64_t side : {4, 6, 4}) {
      GenerationRequest request;
      request.prompt = "a red circle above a white star";
      request.seed = side;
      request.fields.set("width", side * (*model)->info().size_multiple);
      request.fields.set("height", 4 * (*model)->info().size_multiple);
      request.fields.set("num_inference_steps", 4);
      request.fields.set("max_sequence_length", 16);
      request.fields.set("true_cfg_scale", 2.0);
      request.fields.set("negative_prompt", "blue");
      for (const bool adapted : {false, true}) {
        if (adapted && GetParam().adapter.empty()) continue;
        if (adapted) request.loras = {{(golden::fixtures() / GetParam().adapter).string(), 0.7}};
        auto generation = (*model)->encode(request);
        if (!generation) return generation.error();
        if (auto denoised = (*model)->denoise(**generation, nullptr); !denoised) return denoised.error();
        auto picture = (*model)->decode(**generation);
        if (!picture) return picture.error();
        pictures.push_back(std::move(*picture));
      }
    }
    return {};
  }
};

void expect_equal(const Drawn& made, const Drawn& expected) {
  ASSERT_FALSE(made.error) << made.error->message;
  ASSERT_EQ(made.pictures.size(), expected.pictures.size());
  for (std::size_t i = 0; i < made.pictures.size(); ++i)
    EXPECT_TRUE(made.pictures[i].rgb == expected.pictures[i].rgb) << "picture " << i;
}

TEST_P(Offload, DrawsWhatResidentWeightsDraw) {
  const Drawn expected = draw("none");
  ASSERT_FALSE(expected.error) << expected.error->message;
  if (!GetParam().adapter.empty()) {
    EXPECT_FALSE(expected.pictures[0].rgb == expected.pictures[1].rgb) << "the adapter changes nothing";
  }
  for (const char* offload : {"auto", "model", "block"}) {
    SCOPED_TRACE(offload);
    expect_equal(draw(offload), expected);
  }
}

// Whatever the limit, the pictures are right or the error has the numbers.
TEST_P(Offload, StepsDownUntilItFits) {
  const Drawn expected = draw("none");
  const std::int64_t peak = expected.peak;
  int drawn = 0;
  for (const double share : {1.5, 1.2, 1.0, 0.85, 0.7, 0.5, 0.2}) {
    SCOPED_TRACE(share);
    const Drawn made = draw("auto", static_cast<std::int64_t>(share * static_cast<double>(peak)));
    if (made.error) {
      EXPECT_EQ(made.error->code, Code::kOutOfMemory) << made.error->message;
      EXPECT_THAT(made.error->message, ::testing::HasSubstr("MiB"));
      continue;
    }
    ++drawn;
    EXPECT_LE(made.peak, static_cast<std::int64_t>(share * static_cast<double>(peak)));
    expect_equal(made, expected);
  }
  EXPECT_GE(drawn, 1);
}

INSTANTIATE_TEST_SUITE_P(Formats, Offload,
                         ::testing::Values(Case{"fp32", "flux/dev", false, "lora/adapters/all.safetensors"},
                                           Case{"bf16", "flux/dev", true, "lora/adapters/all.safetensors"},
                                           Case{"comfy_old", "quant/comfy_old", true},
                                           Case{"comfy_plain", "quant/comfy_plain", true},
                                           Case{"nf4", "quant/nf4", true, "quant/adapters/nf4.safetensors"},
                                           Case{"nf4_fp32", "quant/nf4_fp32", false},
                                           Case{"nf4_fp32_in_bf16", "quant/nf4_fp32", true},
                                           Case{"fp8_rows", "quant/fp8_rows", true, "quant/adapters/fp8.safetensors"}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ditfleet::pipeline
