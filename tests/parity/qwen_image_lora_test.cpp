// Pictures of Qwen-Image with adapters in every layout, compared with those of diffusers with PEFT:
// tests/fixtures/layouts/make_qwen3.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/device/failure.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

class QwenImageLora : public ::testing::Test {
 protected:
  static void TearDownTestSuite() {  // while CUDA is loaded
    model_.reset();
    engine_.reset();
  }
  static Model& model() {
    if (!engine_) {
      EngineOptions options = golden::test_options("fp32", 1);
      options.lora_slots = 4;
      engine_ = unwrap(Engine::create(options, {&qwen_image_family()}));
      model_ = unwrap(engine_->load_model({"m", golden::Case{"image", "", "qwen_image"}.model_dir()}));
    }
    return *model_;
  }

 private:
  inline static std::unique_ptr<Engine> engine_;
  inline static std::unique_ptr<Model> model_;
};

class QwenImageLoraLayout : public QwenImageLora, public ::testing::WithParamInterface<golden::Layout> {};

TEST_P(QwenImageLoraLayout, DrawsWhatDiffusersDraws) { golden::expect_layout(model(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, QwenImageLoraLayout, ::testing::ValuesIn(golden::all_layouts("qwen_image")),
                         [](const auto& info) { return info.param.picture.name + "_" + info.param.name; });

TEST_F(QwenImageLora, RefusesAnAdapterOfAnotherFamily) {
  GenerationRequest request = golden::load({"image", "plain", "qwen_image"}).request;
  request.loras = {{.path = (golden::fixtures() / "layouts/flux2/blocks/diffusers.safetensors").string()}};
  const auto refused = model().encode(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().param, "loras");
}

}  // namespace
}  // namespace ditfleet::pipeline
