// Wan's transformer and samplers against what diffusers computed (tests/fixtures/wan/dit/make_dit.py).
#include <ATen/TensorOperators.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/transformer.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/sampling/flow_scheduler.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

constexpr double kFp32Limit = 2e-4;

std::string fixture(const std::string& name) { return (golden::fixtures() / "wan/dit" / name).string(); }

void expect_refusal(const std::function<void()>& call, std::initializer_list<std::string> words) {
  try {
    call();
    ADD_FAILURE() << "accepted; expected a refusal with " << *words.begin();
  } catch (const Failure& failure) {
    for (const std::string& word : words)
      EXPECT_NE(failure.error().message.find(word), std::string::npos)
          << "no \"" << word << "\" in: " << failure.error().message;
  }
}

// Compiles blocks for the CPU; every fallback and every second program of a block is an error.
std::shared_ptr<region::RegionHost> compiling_host() {
  return region::make_region_host({.backend = "cpu_jit", .fullgraph = true, .error_on_recompile = true}, c10::kCPU,
                                  nullptr);
}

class WanDit : public ::testing::TestWithParam<const char*> {};

TEST_P(WanDit, PredictsWhatDiffusersPredicts) {
  const std::string name = GetParam(), file = fixture(name + ".safetensors");
  const auto read = [&](const char* tensor) { return golden::read_tensor(file, tensor); };
  const at::Tensor latents = read("latents"), fp32 = read("fp32"), bf16 = read("bf16");
  const double roundings = golden::distance(bf16.to(at::kFloat), fp32);
  ASSERT_GT(roundings, 0);
  for (const auto& [type, compiled] :
       {std::pair(at::kFloat, false), {at::kFloat, true}, {at::kBFloat16, false}, {at::kBFloat16, true}}) {
    SCOPED_TRACE(compiled);
    auto model = WanTransformer::load({.files = fixture(name.substr(0, name.find('-')))}, {.dtype = type});
    if (compiled) Transformer::compile({&model}, compiling_host());
    const at::Tensor text = model.embed_text(read("text")),
                     rope = model.rope(latents.size(2), latents.size(3), latents.size(4));
    const at::Tensor got = model.velocity(latents, read("timestep").item<float>(), {text, rope});
    EXPECT_EQ(got.scalar_type(), type);
    if (type == at::kFloat) {
      EXPECT_LE(golden::distance(got, fp32), kFp32Limit);
    } else {
      EXPECT_LE(golden::distance(got.to(at::kFloat), fp32), 1.5 * roundings);
      EXPECT_LE(golden::distance(got.to(at::kFloat), bf16.to(at::kFloat)), 1.5 * roundings);
      EXPECT_EQ(model.weights().linears[WanLinear::kTimeFirst].weight.scalar_type(), at::kFloat);
      EXPECT_EQ(model.weights().tensors[WanTensor::kTable].scalar_type(), at::kFloat);
      EXPECT_EQ(model.weights().blocks[0].tensors[WanBlockTensor::kNormQ].scalar_type(), at::kBFloat16);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, WanDit,
                         ::testing::Values("t2v-image", "t2v-video", "t2v-long", "i2v-image", "i2v-video", "i2v-long",
                                           "plain-video"));

// Each format, without and with a timestep for each token.
class WanDitRegions : public ::testing::TestWithParam<std::tuple<std::string, bool>> {};
INSTANTIATE_TEST_SUITE_P(Formats, WanDitRegions,
                         ::testing::Combine(::testing::Values("", "nf4", "fp8"), ::testing::Bool()));

// Eager and compiled sums differ in their last bits, so an activation may round to the next value of e4m3, 1/8 away.
// 93 of 3,600 outputs met one; they moved by up to 0.023.
constexpr double kFp8Flip = 4e-2;

// Both experts, at the lengths of 25, 49, 61 and 81 frames.
TEST_P(WanDitRegions, OneProgramServesBothExpertsAndEveryLength) {
  const at::Tensor prompt = golden::read_tensor(fixture("t2v-video.safetensors"), "text");
  const auto& [format, expand] = GetParam();
  {
    const auto eager = WanTransformer::load({.files = fixture("t2v"), .quantize = format}, {}, expand);
    auto first = eager, second = eager;
    const auto host = compiling_host();
    Transformer::compile({&first, &second}, host);
    EXPECT_EQ(eager.linears().count(format.empty()    ? "fp32"
                                    : format == "fp8" ? "fp8 with dynamic activations"
                                                      : format),
              1u);
    std::int64_t still = 0;
    for (const std::int64_t frames : {7, 13, 16, 21}) {
      const at::Tensor latents = at::randn({1, eager.config().in_channels, frames, 4, 6}),
                       text = eager.embed_text(prompt), rope = eager.rope(frames, 4, 6);
      const at::Tensor want = eager.velocity(latents, 500, {text, rope, {}, still});
      for (const WanTransformer* expert : {&first, &second})
        EXPECT_LE(golden::distance(expert->velocity(latents, 500, {text, rope, {}, still}), want),
                  format == "fp8" ? kFp8Flip : 1e-4)
            << frames;
      if (expand) still = 1 - still;
    }
    EXPECT_EQ(host->counters->counts().compiles, 1u);
    EXPECT_EQ(host->counters->counts().variants, 4u);
    EXPECT_EQ(host->counters->counts().fallbacks, 0u);
  }
}

// A random adapter of this rank at every linear, and a change of every bias. The same at the linears of both models.
void add_adapter_to(std::int64_t rank, const std::vector<NamedLinear>& linears, const std::vector<NamedLinear>& same) {
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const auto& [name, slot, first_row, rows] = linears[i];
    const LowRank term{at::randn({rank, slot->in()}) / std::sqrt(slot->in()), 0.5 * at::randn({rows, rank}), first_row,
                       0.7};
    const BiasChange change{0.2 * at::randn({rows}), first_row, 0.7};
    for (LinearSlot* one : {slot, same[i].slot}) {
      one->low_rank.push_back(term);
      one->bias_changes.push_back(change);
    }
  }
}

TEST_P(WanDitRegions, EachExpertHasAdaptersInItsColumns) {
  const c10::InferenceMode inference(true);
  const at::Tensor prompt = golden::read_tensor(fixture("t2v-video.safetensors"), "text");
  const auto& [format, expand] = GetParam();
  {
    const auto eager = WanTransformer::load({.files = fixture("t2v"), .quantize = format}, {}, expand);
    const auto host = compiling_host();
    const auto load = [&] {
      return WanTransformer::load({.files = fixture("t2v"), .quantize = format, .adapter_rank = 16, .regions = host},
                                  {}, expand);
    };
    WanTransformer experts[] = {load(), load()};
    Transformer::compile({&experts[0], &experts[1]}, host);
    const at::Tensor latents = at::randn({1, eager.config().in_channels, 3, 4, 6}), rope = eager.rope(3, 4, 6);
    const auto velocity = [&](const WanTransformer& model) {
      return model.velocity(latents, 500, {model.embed_text(prompt), rope, {}, expand ? 1 : 0});
    };
    const auto distance = [&](const WanTransformer& got, const WanTransformer& reference) {
      return golden::distance(velocity(got), velocity(reference));
    };
    const double limit = format == "fp8" ? kFp8Flip : 2e-5;
    for (const std::int64_t rank : {16, 3, 7}) {  // 3: columns beyond hold what was there before
      std::vector<WanTransformer> adapted, expected;
      for (const WanTransformer& expert : experts) {
        TransformerWeights weights = expert.weights(), same = eager.weights();
        add_adapter_to(rank, expert.named_linears(weights), eager.named_linears(same));
        adapted.emplace_back(expert).adapt(std::move(weights));
        expected.emplace_back(eager).adapt(std::move(same));
      }
      for (const WanTransformer& one : adapted) one.load_adapters();
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_LE(distance(adapted[i], expected[i]), limit);
        EXPECT_LE(distance(experts[i], eager), limit);
        EXPECT_GT(distance(expected[i], eager), 0.05);
      }
      EXPECT_GT(distance(expected[0], expected[1]), 0.05);
    }
    for (const WanTransformer& expert : experts) {
      const auto used = [&] {
        std::int64_t count = 0;
        for (const TransformerBlock& block : expert.weights().blocks)
          for (const LinearSlot& slot : block.linears)
            count += lora_columns_of(slot).count_nonzero().item<std::int64_t>();
        return count;
      };
      EXPECT_GT(used(), 0);
      expert.clear_adapters();
      EXPECT_EQ(used(), 0);
    }
    EXPECT_EQ(host->counters->counts().compiles, 2u);  // without and with adapters
    const auto ahead =
        Transformer::programs(wan_spec(eager.config()), {.files = fixture("t2v"), .quantize = format}, {},
                              /*fp8_products=*/true);
    ASSERT_EQ(ahead.size(), 2u);
    EXPECT_EQ(ahead[1].block, (expand ? "wan.still" : "wan.block") +
                                  std::string(format.empty()    ? ""
                                              : format == "fp8" ? ".fp8"
                                                                : ".quantized") +
                                  ".adapted");
    EXPECT_EQ(host->counters->counts().fallbacks, 0u);
  }
}

