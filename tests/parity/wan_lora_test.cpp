// Videos with adapters on one or both transformers, compared with those of diffusers with PEFT:
// tests/fixtures/wan/make_lora.py. DITFLEET_TEST_DEVICE=cuda runs the same on a GPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "pipeline/device/failure.h"
#include "pipeline/engine/adapt.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/region/compile/cached.h"
#include "pipeline/weights/safetensors.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using job::Expert;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

golden::Golden golden_of(const std::string& name) {
  golden::Golden golden = golden::load({"lora", name, "wan"});
  if (name == "four") {  // as the preset of a distilled model
    golden.request.fields.set("sampler", std::string("euler"));
    golden.request.fields.set("sigmas", std::string("1, 0.75,0.5, 0.25"));
    golden.request.fields.set("flow_shift", 5.0);
  }
  return golden;
}

std::string adapter(const std::string& name) {
  return (golden::fixtures() / "wan/lora/adapters" / (name + ".safetensors")).string();
}

// A copy of the file under other names for its tensors.
std::string renamed(const std::string& path, const std::string& copy,
                    const std::function<std::string(std::string)>& name) {
  const auto file = unwrap(SafetensorsFile::open(path));
  std::vector<TensorView> views;
  for (const auto& entry : file.entries()) views.push_back(unwrap(file.view(entry)));
  std::vector<TensorToWrite> tensors;
  for (const TensorView& view : views)
    tensors.push_back({name(std::string(view.name)), view.dtype, {view.shape.begin(), view.shape.end()}, view.bytes});
  const std::string made = ::testing::TempDir() + copy + ".safetensors";
  unwrap(write_safetensors(made, tensors));
  return made;
}

class WanLora : public ::testing::Test {
 protected:
  static void TearDownTestSuite() { models_.clear(); }  // while CUDA is loaded
  static Model& model(bool bf16 = false, const char* folder = "two") {
    auto& [engine, model] = models_[{bf16, folder}];
    if (!engine) {
      EngineOptions options = golden::test_options(bf16 ? "bf16" : "fp32", 1);
      options.max_lora_rank = 64;  // of the head's difference
      options.lora_slots = 4;
      engine = unwrap(Engine::create(options, {&wan_family()}));
      model = unwrap(engine->load_model({"wan", golden::Case{folder, "", "wan"}.model_dir()}));
    }
    return *model;
  }

  inline static std::map<std::pair<bool, std::string>, std::pair<std::unique_ptr<Engine>, std::unique_ptr<Model>>>
      models_;

  struct Drawn {
    Media video;
    at::Tensor latents, timesteps;
    std::vector<std::string> warnings;
  };
  static Drawn draw(const GenerationRequest& request, bool bf16 = false, const char* folder = "two") {
    Model& of = model(bf16, folder);
    auto generation = unwrap(of.encode(request));
    unwrap(of.denoise(*generation, nullptr));
    const Media video = unwrap(of.decode(*generation));
    const std::string dump = ::testing::TempDir() + "wan_lora.safetensors";
    unwrap(generation->dump(dump));
    return {video, golden::read_tensor(dump, "latents"), golden::read_tensor(dump, "timesteps"),
            generation->warnings()};
  }

  static std::string refusal(const GenerationRequest& request, const char* folder = "two") {
    const auto encoded = model(false, folder).encode(request);
    EXPECT_FALSE(encoded);
    return encoded ? std::string() : encoded.error().param + ": " + encoded.error().message;
  }
};

class WanLoraVideo : public WanLora, public ::testing::WithParamInterface<const char*> {};

// Within the limits of fp32 (README.md), or 1.5 times what diffusers' bf16 is from its fp32.
void expect_video(const Media& video, const at::Tensor& latents, const golden::Golden& golden,
                  const std::string& name) {
  if (!golden.bf16) {
    EXPECT_LE(golden::distance(latents, golden.tensor("latents")), 2e-4);
  }
  const at::Tensor want = golden.tensor("pixels");
  ASSERT_EQ(static_cast<std::size_t>(want.numel()), video.rgb.size());
  double sum = 0;
  int largest = 0;
  for (std::size_t i = 0; i < video.rgb.size(); ++i) {
    const int apart = std::abs(int{video.rgb[i]} - int{want.const_data_ptr<std::uint8_t>()[i]});
    sum += apart;
    largest = std::max(largest, apart);
  }
  const double mean = sum / static_cast<double>(video.rgb.size());
  std::printf("%s: largest %d, mean %.5f of 255\n", name.c_str(), largest, mean);
  EXPECT_LE(largest, golden.bf16 ? 1.5 * golden.largest_apart : 1);
  EXPECT_LE(mean, golden.bf16 ? 1.5 * golden.mean_apart : 0.006);
}

