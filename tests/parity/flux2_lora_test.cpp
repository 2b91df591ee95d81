// Pictures of FLUX.2 klein with adapters in every layout, compared with those of diffusers with PEFT:
// tests/fixtures/layouts/make_qwen3.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux2/flux2.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

class Flux2Lora : public ::testing::Test {
 protected:
  static void TearDownTestSuite() {  // while CUDA is loaded
    model_.reset();
    engine_.reset();
  }
  static Model& model() {
    if (!engine_) {
      EngineOptions options = golden::test_options("fp32", 1);
      options.lora_slots = 4;
      engine_ = unwrap(Engine::create(options, {&flux2_family()}));
      model_ = unwrap(engine_->load_model({"m", golden::Case{"klein", "", "flux2"}.model_dir()}));
    }
    return *model_;
  }

 private:
  inline static std::unique_ptr<Engine> engine_;
  inline static std::unique_ptr<Model> model_;
};

class Flux2LoraLayout : public Flux2Lora, public ::testing::WithParamInterface<golden::Layout> {};

TEST_P(Flux2LoraLayout, DrawsWhatDiffusersDraws) { golden::expect_layout(model(), GetParam()); }

INSTANTIATE_TEST_SUITE_P(All, Flux2LoraLayout, ::testing::ValuesIn(golden::all_layouts("flux2")),
                         [](const auto& info) { return info.param.picture.name + "_" + info.param.name; });

TEST_F(Flux2Lora, RefusesAnAdapterOfAnotherFamily) {
  GenerationRequest request = golden::load({"klein", "plain", "flux2"}).request;
  request.loras = {{.path = (golden::fixtures() / "layouts/z_image/blocks/diffusers.safetensors").string()}};
  const auto refused = model().encode(request);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().param, "loras");
}

}  // namespace
}  // namespace ditfleet::pipeline
