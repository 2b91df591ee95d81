// Pictures of tiny Qwen-Image folders, also edits, and what the transformer makes of pictures, compared with
// diffusers': tests/fixtures/qwen_image/make.py. DITFLEET_TEST_COMPILE=cpu_jit runs the pictures with compiled blocks,
// DITFLEET_TEST_DEVICE=cuda on a GPU.
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "pipeline/device/failure.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/qwen_image/transformer.h"
#include "pipeline/region/run/region_host.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

namespace fs = std::filesystem;

const golden::Case kImage{"image", "plain", "qwen_image"}, kEdit{"edit", "plain", "qwen_image"},
    kPlus{"plus", "two", "qwen_image"};

std::vector<std::unique_ptr<Engine>> engines;  // outlive their models

std::unique_ptr<Model> open(const golden::Case& which, bool bf16 = false) {
  engines.push_back(unwrap(Engine::create(golden::test_options(bf16 ? "bf16" : "fp32", 1), {&qwen_image_family()})));
  return unwrap(engines.back()->load_model({"qwen", which.model_dir()}));
}

class QwenImagePipeline : public ::testing::TestWithParam<golden::Case> {};

TEST_P(QwenImagePipeline, DrawsWhatDiffusersDraws) {
  const auto model = open(GetParam(), golden::load(GetParam()).bf16);
  golden::expect_case(*model, GetParam());
  golden::expect_compiled(*engines.back());
}

INSTANTIATE_TEST_SUITE_P(Cases, QwenImagePipeline, ::testing::ValuesIn(golden::all_cases("qwen_image")),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

// The image is followed by two pictures; "zero" has zero_cond_t.
class QwenImageDit : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Folders, QwenImageDit, ::testing::Values("image", "zero"));

TEST_P(QwenImageDit, TakesPictures) {
  const c10::InferenceMode inference(true);
  const fs::path at = golden::fixtures() / "qwen_image";
  const auto read = [&](const std::string& name) {
    return golden::read_tensor((at / "dit" / (std::string(GetParam()) + ".safetensors")).string(), name);
  };
  const std::vector<TokenGrid> grids = {{3, 5}, {4, 2}, {1, 3}};
  const at::Tensor all = read("latents"), expected = read("fp32");
  const Placement placement{load_device(golden::test_device()).device};
  const auto to = [&](const at::Tensor& t) { return t.to(placement.device); };
  const auto host = region::make_region_host({.backend = "cpu_jit", .fullgraph = true, .error_on_recompile = true},
                                             c10::kCPU, nullptr);
  for (const bool compiled : {false, true}) {
    if (compiled && !placement.device.is_cpu()) continue;
    auto model = QwenImageTransformer::load({.files = (at / GetParam() / "model/transformer").string()}, placement,
                                            /*pictures=*/true);
    if (compiled) Transformer::compile({&model}, host);
    const at::Tensor text = model.embed_text(to(read("text"))), rope = model.rope(text.size(1), grids);
    const auto rows = model.modulation(to(at::tensor({750.0F})));
    EXPECT_EQ(rows.zero.defined(), std::string(GetParam()) == "zero");
    const at::Tensor got =
        model.velocity(to(all.narrow(1, 0, 15)), to(all.narrow(1, 15, 11)), text, rows.steps, rows.zero, rope);
    EXPECT_LE(golden::distance(got, expected.narrow(1, 0, 15)), 2e-5) << compiled;
  }
}

TEST(QwenImageEngine, GuidesWithANegativePromptOnly) {
  const auto model = open(kImage);
  const auto forwards = [&](double scale, bool negative) {
    GenerationRequest request = golden::load(kImage).request;
    request.fields.set("true_cfg_scale", scale);
    if (negative) request.fields.set("negative_prompt", std::string());
    return unwrap(model->size_of(request)).forwards;
  };
  EXPECT_EQ(forwards(4, false), 1);
  EXPECT_EQ(forwards(1, true), 1);
  EXPECT_EQ(forwards(1.01, true), 2);
}

TEST(QwenImageEngine, TheFolderChoosesPositionsOfPictures) {
  const auto draw = [](const std::string& own) {
    const fs::path copy = fs::path(::testing::TempDir()) / "qwen_positions";
    fs::remove_all(copy);
    fs::copy(kEdit.model_dir(), copy, fs::copy_options::recursive);
    std::ofstream(copy / "ditfleet.json") << own;
    engines.push_back(unwrap(Engine::create(golden::test_options("fp32", 1), {&qwen_image_family()})));
    return unwrap(
               golden::draw(*unwrap(engines.back()->load_model({"qwen", copy.string()})), golden::load(kEdit).request))
        .rgb;
  };
  const auto sequence = draw(R"({"picture_positions": "sequence"})");
  EXPECT_EQ(draw("{}"), sequence);
  EXPECT_NE(draw(R"({"picture_positions": "grid"})"), sequence);
}

