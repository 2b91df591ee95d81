// Pictures of tiny Z-Image folders, compared with diffusers': tests/fixtures/z_image/make.py.
// DITFLEET_TEST_COMPILE=cpu_jit runs the same with compiled blocks, DITFLEET_TEST_DEVICE=cuda on a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/families/z_image/z_image.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

const golden::Case kTurbo{"turbo", "plain", "z_image"}, kBase{"base", "plain", "z_image"};

std::vector<std::unique_ptr<Engine>> engines;  // outlive their models

std::unique_ptr<Model> open(const golden::Case& which, bool bf16 = false) {
  engines.push_back(unwrap(Engine::create(golden::test_options(bf16 ? "bf16" : "fp32", 1), {&z_image_family()})));
  return unwrap(engines.back()->load_model({"z", which.model_dir()}));
}

class ZImagePipeline : public ::testing::TestWithParam<golden::Case> {};

TEST_P(ZImagePipeline, DrawsWhatDiffusersDraws) {
  const auto model = open(GetParam(), golden::load(GetParam()).bf16);
  golden::expect_case(*model, GetParam());
  golden::expect_compiled(*engines.back());
}

INSTANTIATE_TEST_SUITE_P(Cases, ZImagePipeline, ::testing::ValuesIn(golden::all_cases("z_image")),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

TEST(ZImageEngine, GuidanceIsOnAboveZero) {
  const auto model = open(kTurbo);
  GenerationRequest request = golden::load(kTurbo).request;
  const auto forwards = [&](double guidance) {
    request.fields.set("guidance_scale", guidance);
    return unwrap(model->size_of(request)).forwards;
  };
  EXPECT_EQ(forwards(0), 1);
  EXPECT_EQ(forwards(0.01), 2);
  EXPECT_EQ(forwards(1), 2) << "1 is not off";
}

// Without a negative prompt, "" is one: they draw the same bits.
TEST(ZImageEngine, NoNegativePromptIsAnEmptyOne) {
  const auto model = open(kTurbo);
  GenerationRequest request = golden::load({"turbo", "guidance_one", "z_image"}).request;
  ASSERT_FALSE(request.fields.has("negative_prompt"));
  const Media without = unwrap(golden::draw(*model, request));
  request.fields.set("negative_prompt", std::string());
  EXPECT_EQ(unwrap(golden::draw(*model, request)).rgb, without.rgb);
  request.fields.set("negative_prompt", std::string("a ring"));
  EXPECT_NE(unwrap(golden::draw(*model, request)).rgb, without.rgb);
}

TEST(ZImageEngine, WarnsOfTruncatedPrompts) {
  const auto model = open(kTurbo);
  const auto warnings = [&](const char* name) {
    return unwrap(model->encode(golden::load({"turbo", name, "z_image"}).request))->warnings();
  };
  EXPECT_THAT(warnings("plain"), IsEmpty());
  EXPECT_THAT(warnings("empty"), IsEmpty());
  EXPECT_THAT(warnings("long"), ElementsAre(HasSubstr("accepts 512 tokens")));
  EXPECT_THAT(warnings("cut"), Contains(HasSubstr("accepts 11 tokens")));  // of the prompt and of the negative one
}

TEST(ZImageEngine, RefusesSizesThatItCannotDraw) {
  const auto turbo = open(kTurbo), base = open(kBase);
  const auto message = [](Model& model, const golden::Case& which, job::Field field, int pixels) {
    GenerationRequest request = golden::load(which).request;
    request.fields.set(field, pixels);
    const auto refused = model.encode(request);
    EXPECT_FALSE(refused) << field.name() << " " << pixels;
    return refused ? std::string() : refused.error().param + ": " + refused.error().message;
  };
  EXPECT_THAT(message(*turbo, kTurbo, job::Field("width"), 56), HasSubstr("use 48 or 64"));
  EXPECT_THAT(message(*base, kBase, job::Field("width"), 60), HasSubstr("use 56 or 64"));
  // axes_lens: 12 rows and 16 columns of patches, 8 pixels each.
  EXPECT_THAT(message(*base, kBase, job::Field("width"), 136), testing::StartsWith("width: "));
  EXPECT_THAT(message(*base, kBase, job::Field("height"), 104), testing::StartsWith("height: "));
}

// axes_lens: 96 rows for the caption and the image after it.
TEST(ZImageEngine, RefusesCaptionsBeyondTheTables) {
  const auto model = open(kBase);
  GenerationRequest request = golden::load({"base", "edge", "z_image"}).request;
  EXPECT_TRUE(model->encode(request)) << "64 tokens";
  request.fields.set("max_sequence_length", 65);
  const auto refused = model->encode(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_EQ(refused.error().param, "max_sequence_length");
}

TEST(ZImageFolder, RefusesWhatItDoesNotSupport) {
  const auto refusal = [](const golden::Case& which, const char* file, const char* from, const char* to) {
    return golden::refusal(z_image_family(), which,
                           [&](const fs::path& copy) { golden::replace_in(copy / file, from, to); });
  };
  const auto index = [&](const char* from, const char* to) { return refusal(kTurbo, "model_index.json", from, to); };
  const auto transformer = [&](const char* from, const char* to) {
    return refusal(kTurbo, "transformer/config.json", from, to);
  };
  EXPECT_EQ(index("Qwen3Model", "Qwen3Model"), "");
  EXPECT_THAT(index("Qwen3Model", "T5EncoderModel"), HasSubstr("must be [LIBRARY, \"Qwen3Model\"]"));
  EXPECT_THAT(index("\"AutoencoderKL\"", "\"AutoencoderKLWan\""), HasSubstr("AutoencoderKL"));
  EXPECT_THAT(index("\"_class_name\": \"ZImagePipeline\"", "\"_class_name\": \"ZImageOmniPipeline\""),
              HasSubstr("ZImageOmniPipeline"));
  EXPECT_THAT(transformer("\"siglip_feat_dim\": null", "\"siglip_feat_dim\": 8"), HasSubstr("siglip_feat_dim"));
  EXPECT_THAT(transformer("\"qk_norm\": true", "\"qk_norm\": false"), HasSubstr("qk_norm"));
  EXPECT_THAT(transformer("\"cap_feat_dim\": 24", "\"cap_feat_dim\": 32"), HasSubstr("cap"));
  EXPECT_THAT(transformer("\"in_channels\": 4", "\"in_channels\": 8"), HasSubstr("in_channels is 8"));
  EXPECT_THAT(refusal(kTurbo, "text_encoder/config.json", "\"model_type\": \"qwen3\"", "\"model_type\": \"qwen3_moe\""),
              HasSubstr("qwen3_moe"));
}

TEST(ZImageFolder, NeedsAChatTemplate) {
  EXPECT_THAT(golden::refusal(z_image_family(), kTurbo,
                              [](const fs::path& copy) {
                                golden::replace_in(copy / "tokenizer/tokenizer_config.json", "\"chat_template\"",
                                                   "\"no_template\"");
                              }),
              HasSubstr("chat_template"));
  EXPECT_THAT(golden::refusal(z_image_family(), kBase,
                              [](const fs::path& copy) { fs::remove(copy / "tokenizer/chat_template.jinja"); }),
              HasSubstr("chat_template"));
}

}  // namespace
}  // namespace ditfleet::pipeline
