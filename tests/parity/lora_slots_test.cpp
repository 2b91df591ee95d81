// Slots: swaps leave no trace, batches hold several adapters, and where adapters are is told as it is. Long because
// every case compares engines that one fixture makes, on adapters that it writes.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/block_diag.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/weights/safetensors.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

// DITFLEET_TEST_COMPILE names the backend; slots matter most where blocks are compiled.
Engine& engine(int slots, const region::CompileOptions& compile = golden::test_compile(),
               const std::string& dtype = "fp32", std::int64_t host_bytes = 1 << 30) {
  static std::vector<std::unique_ptr<Engine>> engines;  // outlive their models
  EngineOptions options = golden::test_options(dtype, 0);
  options.compile = compile;
  options.lora_slots = slots;
  options.lora_host_bytes = host_bytes;
  options.max_lora_rank = 16;
  engines.push_back(unwrap(Engine::create(options, {&flux_family()})));
  return *engines.back();
}
std::unique_ptr<Model> load(Engine& engine) {
  return unwrap(engine.load_model({"golden", golden::Case{"dev", "plain"}.model_dir()}));
}
std::unique_ptr<Model> load(int slots) { return load(engine(slots)); }

class LoraSlots : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("ditfleet_lora_slots_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  // Random weights for the modules of the fixture "all" whose name has `part` in it; those of B times `up`.
  LoraRequest adapter(const std::string& name, std::int64_t rank, const std::string& part = "", double scale = 1,
                      double up = 1, DType dtype = DType::kF32) {
    const auto all = fs::path(golden::Case{"dev", "plain"}.model_dir()).parent_path().parent_path().parent_path() /
                     "lora/adapters/all.safetensors";
    const auto file = unwrap(SafetensorsFile::open(all.string()));
    at::Generator generator = at::detail::createCPUGenerator(std::hash<std::string>()(name));
    std::vector<at::Tensor> values;
    std::vector<TensorToWrite> tensors;
    for (const auto& view : file.entries()) {
      if (view.name.find(part) == std::string::npos) continue;
      const bool down = view.name.find("lora_A") != std::string::npos;
      std::vector<std::int64_t> shape = view.shape;
      shape[down ? 0 : 1] = rank;
      const at::Tensor value = at::randn(shape, generator) * 0.2;
      values.push_back(dtype == DType::kF64 ? value.to(at::kDouble) : value);
      if (!down) values.back().mul_(up);
      tensors.push_back({view.name,
                         dtype,
                         shape,
                         {static_cast<const std::byte*>(values.back().const_data_ptr()), values.back().nbytes()}});
    }
    EXPECT_FALSE(tensors.empty()) << part;
    const std::string path = folder_ / (name + ".safetensors");
    unwrap(write_safetensors(path, std::move(tensors), {}));
    return {path, scale, name};
  }

  static GenerationRequest request(const std::vector<LoraRequest>& loras, std::int64_t seed = 3) {
    GenerationRequest r;
    r.prompt = "a red circle";
    r.fields.set("width", 64);
    r.fields.set("height", 64);
    r.fields.set("num_inference_steps", 2);
    r.fields.set("max_sequence_length", 16);
    r.seed = seed;
    r.loras = loras;
    return r;
  }
  static Media draw(Model& model, const std::vector<LoraRequest>& loras) {
    auto prepared = unwrap(model.encode(request(loras)));
    unwrap(model.denoise(*prepared, nullptr));
    return unwrap(model.decode(*prepared));
  }
  at::Tensor latents(Generation& prepared) {
    const std::string path = folder_ / "dump.safetensors";
    unwrap(prepared.dump(path));
    return golden::read_tensor(path, "latents");
  }

  fs::path folder_;
};

