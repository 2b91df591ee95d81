// What lies between a VAE's convolutions, compiled, against LibTorch's operations and fp64. Needs a GPU: skipped on a
// CPU, where nothing of a VAE is compiled.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/group_norm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/upsample_nearest2d.h>

#include <array>
#include <cmath>

#include "pipeline/nn/vae/image_vae.h"
#include "pipeline/region/programs/channels_last.h"
#include "tests/parity/region_fixture.h"
#include "tests/parity/vae_slots.h"

namespace ditfleet::region {
namespace {

using c10::ScalarType;
using pipeline::ImageVae;
using pipeline::Placement;

class RegionParityVae : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device().is_cpu()) GTEST_SKIP() << "DITFLEET_TEST_DEVICE names no GPU, and on a CPU a VAE runs eagerly";
    host_ = host();
    programs_ = make_channels_last(*host_);
    ASSERT_TRUE(programs_);
  }
  at::Tensor random(at::IntArrayRef sizes, ScalarType type, double mean = 0, double deviation = 1) {
    const at::Tensor made =
        (at::randn(sizes, at::TensorOptions(ScalarType::Float)) * deviation + mean).to(device(), type);
    return made.dim() == 4 ? made.contiguous(c10::MemoryFormat::ChannelsLast) : made;
  }

  const c10::InferenceMode inference_;
  std::shared_ptr<RegionHost> host_;
  std::shared_ptr<const ChannelsLast> programs_;
};

double distance(const at::Tensor& got, const at::Tensor& wanted) {
  return testing::relative_error(got.to(ScalarType::Double), wanted);
}

// Channels that whole vectors divide and that they do not, more than a block has threads for, one pixel, groups of one
// channel and one group, means that are large beside the deviation.
TEST_F(RegionParityVae, NormalizesAsEagerDoesOrBetter) {
  struct Case {
    std::int64_t batch, channels, height, width, groups;
    double mean;
  };
  for (const Case& c : std::initializer_list<Case>{{1, 128, 64, 64, 32, 0},
                                                   {2, 512, 24, 40, 32, 0.5},
                                                   {1, 256, 96, 32, 32, 300},
                                                   {3, 6, 17, 5, 3, 1},
                                                   {1, 20, 9, 9, 4, 0},
                                                   {1, 4096, 8, 8, 32, 0},
                                                   {2, 1001, 7, 3, 7, 0},
                                                   {1, 64, 1, 1, 2, 0},
                                                   {1, 8, 33, 31, 8, 0},
                                                   {1, 32, 300, 300, 1, 2}})
    for (const ScalarType type : {ScalarType::BFloat16, ScalarType::Float})
      for (const bool silu : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << c.batch << "x" << c.channels << "x" << c.height << "x" << c.width << " in " << c.groups
                     << " groups, mean " << c.mean << ", " << c10::toString(type) << (silu ? ", SiLU" : ""));
        const at::Tensor x = random({c.batch, c.channels, c.height, c.width}, type, c.mean),
                         bias = random({c.channels}, type, 0, 0.3);
        const ChannelsLast::GroupNorm norm{random({c.channels}, type, 1, 0.3), random({c.channels}, type, 0, 0.3),
                                           c.groups, 1e-6};
        const auto reference = [&](ScalarType in) {
          const at::Tensor y = at::group_norm(x.to(in) + bias.to(in).view({1, -1, 1, 1}), c.groups, norm.weight.to(in),
                                              norm.bias.to(in), norm.eps);
          return silu ? at::silu(y) : y;
        };
        const at::Tensor wanted = reference(ScalarType::Double), eager = reference(type);
        at::Tensor into = x.clone();
        const at::Tensor got = programs_->normalize(x, programs_->sums(x, bias), bias, norm, silu, false);
        const at::Tensor in_place = programs_->normalize(into, programs_->sums(into, bias), bias, norm, silu, true);
        EXPECT_LE(distance(got, wanted), 1.1 * distance(eager, wanted) + (type == ScalarType::Float ? 1e-6 : 1e-4));
        EXPECT_TRUE(in_place.equal(got)) << "the same sums in the same order";
        EXPECT_TRUE(in_place.is_same(into));
      }
}

