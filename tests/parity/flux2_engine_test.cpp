// Pictures of tiny FLUX.2 klein folders, compared with diffusers': tests/fixtures/flux2/make.py.
// DITFLEET_TEST_COMPILE=cpu_jit runs the same with compiled blocks, DITFLEET_TEST_DEVICE=cuda on a GPU.
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux2/flux2.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

namespace fs = std::filesystem;

const golden::Case kKlein{"klein", "plain", "flux2"}, kBase{"base", "plain", "flux2"};

std::vector<std::unique_ptr<Engine>> engines;  // outlive their models

std::unique_ptr<Model> open(const golden::Case& which, bool bf16 = false) {
  engines.push_back(unwrap(Engine::create(golden::test_options(bf16 ? "bf16" : "fp32", 1), {&flux2_family()})));
  return unwrap(engines.back()->load_model({"klein", which.model_dir()}));
}

class Flux2Pipeline : public ::testing::TestWithParam<golden::Case> {};

TEST_P(Flux2Pipeline, DrawsWhatDiffusersDraws) {
  const auto model = open(GetParam(), golden::load(GetParam()).bf16);
  golden::expect_case(*model, GetParam());
  golden::expect_compiled(*engines.back());
}

INSTANTIATE_TEST_SUITE_P(References, Flux2Pipeline, ::testing::ValuesIn(golden::all_cases("flux2/edit")),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });
INSTANTIATE_TEST_SUITE_P(Cases, Flux2Pipeline, ::testing::ValuesIn(golden::all_cases("flux2")),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

TEST(Flux2Engine, OnlyBaseModelsHaveGuidance) {
  const auto klein = open(kKlein), base = open(kBase);
  const auto forwards = [](Model& model, const golden::Case& which, double guidance) {
    GenerationRequest request = golden::load(which).request;
    request.fields.set("guidance_scale", guidance);
    return unwrap(model.size_of(request)).forwards;
  };
  EXPECT_EQ(forwards(*klein, kKlein, 4), 1);
  EXPECT_EQ(forwards(*base, kBase, 1), 1);
  EXPECT_EQ(forwards(*base, kBase, 1.01), 2);
}

TEST(Flux2Engine, NoiseLevelsDependOnTheSizeAndTheStepsAsInDiffusers) {
  const auto model = open(kKlein);
  const json::value known =
      unwrap(parse_json(unwrap(read_file((golden::fixtures() / "flux2/schedules.json").string()))));
  GenerationRequest request = golden::load(kKlein).request;
  const std::string dump = (fs::path(::testing::TempDir()) / "flux2_schedule.safetensors").string();
  std::set<std::int64_t> seen;
  for (const json::value& one : known.as_array()) {
    const auto tokens = one.at("tokens").to_number<std::int64_t>();
    const int steps = one.at("steps").to_number<int>();
    std::int64_t rows = 128;  // of 16 pixels
    while (tokens % rows != 0) --rows;
    if (tokens / rows > 128) continue;  // larger than the model takes
    request.fields.set("height", 16 * rows);
    request.fields.set("width", 16 * (tokens / rows));
    request.fields.set("num_inference_steps", steps);
    unwrap(unwrap(model->encode(request))->dump(dump));
    const auto sigmas = json::value_to<std::vector<float>>(one.at("sigmas"));
    EXPECT_LE(golden::distance(golden::read_tensor(dump, "sigmas"), at::tensor(sigmas)), 1e-7)
        << tokens << " tokens, " << steps << " steps";
    seen.insert(tokens);
  }
  fs::remove(dump);
  EXPECT_THAT(seen, IsSupersetOf({1, 12, 4096, 4300, 16384}));
}

TEST(Flux2Engine, WarnsOfTruncatedPromptsAndOfGuidanceWithoutEffect) {
  const auto model = open(kKlein);
  const auto warnings = [&](const char* name) {
    return unwrap(model->encode(golden::load({"klein", name, "flux2"}).request))->warnings();
  };
  EXPECT_THAT(warnings("plain"), IsEmpty());
  EXPECT_THAT(warnings("empty"), IsEmpty());
  EXPECT_THAT(warnings("guided"), ElementsAre(HasSubstr("guidance_scale")));
  EXPECT_THAT(warnings("long"), ElementsAre(HasSubstr("accepts 512 tokens")));
  EXPECT_THAT(warnings("cut"), ElementsAre(HasSubstr("accepts 11 tokens")));
}

// diffusers draws a smaller picture, with a warning (the case "floored").
TEST(Flux2Engine, RefusesSizesThatItCannotDraw) {
  const auto model = open(kKlein);
  GenerationRequest request = golden::load(kKlein).request;
  request.fields.set("width", 72);
  const auto refused = model->encode(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().param, "width");
  EXPECT_THAT(refused.error().message, HasSubstr("use 64 or 80"));
}

TEST(Flux2Folder, RefusesWhatItDoesNotSupport) {
  const auto refusal = [](const char* file, const char* from, const char* to) {
    return golden::refusal(flux2_family(), kKlein,
                           [&](const fs::path& copy) { golden::replace_in(copy / file, from, to); });
  };
  const auto index = [&](const char* from, const char* to) { return refusal("model_index.json", from, to); };
  EXPECT_EQ(index("Qwen3ForCausalLM", "Qwen3ForCausalLM"), "");
  EXPECT_THAT(index("Flux2KleinPipeline", "Flux2Pipeline"), HasSubstr("Flux2Pipeline"));
  EXPECT_THAT(index("Qwen3ForCausalLM", "Mistral3ForConditionalGeneration"), HasSubstr("Mistral"));
  EXPECT_THAT(index("Qwen3ForCausalLM", "T5EncoderModel"), HasSubstr("Qwen3ForCausalLM"));
  EXPECT_THAT(index("AutoencoderKLFlux2", "AutoencoderKL"), HasSubstr("AutoencoderKLFlux2"));
  // The embeddings are those after 27 layers.
  EXPECT_THAT(refusal("text_encoder/config.json", "\"num_hidden_layers\": 28", "\"num_hidden_layers\": 26"),
              HasSubstr("num_hidden_layers"));
  EXPECT_THAT(refusal("transformer/config.json", "\"patch_size\": 1", "\"patch_size\": 2"), HasSubstr("patch_size"));
  EXPECT_THAT(refusal("transformer/config.json", "\"joint_attention_dim\": 48", "\"joint_attention_dim\": 45"),
              HasSubstr("joint_attention_dim"));
  EXPECT_THAT(refusal("vae/config.json", "\"latent_channels\": 4", "\"latent_channels\": 8"),
              AnyOf(HasSubstr("latent_channels"), HasSubstr("in_channels")));
}

TEST(Flux2Folder, NeedsAChatTemplate) {
  EXPECT_THAT(golden::refusal(flux2_family(), kKlein,
                              [](const fs::path& copy) { fs::remove(copy / "tokenizer/chat_template.jinja"); }),
              HasSubstr("chat_template"));
}

}  // namespace
}  // namespace ditfleet::pipeline