TEST_F(LoraSlots, SwapsLeaveNoTrace) {
  const std::vector<std::pair<LoraRequest, LoraRequest>> sequences = {
      {adapter("a7", 7), adapter("b13", 13)},
      {adapter("a13", 13), adapter("b7", 7)},
      {adapter("a11", 11), adapter("b11", 11)},
      {adapter("few", 9, "attn.to_q"), adapter("many", 5)},
      {adapter("all", 16), adapter("fewer", 3, "ff")}};
  for (const int slots : {1, 2}) {
    auto model = load(slots);
    const Media plain = draw(*model, {});
    for (const auto& [first, second] : sequences) {
      const Media one = draw(*model, {first}), two = draw(*model, {second});
      auto fresh = load(slots);
      EXPECT_TRUE(two.rgb == draw(*fresh, {second}).rgb) << first.id << ", " << second.id;
      EXPECT_TRUE(one.rgb == draw(*fresh, {first}).rgb) << second.id << ", " << first.id;
      EXPECT_FALSE(one.rgb == two.rgb);
      EXPECT_TRUE(plain.rgb == draw(*model, {}).rgb);
    }
  }
}

// At every linear, at the largest rank, where no size is a multiple of what matrices are aligned to.
TEST_F(LoraSlots, TheLargestAdapterFitsIntoASlotInEveryNaming) {
  const auto adapters =
      fs::path(golden::Case{"dev", "plain"}.model_dir()).parent_path().parent_path().parent_path() / "lora/adapters";
  std::vector<at::Tensor> values;
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, prefix] : std::vector<std::pair<std::string, std::string>>{
           {"all", "transformer."}, {"clip", "text_encoder."}, {"t5", "text_encoder_2."}}) {
    const auto file = unwrap(SafetensorsFile::open((adapters / (name + ".safetensors")).string()));
    for (const auto& view : file.entries()) {
      if (!view.name.starts_with(prefix)) continue;
      std::vector<std::int64_t> shape = view.shape;
      shape[view.name.find("lora_A") == std::string::npos ? 1 : 0] = 1;
      std::string bfl = view.name;
      if (const std::string last = "transformer.norm_out.linear"; bfl.starts_with(last))
        bfl.replace(0, last.size(), "diffusion_model.final_layer.adaLN_modulation.1");
      values.push_back(at::full(shape, 0.01, at::kFloat));
      tensors.push_back({bfl,
                         DType::kF32,
                         shape,
                         {static_cast<const std::byte*>(values.back().const_data_ptr()), values.back().nbytes()}});
    }
  }
  const std::string path = folder_ / "largest.safetensors";
  unwrap(write_safetensors(path, std::move(tensors), {}));
  EngineOptions options = golden::test_options("fp32", 0);
  options.lora_slots = options.max_lora_rank = 1;
  const auto engine = unwrap(Engine::create(options, {&flux_family()}));
  const auto prepared = load(*engine)->encode(request({{path, 1, "largest"}}));
  EXPECT_TRUE(prepared) << prepared.error().message;
}

