// Videos of tiny Wan folders, compared with diffusers': tests/fixtures/wan/make.py. DITFLEET_TEST_DEVICE=cuda runs the
// same on a GPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "pipeline/device/failure.h"
#include "pipeline/families/wan/prompt_clean.h"
#include "pipeline/families/wan/wan.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::HasSubstr;

std::vector<std::unique_ptr<Engine>> engines;  // outlive their models

std::unique_ptr<Model> load(const std::string& dir, bool bf16, const std::string& vae_dtype = {}) {
  EngineOptions options = golden::test_options(bf16 ? "bf16" : "fp32", 1);
  engines.push_back(unwrap(Engine::create(options, {&wan_family()})));
  return unwrap(engines.back()->load_model({"wan", dir, {}, {}, vae_dtype}));
}

void expect_video(const Media& video, const golden::Golden& golden, const std::string& shown) {
  const at::Tensor want = golden.tensor("pixels");
  ASSERT_EQ(video.frames, want.size(0));
  ASSERT_EQ(video.height, want.size(1));
  ASSERT_EQ(video.width, want.size(2));
  double sum = 0;
  int largest = 0;
  const auto* pixel = want.const_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < video.rgb.size(); ++i) {
    const int apart = std::abs(int{video.rgb[i]} - int{pixel[i]});
    sum += apart;
    largest = std::max(largest, apart);
  }
  const double mean = sum / static_cast<double>(video.rgb.size());
  std::printf("%s: largest %d, mean %.5f of 255\n", shown.c_str(), largest, mean);
  // Goldens were made on a CPU; a GPU's products of bf16 are rounded elsewhere.
  const double apart = golden::test_device() == "cpu" ? 1.5 : 2;
  EXPECT_LE(largest, golden.bf16 ? apart * golden.largest_apart : 1);
  EXPECT_LE(mean, golden.bf16 ? apart * golden.mean_apart : 0.006);
}

class WanPipeline : public ::testing::TestWithParam<golden::Case> {};

TEST_P(WanPipeline, DrawsWhatDiffusersDraws) {
  const golden::Golden golden = golden::load(GetParam());
  const auto model = load(GetParam().model_dir(), golden.bf16, golden.vae_dtype);
  auto generation = unwrap(model->encode(golden.request));
  unwrap(model->denoise(*generation, nullptr));
  const Media video = unwrap(model->decode(*generation));
  golden::expect_compiled(*engines.back());
  const std::string dump = ::testing::TempDir() + GetParam().folder + GetParam().name + ".safetensors";
  unwrap(generation->dump(dump));
  const auto got = [&](const std::string& name) { return golden::read_tensor(dump, name); };

  EXPECT_TRUE(got("prompt_ids").equal(golden.tensor("prompt_ids")));
  EXPECT_TRUE(got("timesteps").equal(golden.tensor("timesteps")));
  EXPECT_LE(golden::distance(got("sigmas"), golden.tensor("sigmas")), 1e-6);
  EXPECT_LE(golden::distance(got("noise"), golden.tensor("noise")), 1e-5);
  const double limit = golden.bf16 ? 4e-2 : 2e-4;
  if (!golden.request.images.empty() && (!golden.bf16 || !golden.vae_dtype.empty())) {
    EXPECT_LE(golden::distance(got("condition"), golden.tensor("condition")), limit);
  }
  if (GetParam().folder == "clip" || GetParam().folder == "flf") {
    EXPECT_LE(golden::distance(got("image_embeds"), golden.tensor("image_embeds")), limit);
  }
  EXPECT_LE(golden::distance(got("prompt_embeds"), golden.tensor("prompt_embeds")), limit);
  if (!golden.bf16) {
    EXPECT_LE(golden::distance(got("latents"), golden.tensor("latents")), limit);
  }

  expect_video(video, golden, GetParam().folder + "/" + GetParam().name);
}