TEST(QwenImageEngine, TakesTheSizeFromTheLastPicture) {
  const auto plus = open(kPlus);
  GenerationRequest request = golden::load(kPlus).request;
  const auto picture = [](int width, int height) {
    return std::make_shared<const Media>(
        Media{width, height, 1, 0, std::vector<std::uint8_t>(static_cast<std::size_t>(3 * width * height))});
  };
  request.images = {picture(512, 512), picture(90, 71)};
  request.fields = {};
  const auto size = [&] {
    const RequestSize made = unwrap(plus->size_of(request));
    return std::pair(made.width, made.height);
  };
  EXPECT_EQ(size(), std::pair(1152, 896));
  request.images = {picture(90, 71), picture(1920, 1080)};
  EXPECT_EQ(size(), std::pair(1376, 768));
  request.images.back() = picture(2000, 20);
  EXPECT_EQ(size(), std::pair(2048, 96));  // the widest that it draws
  request.fields.set("width", 64);         // with one side, the other is the default
  EXPECT_EQ(size(), std::pair(64, 1024));
}

TEST(QwenImageEngine, WarnsOfTruncatedPrompts) {
  const auto model = open(kImage);
  const auto warnings = [&](const char* name) {
    return unwrap(model->encode(golden::load({"image", name, "qwen_image"}).request))->warnings();
  };
  EXPECT_THAT(warnings("plain"), IsEmpty());
  EXPECT_THAT(warnings("long"), ElementsAre(HasSubstr("accepts 512 tokens")));
  EXPECT_THAT(warnings("cut"), ElementsAre(HasSubstr("accepts 11 tokens")));
}

TEST(QwenImageEngine, RefusesWhatItCannotDraw) {
  const auto model = open(kImage);
  const auto refused = [&](const char* field, int value) {
    GenerationRequest request = golden::load(kImage).request;
    request.fields.set(job::find_field(field).value(), value);
    const auto made = model->encode(request);
    return made ? std::string() : made.error().param + ": " + made.error().message;
  };
  EXPECT_THAT(refused("width", 72), HasSubstr("use 64 or 80"));
  EXPECT_THAT(refused("num_inference_steps", 1), HasSubstr("num_inference_steps"));
  EXPECT_EQ(refused("num_inference_steps", 2), "");
}

TEST(QwenImageEngine, RefusesPicturesThatItCannotEdit) {
  const auto edit = open(kEdit), plus = open(kPlus);
  const auto refused = [](Model& model, const GenerationRequest& request) {
    const auto made = model.encode(request);
    return made ? std::string() : made.error().param + ": " + made.error().message;
  };
  GenerationRequest one = golden::load(kEdit).request, two = golden::load(kPlus).request;
  two.fields.set("num_inference_steps", 2);
  EXPECT_THAT(refused(*edit, two), HasSubstr("image: image has 2 pictures; this model takes 1"));
  two.prompt = "a <|image_pad|> ring";
  EXPECT_THAT(refused(*plus, two), HasSubstr("prompt: the prompt contains \"<|image_pad|>\""));
  one.images.clear();
  EXPECT_THAT(refused(*edit, one), HasSubstr("image: image is missing; this model edits an image"));
}

TEST(QwenImageFolder, RefusesWhatItDoesNotSupport) {
  const auto refusal = [](const char* file, const char* from, const char* to) {
    return golden::refusal(qwen_image_family(), kImage,
                           [&](const fs::path& copy) { golden::replace_in(copy / file, from, to); });
  };
  const auto transformer = [&](const char* from, const char* to) {
    return refusal("transformer/config.json", from, to);
  };
  EXPECT_EQ(refusal("model_index.json", "Qwen2Tokenizer", "Qwen2TokenizerFast"), "");
  EXPECT_THAT(refusal("model_index.json", "QwenImagePipeline", "QwenImageLayeredPipeline"), HasSubstr("Layered"));
  EXPECT_THAT(refusal("model_index.json", "AutoencoderKLQwenImage", "AutoencoderKL"), HasSubstr("AutoencoderKL"));
  EXPECT_THAT(transformer("\"guidance_embeds\": false", "\"guidance_embeds\": true"), HasSubstr("guidance_embeds"));
  EXPECT_THAT(transformer("\"patch_size\": 2", "\"patch_size\": 1"), HasSubstr("patch_size"));
  EXPECT_THAT(transformer("\"out_channels\": 4", "\"out_channels\": 5"), HasSubstr("out_channels"));
  EXPECT_THAT(transformer("\"joint_attention_dim\": 24", "\"joint_attention_dim\": 25"),
              HasSubstr("joint_attention_dim"));
  EXPECT_THAT(refusal("text_encoder/config.json", "\"model_type\": \"qwen2_5_vl\"", "\"model_type\": \"qwen3\""),
              HasSubstr("qwen2_5_vl"));
  EXPECT_THAT(refusal("vae/config.json", "\"input_channels\": 3", "\"input_channels\": 4"),
              HasSubstr("input_channels"));
}

}  // namespace
}  // namespace ditfleet::pipeline