// As kohya's trainer writes linears that it split: their A stacked, their B on the diagonal.
TEST_F(LoraSlots, ABlockDiagonalAdapterIsThatOfItsLinears) {
  const LoraRequest apart = adapter("apart", 16, "attn.to_"), mlp = adapter("mlp", 16, "proj_mlp");
  const std::vector<std::pair<std::string, std::vector<std::string>>> fused = {
      {"double_blocks.1.img_attn.qkv",
       {"transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_k", "transformer_blocks.1.attn.to_v"}},
      {"single_blocks.0.linear1",
       {"single_transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.attn.to_k",
        "single_transformer_blocks.0.attn.to_v", "single_transformer_blocks.0.proj_mlp"}}};
  std::vector<at::Tensor> values;
  std::vector<TensorToWrite> whole, parts;
  const auto write = [&](std::vector<TensorToWrite>& out, const std::string& name, const at::Tensor& value) {
    values.push_back(value.contiguous());
    out.push_back({name,
                   DType::kF32,
                   value.sizes().vec(),
                   {static_cast<const std::byte*>(values.back().const_data_ptr()), values.back().nbytes()}});
  };
  for (const auto& [bfl, linears] : fused) {
    std::vector<at::Tensor> down, up;
    for (const std::string& linear : linears) {
      const std::string file = linear.ends_with("mlp") ? mlp.path : apart.path, name = "transformer." + linear;
      write(parts, name + ".lora_A.weight", down.emplace_back(golden::read_tensor(file, name + ".lora_A.weight")));
      write(parts, name + ".lora_B.weight", up.emplace_back(golden::read_tensor(file, name + ".lora_B.weight")));
    }
    write(whole, bfl + ".lora_A.weight", at::cat(down));
    write(whole, bfl + ".lora_B.weight", at::block_diag(up));
  }
  const std::string one = folder_ / "whole.safetensors", many = folder_ / "parts.safetensors";
  unwrap(write_safetensors(one, std::move(whole), {}));
  unwrap(write_safetensors(many, std::move(parts), {}));
  auto model = load(1);  // of rank 16: 48 and 64 have no room
  const Media picture = draw(*model, {{one, 1, "whole"}}), same = draw(*model, {{many, 1, "parts"}}),
              plain = draw(*model, {});
  int most = 0, most_to_plain = 0;  // terms are added up in the order of their names, which differs
  for (std::size_t i = 0; i < picture.rgb.size(); ++i) {
    most = std::max(most, std::abs(picture.rgb[i] - same.rgb[i]));
    most_to_plain = std::max(most_to_plain, std::abs(picture.rgb[i] - plain.rgb[i]));
  }
  EXPECT_LE(most, 1);
  EXPECT_GT(most_to_plain, 10);
}

// Columns that are there for the rounding of ranks hold what was before: times zero that must be nothing.
TEST_F(LoraSlots, AHugeAdapterLeavesNoTrace) {
  const LoraRequest small = adapter("small", 3), huge = adapter("huge", 16, "", 1, 3e38),
                    beyond = adapter("beyond", 16, "", 1, 1e39, DType::kF64);
  const Media alone = draw(*load(1), {small});
  auto model = load(1);
  auto own = unwrap(model->encode(request({huge})));
  unwrap(model->denoise(*own, nullptr));
  EXPECT_FALSE(model->decode(*own));  // its own picture is lost
  own.reset();
  EXPECT_TRUE(draw(*model, {small}).rgb == alone.rgb);
  const auto refused = model->encode(request({beyond}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_EQ(refused.error().param, "loras");
  EXPECT_THAT(refused.error().message,
              ::testing::ContainsRegex("lora_B.weight has values that overflow F32, the model's type"));
  EXPECT_TRUE(draw(*model, {small}).rgb == alone.rgb);
}

TEST_F(LoraSlots, RefusesWhatIsInfiniteInTheModelsType) {
  auto model = load(engine(1, golden::test_compile(), "bf16"));
  const LoraRequest most = adapter("most", 2, "", 1, 1e38), like = adapter("like", 2);
  EXPECT_TRUE(model->prefetch({most}));
  // Below the largest of F32, and nearer to infinity than to the largest of BF16.
  const at::Tensor values = at::full({2 * 64}, 3.4e38, at::kFloat);
  const auto file = unwrap(SafetensorsFile::open(like.path));
  std::vector<TensorToWrite> tensors;
  std::vector<TensorView> views;  // own the bytes
  for (const auto& entry : file.entries()) {
    const auto view = views.emplace_back(unwrap(file.view(entry)));
    tensors.push_back({entry.name, view.dtype, entry.shape, view.bytes});
    if (tensors.size() == 2)
      tensors.back().bytes = {static_cast<const std::byte*>(values.const_data_ptr()), view.bytes.size()};
  }
  unwrap(write_safetensors(folder_ / "spoilt.safetensors", std::move(tensors), {}));
  const auto refused = model->prefetch({{folder_ / "spoilt.safetensors", 1, "spoilt"}});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, ::testing::HasSubstr("has values that overflow BF16"));
  EXPECT_THAT(model->adapters().in_host, ElementsAre("most"));
}

TEST_F(LoraSlots, MoreThanTheColumnsHoldRunsEagerly) {
  if (golden::test_compile().backend == "eager") GTEST_SKIP() << "eager blocks reserve no columns";
  auto lenient = golden::test_compile(), strict = lenient;
  lenient.fullgraph = false;
  strict.fullgraph = true;
  Engine& compiled = engine(4, lenient);
  auto model = load(compiled), plain = load(engine(4, {}));
  const LoraRequest one = adapter("wide", 16, "", 0.7), two = adapter("wide too", 16, "", -0.3);
  const auto denoised = [&](Model& by, const std::vector<LoraRequest>& loras) {
    auto prepared = unwrap(by.encode(request(loras)));
    unwrap(by.denoise(*prepared, nullptr));
    return latents(*prepared);
  };
  denoised(*model, {one});
  denoised(*model, {two});
  EXPECT_EQ(compiled.region_counts().fallbacks, 0u);
  EXPECT_LE(golden::distance(denoised(*model, {one, two}), denoised(*plain, {one, two})), 2e-5);
  EXPECT_EQ(compiled.region_counts().fallback_reasons["adapters"], 1u);

  const auto refused = load(engine(4, strict))->encode(request({one, two}));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().param, "compile.fullgraph");
  EXPECT_NE(refused.error().message.find("(combined) change one matrix, which has columns for"), std::string::npos)
      << refused.error().message;
}