INSTANTIATE_TEST_SUITE_P(Cases, WanPipeline, ::testing::ValuesIn(golden::all_cases("wan")),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

TEST(WanEngine, RoundsFrames) {
  golden::Golden golden = golden::load({"two", "plain", "wan"});
  const auto model = load(golden::Case{"two", "plain", "wan"}.model_dir(), false);
  golden.request.fields.set("frames", 8);
  golden.request.fields.set("num_inference_steps", 2);
  auto generation = unwrap(model->encode(golden.request));
  ASSERT_EQ(generation->warnings().size(), 1u);
  EXPECT_THAT(generation->warnings()[0], HasSubstr("frames is 8; this model generates 4k + 1 frames, so it is 9"));
  unwrap(model->denoise(*generation, nullptr));
  EXPECT_EQ(unwrap(model->decode(*generation)).frames, 9);
}

TEST(WanEngine, RefusesBadRequests) {
  const auto two = load(golden::Case{"two", "", "wan"}.model_dir(), false);
  const auto one = load(golden::Case{"one", "", "wan"}.model_dir(), false);
  const auto message = [](Model& model, job::Field field, auto value) {
    GenerationRequest request = golden::load({"one", "plain", "wan"}).request;
    request.fields.set(field, value);
    const auto refused = model.encode(request);
    EXPECT_FALSE(refused) << field.name();
    return refused ? std::string() : refused.error().param + ": " + refused.error().message;
  };
  EXPECT_THAT(message(*one, job::Field("frames"), 0), HasSubstr("frames: frames is 0; model 'wan' accepts 1 to"));
  EXPECT_THAT(message(*one, job::Field("sampler"), std::string("ddim")), HasSubstr("must be euler or unipc"));
  EXPECT_TRUE(two->encode(golden::load({"two", "plain", "wan"}).request));
}

TEST(WanEngine, TakesTheSizeFromTheImage) {
  golden::Golden golden = golden::load({"i2v", "one", "wan"});
  const auto model = load(golden::Case{"i2v", "", "wan"}.model_dir(), false);
  GenerationRequest request = golden.request;
  request.fields = {};
  request.fields.set("frames", 1);
  request.fields.set("guidance_scale", 1);
  request.fields.set("max_sequence_length", 16);
  request.images = {std::make_shared<const Media>(Media{300, 100, 1, 0, std::vector<std::uint8_t>(300 * 100 * 3, 60)})};
  const std::string dump = ::testing::TempDir() + "wan_size.safetensors";
  unwrap(unwrap(model->encode(request))->dump(dump));
  // round(sqrt(832 * 480 / 3)) = 365 → 352, round(sqrt(832 * 480 * 3)) = 1095 → 1088.
  EXPECT_EQ(golden::read_tensor(dump, "noise").sizes(), (std::vector<std::int64_t>{1, 16, 1, 352 / 8, 1088 / 8}));
}

TEST(WanEngine, NeedsAnImageExactlyInImageModels) {
  GenerationRequest request = golden::load({"i2v", "one", "wan"}).request;
  const auto text_model = load(golden::Case{"two", "", "wan"}.model_dir(), false);
  const auto image_model = load(golden::Case{"i2v", "", "wan"}.model_dir(), false);
  const auto refused = text_model->encode(request);
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().message, HasSubstr("image does not apply to this model"));
  request.images.clear();
  const auto missing = image_model->encode(request);
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().message, HasSubstr("image is missing"));
  EXPECT_EQ(missing.error().param, "image");
}

TEST(WanEngine, TakesALastFrameWhereTheVideoHasOne) {
  GenerationRequest request = golden::load({"i2v", "last", "wan"}).request;
  ASSERT_EQ(request.images.size(), 2u);
  const auto model = load(golden::Case{"i2v", "", "wan"}.model_dir(), false);
  request.fields.set("frames", 1);
  const auto refused = model->encode(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message, "a video of 1 frame has no last frame; use one image, or 5 frames or more");
  EXPECT_EQ(refused.error().param, "image");
}

TEST(WanEngine, NeedsTheImagesThatClipReads) {
  for (const auto& [folder, name, takes] : {std::tuple("clip", "five", 1), {"flf", "nine", 2}}) {
    GenerationRequest request = golden::load({folder, name, "wan"}).request;
    if (takes == 1) request.images.push_back(request.images[0]);
    if (takes == 2) request.images.pop_back();
    const auto refused = load(golden::Case{folder, "", "wan"}.model_dir(), false)->encode(request);
    ASSERT_FALSE(refused) << folder;
    EXPECT_THAT(refused.error().message, HasSubstr("this model takes " + std::to_string(takes)));
    EXPECT_EQ(refused.error().param, "image");
  }
}

