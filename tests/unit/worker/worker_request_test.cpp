#include <gtest/gtest.h>

#include <climits>

#include "worker/models/request.h"

namespace ditfleet::worker {
namespace {

job::JobSpec complete() {
  job::JobSpec spec;
  spec.model = "m";
  spec.prompt = "a red circle";
  spec.n = 2;
  spec.fields.set("width", 320);
  spec.fields.set("height", 192);
  spec.fields.set("num_inference_steps", 7);
  spec.fields.set("guidance_scale", 3.5);
  spec.fields.set("true_cfg_scale", 2.0);
  spec.fields.set("max_sequence_length", 128);
  spec.seed = 41;
  return spec;
}

TEST(Request, CarriesEveryField) {
  auto spec = complete();
  spec.fields.set("negative_prompt", "");
  const auto request = request_of(spec, 1);
  EXPECT_EQ(request.prompt, "a red circle");
  EXPECT_TRUE(request.fields.has("negative_prompt")) << "an empty negative prompt counts as given";
  EXPECT_EQ(request.fields.integer("width"), 320);
  EXPECT_EQ(request.fields.integer("height"), 192);
  EXPECT_EQ(request.fields.integer("num_inference_steps"), 7);
  EXPECT_EQ(request.fields.real("guidance_scale"), 3.5);
  EXPECT_EQ(request.fields.real("true_cfg_scale"), 2.0);
  EXPECT_EQ(request.fields.integer("max_sequence_length"), 128);
  EXPECT_EQ(request.seed, 42);
}

TEST(Request, SeedsPastTheLastGoOnModulo2To64) {
  auto spec = complete();
  spec.seed = INT64_MAX;
  EXPECT_EQ(request_of(spec, 1).seed, INT64_MIN);
}

TEST(Request, PreviewsAreSpreadEvenlyAndNeverAtTheEnd) {
  EXPECT_EQ(preview_steps(20, 3), (std::vector{5, 10, 15}));
  EXPECT_EQ(preview_steps(4, 1), (std::vector{2}));
  EXPECT_EQ(preview_steps(2, 3), (std::vector{1}));
  EXPECT_TRUE(preview_steps(1, 3).empty());
  EXPECT_TRUE(preview_steps(20, 0).empty());
}

}  // namespace
}  // namespace ditfleet::worker