// As many as there are slots, each of the largest rank, if so much room is asked for: still one compiled program.
TEST_F(LoraSlots, AdaptersOfTheLargestRankAreUsedTogetherWhereTheirRanksHaveRoom) {
  const LoraRequest one = adapter("wide", 16, "", 0.5), two = adapter("wide too", 16, "", -0.3),
                    three = adapter("wide, three", 16, "", 0.2);
  EngineOptions options = golden::test_options("fp32", 0);
  options.lora_slots = 3;
  options.max_lora_rank = 16;
  options.lora_together_rank = 48;
  options.compile.fullgraph = options.compile.backend != "eager";
  const auto roomy = unwrap(Engine::create(options, {&flux_family()}));
  auto model = load(*roomy), plain = load(engine(3, {}));
  const auto denoised = [&](Model& by) {
    auto prepared = unwrap(by.encode(request({one, two, three})));
    unwrap(by.denoise(*prepared, nullptr));
    return latents(*prepared);
  };
  EXPECT_LE(golden::distance(denoised(*model), denoised(*plain)), 2e-5);
  EXPECT_EQ(roomy->region_counts().fallbacks, 0u);
  const auto wider = model->encode(request({adapter("wider", 40)}));  // slots are no larger by it
  ASSERT_FALSE(wider);
  EXPECT_NE(wider.error().message.find("raise worker.lora.max_rank, which is 16"), std::string::npos)
      << wider.error().message;
}

// There a picture is diffusers' own to the bit, which sums in another order would not be.
TEST_F(LoraSlots, AutoInBf16OnACpuIsEager) {
  if (golden::test_device() != "cpu") GTEST_SKIP() << "of a CPU";
  Engine& chosen = engine(2, {.backend = "auto"}, "bf16");
  EXPECT_EQ(chosen.compile_backend(), "eager");
  auto model = load(chosen), plain = load(engine(2, {}, "bf16"));
  const LoraRequest all = adapter("all", 16, "", 0.7), few = adapter("few", 5, "attn", -0.3);
  for (const auto& loras : {std::vector<LoraRequest>{}, {all}, {all, few}})
    EXPECT_TRUE(draw(*model, loras).rgb == draw(*plain, loras).rgb) << loras.size();
  EXPECT_NE(engine(2, {.backend = "auto", .fullgraph = true}, "bf16").compile_backend(), "eager");
}