TEST(WanSamplers, FollowDiffusers) {
  const std::string file = fixture("schedulers.safetensors");
  const auto read = [&](const std::string& tensor) { return golden::read_tensor(file, tensor); };
  const at::Tensor noise = read("noise"), velocities = read("velocities");
  for (const int shift : {1, 3, 5, 8})
    for (const int steps : {1, 2, 4, 8, 20})
      for (const bool unipc : {true, false}) {
        const std::string key =
            (unipc ? "unipc-" : "euler-") + std::to_string(shift) + "-" + std::to_string(steps) + "-";
        SCOPED_TRACE(key);
        FlowSchedulerConfig config;
        config.unipc = unipc;
        config.flow_shift = config.euler.shift = shift;
        config.euler.use_flow_sigmas = true;
        const Schedule schedule = make_flow_schedule(config, steps);
        const at::Tensor sigmas = read(key + "sigmas"), timesteps = read(key + "timesteps");
        ASSERT_EQ(sigmas.numel(), steps + 1);
        ASSERT_EQ(static_cast<int>(schedule.sigmas.size()), steps + 1);
        for (int i = 0; i <= steps; ++i)
          EXPECT_EQ(schedule.sigmas[static_cast<std::size_t>(i)], sigmas[i].item<float>()) << i;
        for (int i = 0; i < steps; ++i)
          EXPECT_EQ(schedule.timesteps[static_cast<std::size_t>(i)], timesteps[i].item<float>()) << i;
        for (const auto type : {at::kFloat, at::kBFloat16}) {
          const at::Tensor right = read(key + (type == at::kFloat ? "fp32" : "bf16"));
          const auto sampler = make_flow_sampler(config, schedule, c10::kCPU);
          at::Tensor latents = noise;
          for (int i = 0; i < steps; ++i) {
            latents = sampler->step(latents, velocities[i].to(type), i);
            EXPECT_EQ(latents.scalar_type(), right.scalar_type());
            EXPECT_LE(golden::distance(latents.to(at::kFloat), right[i].to(at::kFloat)), 1e-5) << i;
          }
        }
      }
}