TEST_F(RegionParityVae, AddsAndSumsUp) {
  for (const ScalarType type : {ScalarType::BFloat16, ScalarType::Float})
    for (const std::int64_t channels : {16, 10}) {
      const at::Tensor x = random({2, channels, 30, 18}, type), bias = random({channels}, type),
                       bias_2 = random({channels}, type);
      at::Tensor y = random({2, channels, 30, 18}, type);
      const auto shaped = [](const at::Tensor& t) { return t.to(ScalarType::Float).view({1, -1, 1, 1}); };
      const at::Tensor wanted =
          (x.to(ScalarType::Float) + shaped(bias) + shaped(bias_2) + y.to(ScalarType::Float)).to(type);
      const auto sums = programs_->add(x, y, bias, bias_2);
      EXPECT_LE(testing::relative_error(y, wanted), type == ScalarType::Float ? 1e-6 : 1e-3);
      const ChannelsLast::GroupNorm norm{random({channels}, type), random({channels}, type), 2, 1e-6};
      EXPECT_LE(distance(programs_->normalize(y, sums, {}, norm, false, false),
                         programs_->normalize(y, programs_->sums(y), {}, norm, false, false)),
                type == ScalarType::Float ? 1e-6 : 1e-3)
          << "the sums of what was added are those of the result";
    }
}

// Channels that whole vectors divide and that they do not, fewer and more than a warp has lanes for.
TEST_F(RegionParityVae, NormalizesPixels) {
  for (const ScalarType type : {ScalarType::BFloat16, ScalarType::Float})
    for (const std::int64_t channels : {3, 4, 16, 30, 96, 384, 1000})
      for (const bool silu : {false, true}) {
        SCOPED_TRACE(std::to_string(channels) + (silu ? ", SiLU" : ""));
        const at::Tensor x = random({3, channels, 21, 34}, type, 0.5), bias = random({channels}, type),
                         weight = random({channels, 1, 1}, type, 1, 0.3);
        const at::Tensor wide = x.to(ScalarType::Double) + bias.to(ScalarType::Double).view({1, -1, 1, 1});
        at::Tensor wanted = wide / wide.square().sum({1}, /*keepdim=*/true).sqrt() *
                            std::sqrt(static_cast<double>(channels)) * weight.to(ScalarType::Double);
        if (silu) wanted = at::silu(wanted);
        const at::Tensor got = at::empty_like(x);
        programs_->normalize_pixels(x, bias, weight, silu, got);
        EXPECT_LE(distance(got, wanted), type == ScalarType::Float ? 1e-6 : 3e-3);
        at::Tensor y = random({3, channels, 21, 34}, type);
        const at::Tensor sum = wide + y.to(ScalarType::Double);
        programs_->add_pixels(x, y, {}, bias);
        EXPECT_LE(distance(y, sum), type == ScalarType::Float ? 1e-6 : 3e-3);
      }
}

TEST_F(RegionParityVae, UpsamplesExactly) {
  for (const ScalarType type : {ScalarType::BFloat16, ScalarType::Float})
    for (const auto& [batch, channels, height, width] : std::initializer_list<std::array<std::int64_t, 4>>{
             {1, 128, 16, 24}, {2, 7, 5, 3}, {1, 1, 1, 1}, {3, 512, 9, 40}}) {
      const at::Tensor x = random({batch, channels, height, width}, type);
      const at::Tensor wanted =
          at::upsample_nearest2d(x, c10::OptionalArrayRef<std::int64_t>(), std::array<double, 2>{2.0, 2.0});
      EXPECT_TRUE(programs_->upsample(x).equal(wanted));
    }
}

TEST_F(RegionParityVae, DecodesAsEagerDoesOrBetter) {
  pipeline::VaeConfig flux = pipeline::testing::flux_vae_config(), other = flux;
  other.block_out_channels = {24, 40};
  other.up_block_attention = {true, false};
  other.norm_num_groups = 4;
  other.post_quant_conv = true;
  other.activation = pipeline::find_activation("gelu");
  for (const auto& config : {flux, other})
    for (const ScalarType type : {ScalarType::BFloat16, ScalarType::Float}) {
      const Placement placement{device(), type};
      const ImageVae compiled(config, pipeline::testing::random_vae_slots(config, placement), host_),
          eager(config, pipeline::testing::random_vae_slots(config, placement), nullptr);
      const at::Tensor latents = random({2, 16, 24, 32}, type);
      const ImageVae fp32(config, pipeline::testing::random_vae_slots(config, {device(), ScalarType::Float}), nullptr);
      const at::Tensor wanted = fp32.decode(latents.to(ScalarType::Float)), got = compiled.decode(latents),
                       by_eager = eager.decode(latents);
      EXPECT_GT(wanted.std().item<double>(), 0.1);
      if (type == ScalarType::BFloat16)
        EXPECT_LE(testing::relative_error(got, wanted), 1.1 * testing::relative_error(by_eager, wanted));
      else
        EXPECT_LE(testing::relative_error(got, wanted), 1e-4);
      EXPECT_TRUE(compiled.decode(latents).equal(got)) << "twice the same";
      EXPECT_LE(testing::relative_error(compiled.decode(latents.narrow(0, 1, 1)), got.narrow(0, 1, 1)),
                type == ScalarType::Float ? 1e-4 : 2e-2)
          << "alone as in a batch";
    }
}

}  // namespace
}  // namespace ditfleet::region
