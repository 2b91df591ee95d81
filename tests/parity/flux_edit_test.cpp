// FLUX.1 with pictures as inputs, against diffusers' image to image, inpainting and Kontext:
// tests/fixtures/flux/make_edit.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pipeline/device/failure.h"
#include "pipeline/families/flux/flux.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using ::testing::HasSubstr;

std::vector<std::unique_ptr<Engine>> engines;  // outlive their models

std::unique_ptr<Model> open(const golden::Case& which, bool bf16 = false) {
  engines.push_back(unwrap(Engine::create(golden::test_options(bf16 ? "bf16" : "fp32", 1), {&flux_family()})));
  return unwrap(engines.back()->load_model({"f", which.model_dir()}));
}

class FluxEdit : public ::testing::TestWithParam<golden::Case> {};

TEST_P(FluxEdit, DrawsWhatDiffusersDraws) {
  const auto model = open(GetParam(), golden::load(GetParam()).bf16);
  golden::expect_case(*model, GetParam());
  golden::expect_compiled(*engines.back());
}

INSTANTIATE_TEST_SUITE_P(Cases, FluxEdit, ::testing::ValuesIn(golden::all_cases("flux/edit")),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

const golden::Case kInpaint{"dev", "inpaint", "flux/edit"}, kKontext{"kontext", "plain", "flux/edit"};

std::string refusal_of(Model& model, const GenerationRequest& request, const std::string& param) {
  const auto refused = model.encode(request);
  if (refused) return "accepted";
  EXPECT_EQ(refused.error().param, param);
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  return refused.error().message;
}

TEST(FluxEditEngine, RefusesWhatDoesNotGoTogether) {
  const auto dev = open(kInpaint), kontext = open(kKontext);
  const GenerationRequest inpaint = golden::load(kInpaint).request, edit = golden::load(kKontext).request;

  GenerationRequest request = inpaint;
  request.images.clear();
  EXPECT_THAT(refusal_of(*dev, request, "mask"), HasSubstr("mask is given without image"));
  request.mask.reset();
  EXPECT_THAT(refusal_of(*dev, request, "strength"), HasSubstr("strength is given without image"));
  request = inpaint;
  request.fields.set("strength", 0.0);
  EXPECT_THAT(refusal_of(*dev, request, "strength"), HasSubstr("above 0 and at most 1"));
  request = inpaint;
  request.images.push_back(request.images[0]);
  EXPECT_THAT(refusal_of(*dev, request, "image"), HasSubstr("takes 1"));
  request = edit;
  request.mask = inpaint.mask;
  EXPECT_THAT(refusal_of(*kontext, request, "mask"), HasSubstr("mask does not apply to this model"));
  request = edit;
  request.images = {std::make_shared<const Media>(Media{9, 200, 1, 0, std::vector<std::uint8_t>(9 * 200 * 3)})};
  EXPECT_THAT(refusal_of(*kontext, request, "image"), HasSubstr("both sides must be at least 16 pixels"));
}

// The default area with the picture's aspect ratio.
TEST(FluxEditEngine, TakesTheSizeFromThePicture) {
  const auto dev = open(kInpaint);
  GenerationRequest request;
  request.images = {std::make_shared<const Media>(Media{300, 100, 1, 0, std::vector<std::uint8_t>(300 * 100 * 3, 60)})};
  const RequestSize size = unwrap(dev->size_of(request));
  EXPECT_EQ(size.images, 1);
  EXPECT_NEAR(static_cast<double>(size.width) / size.height, 3, 0.15);
  GenerationRequest plain;
  const RequestSize square = unwrap(dev->size_of(plain));
  EXPECT_EQ(square.width, square.height);
  EXPECT_LE(size.pixels(), square.pixels());
}

// A job's images share the picture's latents, and their seeds follow each other.
TEST(FluxEditEngine, TheFirstSeedSamplesThePicture) {
  const auto dev = open(kInpaint);
  GenerationRequest alone = golden::load({"dev", "images", "flux/edit"}).request;
  ++alone.seed;
  GenerationRequest second = alone;
  second.number = 1;
  EXPECT_NE(unwrap(golden::draw(*dev, alone)).rgb, unwrap(golden::draw(*dev, second)).rgb);
}

}  // namespace
}  // namespace ditfleet::pipeline