TEST_P(WanLoraVideo, IsWhatDiffusersDraws) {
  const golden::Golden golden = golden_of(GetParam());
  const bool of_image = GetParam() == std::string("image");
  const Drawn drawn = draw(golden.request, golden.bf16, of_image ? "clip" : "two");
  EXPECT_LE(golden::distance(drawn.timesteps, golden.tensor("timesteps")), 1e-6);
  expect_video(drawn.video, drawn.latents, golden, GetParam());
}
INSTANTIATE_TEST_SUITE_P(Cases, WanLoraVideo,
                         ::testing::Values("high", "low", "both", "pair", "bias", "bf16", "four", "image"),
                         [](const auto& info) { return std::string(info.param); });

class WanLoraLayout : public WanLora, public ::testing::WithParamInterface<golden::Layout> {};

TEST_P(WanLoraLayout, DrawsWhatDiffusersDraws) {
  const golden::Layout& layout = GetParam();
  golden::Golden golden = golden::load(layout.picture);
  golden.request.loras = {{.path = layout.path}};
  const Drawn drawn = draw(golden.request);
  expect_video(drawn.video, drawn.latents, golden, layout.picture.name + " " + layout.name);
  golden::expect_left_out(drawn.warnings, layout);
}
INSTANTIATE_TEST_SUITE_P(Wan, WanLoraLayout, ::testing::ValuesIn(golden::all_layouts("wan")),
                         [](const auto& info) { return info.param.picture.name + "_" + info.param.name; });

TEST_F(WanLora, TwoAdaptersOnOneExpertEachAreOneOnBoth) {
  GenerationRequest request = golden_of("low").request;
  request.loras = {{.path = adapter("original")}};
  const at::Tensor both = draw(request).latents;
  request.loras = {{.path = adapter("original"), .expert = Expert::kLow},
                   {.path = adapter("original"), .expert = Expert::kHigh}};
  EXPECT_TRUE(at::equal(draw(request).latents, both));
  request.loras.pop_back();
  EXPECT_GT(golden::distance(draw(request).latents, both), 0.01);
  request.loras[0].scale = 0;
  const at::Tensor none = draw(request).latents;
  request.loras.clear();
  EXPECT_TRUE(at::equal(draw(request).latents, none));
}

// At a rank that is no multiple of what columns are rounded up to.
TEST_F(WanLora, MoreThanTheColumnsHoldRunsEagerly) {
  GenerationRequest request = golden_of("high").request;
  const auto latents = [&](Engine& engine) {
    auto model = unwrap(engine.load_model({"wan", golden::Case{"two", "", "wan"}.model_dir()}));
    auto generation = unwrap(model->encode(request));
    unwrap(model->denoise(*generation, nullptr));
    const std::string dump = ::testing::TempDir() + "wan_lora_columns.safetensors";
    unwrap(generation->dump(dump));
    return golden::read_tensor(dump, "latents");
  };
  EngineOptions options{"cpu", "fp32", 1, {.backend = "cpu_jit"}};
  options.lora_slots = 2;
  options.max_lora_rank = 4;
  const auto engine = unwrap(Engine::create(options, {&wan_family()}));
  options.compile = {};
  const auto eager = unwrap(Engine::create(options, {&wan_family()}));
  const LoraRequest one{.path = adapter("peft"), .scale = 0.5, .expert = Expert::kHigh};
  for (const std::vector<LoraRequest>& loras : {std::vector{one}, {one, one}}) {
    request.loras = loras;
    const at::Tensor want = latents(*eager);
    EXPECT_LE(golden::distance(latents(*engine), want), 2e-5) << loras.size();
    EXPECT_EQ(engine->region_counts().fallback_reasons["adapters"], loras.size() - 1);
  }
  EXPECT_EQ(engine->region_counts().fallbacks, 1u);
}

