// What fits into a limit, and what happens if it does not: predictions, several models, requests that are too large.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <thread>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/device/memory.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/weights/safetensors.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/parity/flux_golden.h"
#include "tests/paths.h"

namespace ditfleet::pipeline {
namespace {

const c10::Device kCpu(c10::DeviceType::CPU);

// Bytes beside weights, predicted from tensors without memory and observed, over sizes, formats and models.
TEST(Prediction, IsWithinTenPercentOfWhatIsObserved) {
  struct Model {
    std::filesystem::path folder;
    std::string dtype;
    std::map<std::string, std::string> quantize;
  };
  const std::filesystem::path demo = source_path("deploy/demo-model/model");
  const Model models[] = {{demo, "fp32", {}},
                          {demo, "bf16", {}},
                          {demo, "bf16", {{"transformer", "fp8"}, {"text_encoder_2", "nf4"}}},
                          {demo, "fp32", {{"transformer", "nf4"}}},
                          {golden::fixtures() / "flux/dev/model", "fp32", {}},
                          {golden::fixtures() / "flux/schnell/model", "fp32", {}}};
  std::mt19937 random(1);
  for (const Model& which : models) {
    EngineOptions options = golden::test_options(which.dtype, 1);
    options.memory.limit = std::int64_t{8} << 30;
    options.lora_slots = 8;  // planned for, but not allocated
    options.lora_together_rank = 64;
    auto engine = unwrap(Engine::create(options, {&flux_family()}));
    auto model = unwrap(engine->load_model({"m", which.folder.string(), {}, which.quantize}));
    for (int i = 0; i < 4; ++i) {
      const std::int64_t multiple = model->info().size_multiple;
      const auto side = [&] {
        return multiple * std::uniform_int_distribution<std::int64_t>(2, 384 / multiple)(random);
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

// A request that needs more, or that runs out of memory, between another one's steps and its decoding.
TEST(Prediction, IsNotCorrectedByWhatAnotherRequestNeeded) {
  EngineOptions options = golden::test_options("fp32", 1);
  options.memory.limit = std::int64_t{8} << 30;
  auto engine = unwrap(Engine::create(options, {&flux_family()}));
  auto model = unwrap(engine->load_model({"m", (golden::fixtures() / "flux/dev/model").string()}));
  const auto started = [&](int side) {
    GenerationRequest request;
    request.prompt = "a red circle";
    request.fields.set("width", side);
    request.fields.set("height", side);
    request.fields.set("num_inference_steps", 1);
    auto generation = unwrap(model->encode(request));
    unwrap(model->denoise(*generation, nullptr));
    return generation;
  };
  unwrap(model->decode(*started(64)));
  const std::int64_t alone = model->memory().observed_bytes;
  const auto small = started(64), large = started(512);
  unwrap(model->decode(*small));
  EXPECT_EQ(model->memory().observed_bytes, alone);
  unwrap(model->decode(*large));
  EXPECT_GT(model->memory().observed_bytes, alone);
  limit_memory(kCpu, 0);
}

// An adapter of this rank at every linear of the Wan fixture.
std::string wide_adapter(std::int64_t rank) {
  const auto file = unwrap(SafetensorsFile::open((golden::fixtures() / "wan/lora/adapters/peft.safetensors").string()));
  std::vector<at::Tensor> values;
  std::vector<TensorToWrite> tensors;
  for (const auto& entry : file.entries()) {
    std::vector<std::int64_t> shape = entry.shape;
    shape[entry.name.find("lora_A") == std::string::npos ? 1 : 0] = rank;
    values.push_back(at::zeros(shape));
    tensors.push_back({entry.name,
                       DType::kF32,
                       shape,
                       {static_cast<const std::byte*>(values.back().const_data_ptr()), values.back().nbytes()}});
  }
  const std::string path = ::testing::TempDir() + "memory_plan_adapter.safetensors";
  unwrap(write_safetensors(path, std::move(tensors), {}));
  return path;
}

// Of videos the steps are predicted; how much a convolution over time takes on a CPU depends on its algorithm.
TEST(Prediction, CountsFramesOfVideos) {
  for (const auto& [dtype, columns] : {std::pair("fp32", 0), {"bf16", 0}, {"fp32", 512}}) {
    EngineOptions options = golden::test_options(dtype, 1);
    options.memory.limit = std::int64_t{8} << 30;
    if (columns > 0) options.compile.backend = "cpu_jit";
    options.max_lora_rank = 512;
    options.lora_slots = 1;
    auto engine = unwrap(Engine::create(options, {&wan_family()}));
    const ModelSource source{"m", (golden::fixtures() / "wan/two/model").string()};
    auto model = unwrap(engine->load_model(source));
    for (const int frames : {1, 9, 25}) {
      for (const double guidance : {1.0, 3.0}) {
        if (columns > 0 && guidance > 1) continue;  // a CPU keeps the blocks' workspace for the next request
        SCOPED_TRACE(std::string(dtype) + ' ' + std::to_string(frames));
        GenerationRequest request;
        request.prompt = "a red circle " + std::to_string(frames);
        request.fields.set("width", 384);
        request.fields.set("height", 256);
        request.fields.set("frames", frames);
        request.fields.set("num_inference_steps", 4);
        request.fields.set("guidance_scale", guidance);
        if (columns > 0) request.loras = {{wide_adapter(columns)}};
        auto generation = unwrap(model->encode(request));
        const std::int64_t before = memory_use(kCpu).now;
        reset_memory_peak(kCpu);
        unwrap(model->denoise(*generation, nullptr));
        const auto observed = static_cast<double>(memory_use(kCpu).peak - before),
                   predicted = static_cast<double>(unwrap(engine->plan(source, request)).needs.denoise);
        EXPECT_NEAR(predicted, observed, 0.1 * observed + (1 << 20));
      }
    }
  }
  limit_memory(kCpu, 0);
}

// Of videos too: what columns for adapters add to the weights is what the plan adds.
TEST(Prediction, CountsColumnsForAdapters) {
  for (const char* format : {"", "nf4"}) {
    const ModelSource source{.name = "m",
                             .dir = (golden::fixtures() / "wan/two/model").string(),
                             .quantize = *format ? std::map<std::string, std::string>{{"transformer", format}}
                                                 : std::map<std::string, std::string>()};
    std::vector<std::int64_t> predicted, observed;
    for (const int columns : {16, 96}) {
      EngineOptions options = golden::test_options("fp32", 1);
      options.device = "cpu";
      options.compile = {.backend = "cpu_jit"};
      options.lora_slots = 1;
      options.max_lora_rank = 16;
      options.lora_together_rank = columns;
      auto engine = unwrap(Engine::create(options, {&wan_family()}));
      const std::int64_t before = memory_use(kCpu).now;
      const auto model = unwrap(engine->load_model(source));
      observed.push_back(memory_use(kCpu).now - before);
      GenerationRequest request;
      request.fields.set("width", 64);
      request.fields.set("height", 64);
      request.fields.set("frames", 5);
      const MemoryNeeds needs = unwrap(engine->plan(source, request)).needs;
      predicted.push_back(needs.fixed + needs.blocks.bytes + needs.other_blocks);
    }
    EXPECT_GT(observed[1] - observed[0], 100'000);
    EXPECT_EQ(predicted[1] - predicted[0], observed[1] - observed[0]);
  }
}

TEST(PlanChoice, OneTransformerAtATimeBeforeBlocksAreCopied) {
  MemoryNeeds needs;
  needs.text = {100, 10};
  needs.blocks = {400, 10};
  needs.other_blocks = 400;
  needs.fixed = 20;
  needs.encode = 5;
  needs.denoise = 50;
  needs.decode = 90;
  const auto plan = [&](std::int64_t available, const char* offload = "auto") {
    const PlanChoice choice = choose_plan(needs, available, offload);
    return choice.plan ? std::string(name_of(choice.plan->kind)) + ' ' + std::to_string(choice.plan->keep_blocks)
                       : "none";
  };
  EXPECT_EQ(plan(1015), "resident 400");
  EXPECT_EQ(plan(1014), "model 400");
  EXPECT_EQ(plan(925), "model 400");
  EXPECT_EQ(plan(924), "expert 400");
  EXPECT_EQ(plan(485), "expert 400");
  EXPECT_EQ(plan(485, "model"), "expert 400");
  EXPECT_EQ(plan(484, "model"), "none");
  EXPECT_EQ(plan(484), "block 389");
  const MemoryPlan expert = *choose_plan(needs, 485, "auto").plan;
  EXPECT_EQ(blocks_beside_decode(needs, expert, 485), 360);
  EXPECT_EQ(plan(125), "block 30");
  EXPECT_EQ(plan(124), "none");
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

class DemoModels : public ::testing::Test {
 protected:
  // An engine whose tensors may take `limit` bytes.
  std::unique_ptr<Engine> open(std::int64_t limit) {
    EngineOptions options = golden::test_options("fp32", 1);
    options.memory.limit = limit > 0 ? memory_use(kCpu).now + limit : 0;
    return unwrap(Engine::create(options, {&flux_family()}));
  }
  std::pair<std::vector<Media>, std::int64_t> expected(const std::vector<GenerationRequest>& requests);
  static std::unique_ptr<Model> load(Engine& engine, const std::string& name) {
    return unwrap(engine.load_model({name, source_path("deploy/demo-model/model")}));
  }
  ~DemoModels() override { limit_memory(kCpu, 0); }
};

// The picture of each request, and the bytes of the weights.
std::pair<std::vector<Media>, std::int64_t> DemoModels::expected(const std::vector<GenerationRequest>& requests) {
  const auto engine = open(0);
  const auto model = load(*engine, "reference");
  std::vector<Media> pictures;
  for (const auto& request : requests) pictures.push_back(unwrap(golden::draw(*model, request)));
  return {std::move(pictures), model->info().weight_bytes};
}

TEST_F(DemoModels, TwoThatDoNotFitTogetherTakeTurns) {
  std::mt19937 random(2);
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 40; ++i) requests.push_back(demo_request(i, 64 << random() % 2));
  const auto [pictures, bytes] = expected(requests);
  const auto engine = open(bytes * 17 / 10);
  const std::unique_ptr<Model> models[] = {load(*engine, "a"), load(*engine, "b")};
  std::int64_t switches = 0, last = -1;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const std::int64_t which = random() % 2;
    switches += which != std::exchange(last, which);
    ASSERT_TRUE(unwrap(golden::draw(*models[which], requests[i])).rgb == pictures[i].rgb) << i;
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
  EXPECT_TRUE(unwrap(golden::draw(*a, demo_request(1, 64))).rgb == pictures[0].rgb);
  EXPECT_TRUE(unwrap(golden::draw(*b, demo_request(2, 64))).rgb == pictures[1].rgb);
  EXPECT_TRUE(a->memory().resident && b->memory().resident) << "both fit beside small images";
  EXPECT_TRUE(unwrap(golden::draw(*a, demo_request(3, 256))).rgb == pictures[2].rgb);
  EXPECT_EQ(a->memory().plan, "resident");
  EXPECT_EQ(a->memory().step_downs, 0);
  EXPECT_FALSE(b->memory().resident);
}

// As the worker's threads do: adapters come and go while other requests run whose blocks are copied.
TEST_F(DemoModels, AdaptersAreForgottenWhileBlocksMove) {
  EngineOptions options = golden::test_options("fp32", 1);
  options.memory.offload = "block";
  options.lora_slots = 1;
  options.max_lora_rank = 16;
  const auto engine = unwrap(Engine::create(options, {&flux_family()}));
  const auto model = load(*engine, "a");
  std::string file;
  for (const auto& entry : std::filesystem::directory_iterator(source_path("deploy/demo-model/loras")))
    if (entry.path().extension() == ".safetensors") file = entry.path().string();
  const Media plain = unwrap(golden::draw(*model, demo_request(1, 64)));
  auto adapted = demo_request(1, 64);
  adapted.loras = {{file, 1.0, "style"}};
  const Media styled = unwrap(golden::draw(*model, adapted));
  EXPECT_FALSE(styled.rgb == plain.rgb);
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done) {
      unwrap(model->prefetch(adapted.loras));
      model->forget_adapter("style");
    }
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(unwrap(golden::draw(*model, demo_request(1, 64))).rgb == plain.rgb);
    if (i % 5 == 0) {
      EXPECT_TRUE(unwrap(golden::draw(*model, adapted)).rgb == styled.rgb);
    }
  }
  done = true;
  other.join();
}

TEST_F(DemoModels, RequestsThatAreTooLargeLeaveTheOthersAlone) {
  std::mt19937 random(3);
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 60; ++i) requests.push_back(demo_request(i, std::array{64, 96, 128, 160}[random() % 4]));
  const auto [pictures, bytes] = expected(requests);
  const auto engine = open(bytes + (64 << 20));
  const auto model = load(*engine, "a");
  for (std::size_t i = 0; i < requests.size(); ++i) {
    ASSERT_TRUE(unwrap(golden::draw(*model, requests[i])).rgb == pictures[i].rgb) << i;
    if (i % 20 != 7) continue;
    const auto picture = model->encode(demo_request(1, 1024));
    ASSERT_FALSE(picture) << "refused before any work is done for it";
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
  unwrap(golden::draw(*model, demo_request(1, 128)));
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
  const auto model = engine->load_model({"a", source_path("deploy/demo-model/model")});
  ASSERT_FALSE(model);
  EXPECT_EQ(model.error().code, Code::kOutOfMemory);
  EXPECT_THAT(model.error().message, ::testing::HasSubstr("3.0 MiB"));
}

using Formats = std::map<std::string, std::string>;

TEST_F(DemoModels, QuantizeAutoTakesWhatTheLimitRequires) {
  const std::string dir = source_path("deploy/demo-model/model");
  const auto plan = [&](std::int64_t limit, const Formats& formats) {
    auto request = demo_request(1, 16);
    request.fields.set("max_sequence_length", 1);
    request.fields.set("num_inference_steps", 1);
    return unwrap(open(limit)->plan({"a", dir, {}, formats}, request));
  };
  const Formats any{{"*", "auto"}}, fp8{{"transformer", "fp8"}, {"text_encoder_2", "nf4"}},
      nf4{{"transformer", "nf4"}, {"text_encoder_2", "nf4"}};
  EXPECT_EQ(plan(0, any).quantize, Formats());
  EXPECT_EQ(plan(std::int64_t{1} << 30, any).quantize, Formats());
  const std::int64_t enough = plan(0, fp8).choice.plan->bytes;
  EXPECT_EQ(plan(enough, any).quantize, fp8);
  EXPECT_EQ(plan(plan(0, nf4).choice.plan->bytes, any).quantize, nf4);
  const auto engine = open(enough);
  const auto model = unwrap(engine->load_model({"a", dir, {}, any}));
  EXPECT_EQ(model->info().linears.at("transformer").size(), 2U);  // fp8 and fp32
}

TEST(QuantizeAuto, TakesWhatTheLimitRequiresForVideos) {
  const auto plan = [&](std::int64_t limit, const Formats& formats) {
    EngineOptions options = golden::test_options("fp32", 1);
    options.memory.limit = limit;
    const auto engine = unwrap(Engine::create(options, {&wan_family()}));
    GenerationRequest request;
    request.fields.set("width", 16);
    request.fields.set("height", 16);
    request.fields.set("frames", 1);
    request.fields.set("max_sequence_length", 1);
    return unwrap(engine->plan({"m", (golden::fixtures() / "wan/two/model").string(), {}, formats}, request));
  };
  // The least memory with which no block has to leave the device.
  const auto least = [&](const Formats& formats) {
    for (std::int64_t bytes = plan(0, formats).choice.plan->bytes;;) {
      const auto next = plan(bytes - 1, formats).choice.plan;
      if (!next || next->kind == PlanKind::kBlock) return bytes;
      bytes = next->bytes;
    }
  };
  const Formats any{{"*", "auto"}}, fp8{{"transformer", "fp8"}, {"text_encoder", "nf4"}},
      nf4{{"transformer", "nf4"}, {"text_encoder", "nf4"}};
  EXPECT_EQ(plan(std::int64_t{1} << 33, any).quantize, Formats());
  EXPECT_EQ(plan(least(fp8), any).quantize, fp8);
  EXPECT_EQ(plan(least(nf4), any).quantize, nf4);
  limit_memory(kCpu, 0);
}

// The error of an image with a model whose proj_mlp has this number in it.
std::string error_with_weight(float value) {
  namespace fs = std::filesystem;
  const fs::path dir = fs::temp_directory_path() / ("not_finite_" + std::to_string(::getpid()));
  fs::copy(golden::fixtures() / "flux/dev/model", dir, fs::copy_options::recursive);
  const fs::path file = dir / "transformer/diffusion_pytorch_model.safetensors";
  const auto entry = *unwrap(SafetensorsFile::open(file.string())).find("single_transformer_blocks.0.proj_mlp.weight");
  {
    std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(entry.end - 4));
    out.write(reinterpret_cast<const char*>(&value), sizeof value);
  }
  const auto engine = unwrap(Engine::create(golden::test_options("fp32", 1), {&flux_family()}));
  const auto model = unwrap(engine->load_model({"a", dir.string()}));
  const auto picture = golden::draw(*model, demo_request(1, 4 * model->info().size_multiple));
  fs::remove_all(dir);
  if (picture) return "it was drawn";
  EXPECT_EQ(picture.error().code, Code::kDataCorrupt);
  return picture.error().message;
}

TEST(Containment, NamesTheWeightThatIsNotFinite) {
  EXPECT_THAT(error_with_weight(std::numeric_limits<float>::quiet_NaN()),
              ::testing::EndsWith("weight single_transformer_blocks.0.proj_mlp.weight of transformer is not finite"));
  const std::string overflow = error_with_weight(1e38F);
  EXPECT_THAT(overflow, ::testing::HasSubstr("the latents after denoising contain NaN or infinity; check the model's"));
  EXPECT_THAT(overflow, ::testing::EndsWith("all stored weights are finite"));
}

}  // namespace
}  // namespace ditfleet::pipeline