TEST(WanDitConfig, RefusesWhatIsNotSupported) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("ditfleet_wan_" + std::to_string(::getpid()) + ".json");
  const auto written = [&](const std::string& text) {
    std::ofstream(file) << text;
    return ConfigFile(file.string());
  };
  const std::string name = file.filename().string();
  const auto refused = [&](const std::string& text, const std::string& field, const std::string& right) {
    expect_refusal([&] { read_wan_config(written(text)); }, {name, field, right});
  };
  refused(R"({"_class_name": "FluxTransformer2DModel"})", "_class_name", "WanTransformer3DModel");
  refused(R"({"image_dim": 1280})", "added_kv_proj_dim is 0", "must be 5120");
  refused(R"({"added_kv_proj_dim": 5120})", "added_kv_proj_dim is 5120", "else null");
  refused(R"({"pos_embed_seq_len": 514})", "pos_embed_seq_len", "image_dim");
  refused(R"({"patch_size": [2, 2, 2]})", "patch_size", "[1, 2, 2]");
  refused(R"({"attention_head_dim": 13})", "attention_head_dim", "even");
  EXPECT_EQ(read_wan_config(written(R"({"in_channels": 36, "out_channels": null})")).out_channels, 36);
  const std::string good =
      R"("_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": true)";
  const auto unsupported = [&](const std::string& fields, const std::string& field, const std::string& right) {
    expect_refusal([&] { read_flow_scheduler_config(written("{" + fields + "}")); }, {name, field, right});
  };
  const std::string kind = R"("_class_name": "UniPCMultistepScheduler")";
  unsupported(kind, "prediction_type", "flow_prediction");
  unsupported(kind + R"(, "prediction_type": "flow_prediction")", "use_flow_sigmas", "true");
  unsupported(R"("_class_name": "DDIMScheduler")", "_class_name", "UniPCMultistepScheduler");
  unsupported(good + R"(, "solver_order": 3)", "solver_order", "2");
  unsupported(good + R"(, "solver_type": "bh1")", "solver_type", "bh2");
  unsupported(good + R"(, "thresholding": true)", "thresholding", "false");
  unsupported(good + R"(, "disable_corrector": [0])", "disable_corrector", "[]");
  unsupported(good + R"(, "shift_terminal": 0.1)", "shift_terminal", "null");
  unsupported(good + R"(, "flow_shift": 0)", "flow_shift", "above 0");
  EXPECT_EQ(read_flow_scheduler_config(written("{" + good + R"(, "flow_shift": 5})")).flow_shift, 5);
  std::filesystem::remove(file);
}

TEST(WanDitShapes, AreChecked) {
  const auto model = WanTransformer::load({.files = fixture("t2v")}, {});
  const at::Tensor latents = golden::read_tensor(fixture("i2v-image.safetensors"), "latents");
  expect_refusal([&] { model.velocity(latents, 1, {}); }, {"36", "[1, 16,"});
  expect_refusal([&] { model.rope(1, 4098, 2); }, {"2049", "1024"});
}

}  // namespace
}  // namespace ditfleet::pipeline