TEST_F(WanLora, ProgramsCompiledAheadServeRequestsWithAdapters) {
  for (const char* format : {"", "fp8", "nf4"}) {
    const ModelSource source{.name = "wan",
                             .dir = golden::Case{"two", "", "wan"}.model_dir(),
                             .quantize = *format ? std::map<std::string, std::string>{{"transformer", format}}
                                                 : std::map<std::string, std::string>()};
    EngineOptions options{"cpu", "fp32", 1, {.backend = "cpu_jit", .fullgraph = true}};
    options.lora_slots = 2;
    options.max_lora_rank = 64;
    options.kernel_cache = region::make_memory_cache();
    unwrap(Engine::compile_regions({&wan_family()}, source, "fp32", {"cpu"}, *options.kernel_cache, options.compile));
    const auto engine = unwrap(Engine::create(options, {&wan_family()}));
    auto model = unwrap(engine->load_model(source));
    auto generation = unwrap(model->encode(golden_of("both").request));
    unwrap(model->denoise(*generation, nullptr));
    EXPECT_GE(engine->region_counts().compiles, 2u) << format;
    EXPECT_EQ(engine->region_counts().built, 0u) << format;
  }
}

TEST_F(WanLora, OtherSpellingsDrawTheSame) {
  GenerationRequest request = golden_of("low").request;
  const at::Tensor expected = draw(request).latents;
  const auto with = [&](const char* copy, const std::function<std::string(std::string)>& name) {
    request.loras.at(0).path = renamed(adapter("original"), copy, name);
    EXPECT_TRUE(at::equal(draw(request).latents, expected)) << copy;
  };
  const auto replaced = [](std::string text, const std::string& from, const std::string& to) {
    if (const auto at = text.find(from); at != text.npos) text.replace(at, from.size(), to);
    return text;
  };
  with("no_prefix", [&](std::string name) { return replaced(name, "diffusion_model.", ""); });
  with("peft_suffixes", [&](std::string name) {
    for (const auto& [from, to] :
         {std::pair(".lora_down.weight", ".lora_A.weight"), std::pair(".lora_up.weight", ".lora_B.style.weight")})
      name = replaced(name, from, to);
    return name;
  });
  with("kohya", [](std::string name) {
    name = name.substr(std::string("diffusion_model.").size());
    // A suffix begins at the last dot, or at the one before ".weight".
    auto dot = name.rfind('.');
    if (name.ends_with(".weight")) dot = name.rfind('.', dot - 1);
    std::replace(name.begin(), name.begin() + static_cast<std::ptrdiff_t>(dot), '.', '_');
    return "lora_unet_" + name;
  });
}

TEST_F(WanLora, ListsWhatItLeavesOut) {
  GenerationRequest request = golden_of("low").request;
  EXPECT_THAT(draw(request).warnings,
              ElementsAre(AllOf(HasSubstr("adapter original.safetensors: left out 5 tensors: "),
                                HasSubstr("blocks.0.self_attn.norm_q.diff"), HasSubstr("blocks.0.self_attn.q.diff,"),
                                HasSubstr("blocks.1.norm3.diff_b"), HasSubstr("patch_embedding.diff_b"))));
  request.loras.at(0) = {.path = adapter("bias_only"), .name = "ink"};
  EXPECT_THAT(draw(request).warnings,
              ElementsAre("adapter ink: left out 1 tensor: diffusion_model.time_projection.1.diff_b"));
}

// As PEFT and ComfyUI do with blocks, image layers and names that a model does not have.
TEST_F(WanLora, LeavesOutWhatTheModelLacks) {
  GenerationRequest request = golden_of("low").request;
  const auto with = [&](const char* copy, const std::string& from, const std::string& to) {
    request.loras.at(0).path = renamed(adapter("original"), copy, [&](std::string name) {
      if (const auto at = name.find(from); at != name.npos) name.replace(at, from.size(), to);
      return name;
    });
    return draw(request).warnings;
  };
  EXPECT_THAT(with("block", "blocks.1.", "blocks.2."), ElementsAre(HasSubstr("blocks.2.cross_attn")));
  EXPECT_THAT(with("image", "blocks.1.cross_attn.k.lora", "blocks.1.cross_attn.k_img.lora"),
              ElementsAre(HasSubstr("blocks.1.cross_attn.k_img.lora_down.weight")));
  EXPECT_THAT(with("typo", "self_attn.q.lora", "self_attn.query.lora"),
              ElementsAre(HasSubstr("diffusion_model.blocks.0.self_attn.query.lora_down.weight")));
  EXPECT_THAT(with("modulation", "blocks.0.self_attn.norm_q.diff", "blocks.0.diff_m"),
              ElementsAre(HasSubstr("diffusion_model.blocks.0.diff_m")));
}

