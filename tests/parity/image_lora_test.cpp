// Pictures of FLUX.2 klein, Qwen-Image and Z-Image with adapters in every layout, compared with those of diffusers with
// PEFT: tests/fixtures/layouts/make_qwen3.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/z_image/z_image.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

struct Row {
  const Family& (*family)();
  golden::Case plain;
  std::string other;  // an adapter of another family
};
const std::map<std::string, Row> kRows = {
    {"flux2", {flux2_family, {"klein", "plain", "flux2"}, "z_image/blocks/diffusers.safetensors"}},
    {"qwen_image", {qwen_image_family, {"image", "plain", "qwen_image"}, "flux2/blocks/diffusers.safetensors"}},
    {"z_image", {z_image_family, {"turbo", "plain", "z_image"}, "flux2/blocks/diffusers.safetensors"}}};

// An engine and a model for each family.
class ImageLora : public ::testing::Test {
 protected:
  static void TearDownTestSuite() {  // while CUDA is loaded
    models_.clear();
    engines_.clear();
  }
  static Model& model(const std::string& family) {
    auto& model = models_[family];
    if (!model) {
      const Row& row = kRows.at(family);
      EngineOptions options = golden::test_options("fp32", 1);
      options.lora_slots = 4;
      engines_[family] = unwrap(Engine::create(options, {&row.family()}));
      model = unwrap(engines_[family]->load_model({"m", row.plain.model_dir()}));
    }
    return *model;
  }

 private:
  inline static std::map<std::string, std::unique_ptr<Engine>> engines_;
  inline static std::map<std::string, std::unique_ptr<Model>> models_;
};

class ImageLoraLayout : public ImageLora, public ::testing::WithParamInterface<golden::Layout> {};

TEST_P(ImageLoraLayout, DrawsWhatDiffusersDraws) {
  golden::expect_layout(model(GetParam().picture.folder), GetParam());
}

std::vector<golden::Layout> layouts() {
  std::vector<golden::Layout> all;
  for (const auto& [family, row] : kRows)
    for (golden::Layout& layout : golden::all_layouts(family)) all.push_back(std::move(layout));
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, ImageLoraLayout, ::testing::ValuesIn(layouts()), [](const auto& info) {
  return info.param.picture.folder + "_" + info.param.picture.name + "_" + info.param.name;
});

class ImageLoraFamily : public ImageLora, public ::testing::WithParamInterface<std::string> {};

TEST_P(ImageLoraFamily, RefusesAnAdapterOfAnotherFamily) {
  const Row& row = kRows.at(GetParam());
  GenerationRequest request = golden::load(row.plain).request;
  request.loras = {{.path = (golden::fixtures() / "layouts" / row.other).string()}};
  const auto refused = model(GetParam()).encode(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().param, "loras");
}

INSTANTIATE_TEST_SUITE_P(All, ImageLoraFamily, ::testing::Values("flux2", "qwen_image", "z_image"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ditfleet::pipeline