// Of one program: without and with an image, at three sizes.
TEST(WanEngine, MakesVideosOfTextAndOfAnImageWithOneModel) {
  const auto model = load(golden::Case{"ti2v", "", "wan"}.model_dir(), false);
  for (const char* name : {"text", "image", "still"}) {
    const golden::Golden golden = golden::load({"ti2v", name, "wan"});
    expect_video(unwrap(golden::draw(*model, golden.request)), golden, name);
  }
  golden::expect_compiled(*engines.back());
}

TEST(WanPrompts, AreCleanedAsFtfyDoes) {
  const auto rows =
      unwrap(parse_json(unwrap(read_file((golden::fixtures() / "wan/prompts.json").string())))).as_array();
  ASSERT_GT(rows.size(), 500u);
  for (const json::value& row : rows) {
    const std::string from(row.at(0).as_string()), to(row.at(1).as_string());
    EXPECT_EQ(prompt_clean(from), to) << json::serialize(row);
  }
}

TEST(WanFolder, RefusesFoldersThatDoNotFitTogether) {
  const auto problem = [](const std::string& from, const std::string& to, bool drop_second = false,
                          const std::string& folder = "two") {
    const std::filesystem::path copy = ::testing::TempDir() + "wan_folder";
    std::filesystem::remove_all(copy);
    std::filesystem::copy(golden::Case{folder, "", "wan"}.model_dir(), copy, std::filesystem::copy_options::recursive);
    if (drop_second) std::filesystem::remove_all(copy / "transformer_2");
    std::ifstream in(copy / "model_index.json");
    std::string text((std::istreambuf_iterator<char>(in)), {});
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    std::ofstream(copy / "model_index.json") << text;
    auto engine = unwrap(Engine::create({"cpu", "fp32", 1}, {&wan_family()}));
    const auto model = engine->load_model({"wan", copy.string()});
    EXPECT_FALSE(model);
    return model ? std::string() : model.error().message;
  };
  EXPECT_THAT(problem("0.875", "null"), HasSubstr("transformer_2 needs a boundary_ratio"));
  EXPECT_THAT(problem("0.875", "1.5"), HasSubstr("boundary_ratio must be between 0 and 1"));
  EXPECT_THAT(problem("\"expand_timesteps\": false", "\"expand_timesteps\": true"),
              HasSubstr("vae's pixels per latent pixel is 8, but those of a model with expand_timesteps is 16"));
  EXPECT_THAT(problem("WanPipeline", "WanImageToVideoPipeline"), HasSubstr("in_channels is 16, but twice vae's z_dim"));
  EXPECT_THAT(problem("\"image_encoder\": [\n    \"transformers\",\n    \"CLIPVisionModel\"\n  ]",
                      "\"image_encoder\": [null, null]", false, "clip"),
              HasSubstr("with an image_dim needs WanImageToVideoPipeline and an image_encoder"));
  EXPECT_THAT(problem("WanImageToVideoPipeline", "WanPipeline", false, "i2v"), HasSubstr("in_channels is 36"));
  const auto quantize = [](std::map<std::string, std::string> formats) {
    auto engine = unwrap(Engine::create({"cpu", "fp32", 1}, {&wan_family()}));
    const auto model = engine->load_model(
        {.name = "wan", .dir = golden::Case{"two", "", "wan"}.model_dir(), .quantize = std::move(formats)});
    return model ? std::string() : model.error().message;
  };
  EXPECT_EQ(quantize({{"transformer", "nf4"}, {"text_encoder", "nf4"}}), "");
  EXPECT_THAT(quantize({{"vae", "fp8"}}), HasSubstr("it must be transformer (fp8 or nf4) or text_encoder (nf4)"));
  EXPECT_THAT(quantize({{"transformer", "int3"}}), HasSubstr("is \"int3\"; it must be fp8 or nf4"));
  EXPECT_THAT(problem("0.875", "0.875", true), HasSubstr("transformer_2"));
  EXPECT_THAT(problem("UMT5EncoderModel", "T5EncoderModel"), HasSubstr("must be [LIBRARY, \"UMT5EncoderModel\"]"));
}

}  // namespace
}  // namespace ditfleet::pipeline