TEST_F(LoraSlots, TellsWhereAdaptersAre) {
  auto model = load(2);
  EXPECT_EQ(model->adapters().slots, 2);
  EXPECT_THAT(model->adapters().in_slots, IsEmpty());
  const LoraRequest x = adapter("x", 2), y = adapter("y", 2), z = adapter("z", 2);
  unwrap(model->prefetch({x, y}));
  EXPECT_THAT(model->adapters().in_slots, ElementsAre("y", "x"));
  EXPECT_THAT(model->adapters().in_host, ElementsAre("y", "x"));
  EXPECT_GT(model->adapters().load_bytes_per_s, 0);
  EXPECT_GT(model->adapters().swap_us, 0);
  unwrap(model->prefetch({z}, {.from_slots = {"y"}}));  // the least recently used is x, but y is to go first
  EXPECT_THAT(model->adapters().in_slots, ElementsAre("z", "x"));
  EXPECT_THAT(model->adapters().in_host, ElementsAre("z", "y", "x"));
  // Those in use stay, whoever else wants a slot; who finds none gets memory of its own.
  auto first = unwrap(model->encode(request({x}))), second = unwrap(model->encode(request({z})));
  unwrap(model->prefetch({y}));
  EXPECT_THAT(model->adapters().in_slots, UnorderedElementsAre("x", "z"));
  auto third = unwrap(model->encode(request({y})));
  for (auto* one : {third.get(), second.get(), first.get()}) unwrap(model->denoise(*one, nullptr));
  EXPECT_EQ(unwrap(model->decode(*third)).rgb, draw(*load(2), {y}).rgb);
  first.reset();
  model->forget_adapter("x");
  model->forget_adapter("z");  // in use: it goes when that ends
  EXPECT_THAT(model->adapters().in_slots, IsEmpty());
  EXPECT_THAT(model->adapters().in_host, ElementsAre("y"));
  EXPECT_EQ(unwrap(model->decode(*second)).rgb, draw(*load(2), {z}).rgb);
}

// Host memory for as many of rank 2, and one slot.
TEST_F(LoraSlots, HostMemoryKeepsWhatIsPinnedAndDropsWhatItIsTold) {
  const std::vector<LoraRequest> all = {adapter("a", 2), adapter("b", 2), adapter("c", 2), adapter("d", 2)};
  const auto& [a, b, c, d] = std::tie(all[0], all[1], all[2], all[3]);
  const auto room_for = [](double adapters) {  // 35 kB each, as packed in fp32
    return load(engine(1, {}, "fp32", static_cast<std::int64_t>(adapters * 35'000)));
  };
  auto model = room_for(2.5);
  for (const auto& one : all) draw(*model, {one});
  EXPECT_THAT(model->adapters().in_host, ElementsAre("d", "c")) << "the least recently used went";

  model = room_for(2.5);
  model->pin_adapters({"a"});
  for (const auto& one : all) draw(*model, {one});
  EXPECT_THAT(model->adapters().in_host, ElementsAre("d", "a"));
  EXPECT_THAT(model->adapters().in_slots, ElementsAre("d")) << "its slot goes where no other is to be had";
  // With nothing else to go the newcomer is not kept.
  model->pin_adapters({"a", "d"});
  draw(*model, {b});
  EXPECT_THAT(model->adapters().in_host, ElementsAre("d", "a"));
  EXPECT_THAT(model->adapters().in_slots, ElementsAre("b"));
  model->pin_adapters({});
  draw(*model, {c});
  EXPECT_THAT(model->adapters().in_host, ElementsAre("c", "d"));

  // What the scheduler names goes first, but not before it must.
  model = room_for(3.5);
  unwrap(model->prefetch({a, b}));
  unwrap(model->prefetch({c}, {.from_host = {"b"}}));
  EXPECT_THAT(model->adapters().in_host, ElementsAre("c", "b", "a"));
  unwrap(model->prefetch({d}, {.from_host = {"c", "b"}}));
  EXPECT_THAT(model->adapters().in_host, ElementsAre("d", "b", "a"));

  // One that is too large itself drives nobody out.
  unwrap(model->prefetch({adapter("large", 16)}, {.from_host = {"a", "b"}}));
  EXPECT_THAT(model->adapters().in_host, ElementsAre("d", "b", "a"));
  EXPECT_THAT(model->adapters().in_slots, ElementsAre("large"));
}

}  // namespace
}  // namespace ditfleet::pipeline