TEST_F(WanLora, WarnsOfAnAdapterForTheOtherExpert) {
  EXPECT_EQ(expert_in_name("wan2.2_t2v_A14b_high_noise_lora_rank64"), Expert::kHigh);
  EXPECT_EQ(expert_in_name("Style-LowNoise.safetensors"), Expert::kLow);
  for (const char* name : {"slow flow", "highlights", "high_and_low", "lowpoly", "", "style"})
    EXPECT_EQ(expert_in_name(name), Expert::kBoth) << name;
  GenerationRequest request = golden_of("high").request;
  const auto warnings = [&](const char* name, Expert expert) {
    request.loras.at(0).name = name;
    request.loras.at(0).expert = expert;
    return unwrap(model().encode(request))->warnings();
  };
  EXPECT_THAT(warnings("ink high_noise", Expert::kLow),
              ElementsAre("adapter ink high_noise seems to be for the expert high, but is used for low"));
  EXPECT_THAT(warnings("ink low_noise", Expert::kBoth), ElementsAre(HasSubstr("expert low, but is used for both")));
  EXPECT_THAT(warnings("ink low_noise", Expert::kLow), IsEmpty());
  EXPECT_THAT(warnings("ink", Expert::kHigh), IsEmpty());
}

TEST_F(WanLora, RefusesWhatItCannotApply) {
  GenerationRequest request = golden::load({"one", "plain", "wan"}).request;
  request.loras = {{.path = adapter("peft"), .expert = Expert::kHigh}};
  EXPECT_THAT(refusal(request, "one"), AllOf(HasSubstr("loras: loras gives"), HasSubstr("peft.safetensors the expert"),
                                             HasSubstr("high, but this model has one transformer")));
  request.loras.at(0).expert = Expert::kBoth;
  EXPECT_THAT(refusal(request, "one"), HasSubstr("the adapter is for another base model"));
  const auto with = [&](const char* copy, const std::string& from, const std::string& to) {
    request.loras.at(0).path = renamed(adapter("original"), copy, [&](std::string name) {
      if (const auto at = name.find(from); at != name.npos) name.replace(at, from.size(), to);
      return name;
    });
    return refusal(request);
  };
  EXPECT_THAT(with("twice", "blocks.0.ffn.0.diff_b", "blocks.0.self_attn.k.lora_B.bias"), HasSubstr("same weight"));
  request.loras.at(0).path = renamed(adapter("bias_only"), "shape", [](const std::string& name) {
    return name.ends_with("blocks.0.ffn.0.diff_b") ? "text_embedding.0.diff_b" : name;
  });
  EXPECT_THAT(refusal(request), HasSubstr("text_embedding.0.diff_b is [40], in this model it must be [30]"));
  request.loras.at(0).path = renamed(adapter("original"), "no_bias_of_the_head", [](const std::string& name) {
    return name.ends_with("head.head.diff") ? "head.head.lora_down.weight" : name;
  });
  EXPECT_THAT(refusal(request), HasSubstr("has no counterpart"));
}

TEST_F(WanLora, RefusesBadSchedules) {
  GenerationRequest request = golden_of("four").request;
  const auto with = [&](job::Field field, job::FieldValues::Value value) {
    GenerationRequest changed = request;
    changed.fields.set(field, std::move(value));
    return refusal(changed);
  };
  EXPECT_THAT(with("num_inference_steps", std::int64_t{5}), HasSubstr("has 4 numbers, but num_inference_steps is 5"));
  EXPECT_THAT(with("sampler", std::string("unipc")), HasSubstr("the sampler is unipc; set sampler to euler"));
  EXPECT_THAT(with("sampler", std::string("ddim")), HasSubstr("must be euler or unipc"));
  EXPECT_THAT(with("flow_shift", 0.0), HasSubstr("flow_shift must be a number above 0"));
  for (const char* sigmas : {"1,2,3,4", "1,0.5,0.5,0.2", "1,0.5,0.2,0", "1,a,0.5,0.2", "1,,0.5,0.2", "1,0.5 0.2,0.1"})
    EXPECT_THAT(with("sigmas", std::string(sigmas)), HasSubstr("must be falling numbers")) << sigmas;
}

}  // namespace
}  // namespace ditfleet::pipeline
