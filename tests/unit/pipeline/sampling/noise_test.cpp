// Compares noise with torch.randn of torch 2.11 on a CPU generator, and tests packing.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "pipeline/sampling/latents.h"

namespace ditfleet::pipeline {
namespace {

std::vector<float> first(const at::Tensor& t, std::size_t n) {
  const at::Tensor flat = t.flatten().to(c10::ScalarType::Float).contiguous();
  return {flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + n};
}

void expect_near(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i], want[i], 3e-6) << i;  // AVX and scalar code differ by 2e-6
}

TEST(Noise, MatchesTorch) {
  const std::vector<float> seed5{-0.4867807626724243f, -0.6038215756416321f, -0.5580962300300598f, 0.6675242781639099f};
  expect_near(first(draw_noise(5, {1, 1, 2, 4}, c10::ScalarType::Float), 4), seed5);
  // torch draws fewer than 16 values one by one, and more by a vectorized method with another sequence.
  expect_near(first(draw_noise(5, {1, 4, 2, 4}, c10::ScalarType::Float), 4),
              {1.8423298597335815f, 0.5188871622085571f, -1.7119213342666626f, -1.7013792991638184f});
}

TEST(Noise, Bf16HasItsOwnSequence) {
  const at::Tensor noise = draw_noise(5, {1, 4, 2, 4}, c10::ScalarType::BFloat16);
  EXPECT_EQ(noise.scalar_type(), c10::ScalarType::BFloat16);
  const std::vector<float> want{0.96875f, 1.3984375f, 1.8828125f, -0.09228515625f};
  const auto got = first(noise, 4);
  for (std::size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 0.008) << i;
}

TEST(Noise, UsesTheLow32BitsOfASeed) {
  const auto fp32 = c10::ScalarType::Float;
  EXPECT_TRUE(
      at::equal(draw_noise((std::int64_t{1} << 40) + 5, {1, 1, 2, 4}, fp32), draw_noise(5, {1, 1, 2, 4}, fp32)));
  EXPECT_TRUE(
      at::equal(draw_noise(-3, {1, 1, 2, 4}, fp32), draw_noise((std::int64_t{1} << 32) - 3, {1, 1, 2, 4}, fp32)));
  EXPECT_FALSE(at::equal(draw_noise(6, {1, 1, 2, 4}, fp32), draw_noise(5, {1, 1, 2, 4}, fp32)));
}

TEST(Latents, PacksTwoByTwoPixelsChannelFirst) {
  const at::Tensor latents = at::arange(2 * 4 * 6, c10::ScalarType::Float).view({1, 2, 4, 6});
  const at::Tensor tokens = pack_latents(latents);
  ASSERT_EQ(tokens.sizes(), (std::vector<std::int64_t>{1, 6, 8}));
  EXPECT_EQ(first(tokens[0][1], 8), (std::vector<float>{2, 3, 8, 9, 26, 27, 32, 33}));
  EXPECT_TRUE(at::equal(unpack_latents(tokens, 2, 3), latents));
}

TEST(Latents, PixelsRoundHalfToEvenAndClamp) {
  const at::Tensor unit = (at::arange(4, c10::ScalarType::Float) + 0.5).div(255).view({1, 1, 2, 2});
  const Media image = to_media(unit);
  EXPECT_EQ(image.width, 2);
  EXPECT_EQ(image.height, 2);
  EXPECT_EQ(image.rgb, (std::vector<std::uint8_t>{0, 0, 0, 2, 2, 2, 2, 2, 2, 4, 4, 4}));
  const at::Tensor decoded = (at::arange(4, c10::ScalarType::Float) - 1.5).view({1, 1, 2, 2});
  EXPECT_EQ(first(unit_range(decoded), 4), (std::vector<float>{0, 0.25, 0.75, 1}));
}

}  // namespace
}  // namespace ditfleet::pipeline
