// The video VAE against what diffusers computed (tests/fixtures/wan/vae/make_vae.py). DITFLEET_TEST_DEVICE=cuda runs
// the compiled implementation.
#include <gtest/gtest.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/randn.h>
#include <c10/core/InferenceMode.h>

#include <filesystem>
#include <fstream>

#include "pipeline/device/failure.h"
#include "pipeline/nn/video_vae/video_vae.h"
#include "tests/parity/flux_golden.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::pipeline {
namespace {

std::string fixture(const std::string& name) { return (golden::fixtures() / "wan/vae" / name).string(); }

struct Case {
  const char* folder;
  int frames;
};

class VideoVaeCase : public ::testing::TestWithParam<std::tuple<Case, bool>> {
 protected:
  at::Tensor read(const std::string& kind) const {
    const Case& c = std::get<0>(GetParam());
    return golden::read_tensor(fixture(std::string(c.folder) + ".safetensors"), kind);
  }
  std::string frames() const { return std::to_string(std::get<0>(GetParam()).frames); }
  bool bf16() const { return std::get<1>(GetParam()); }
  VideoVae load() const {
    const c10::Device where = region::device();
    return VideoVae::load(fixture(std::get<0>(GetParam()).folder), {where, bf16() ? at::kBFloat16 : at::kFloat}, true,
                          where.is_cpu() ? nullptr : region::host());
  }
  // In bf16 the limit is 1.5 × diffusers' own distance to fp32.
  void compare(const at::Tensor& got, const std::string& want) const {
    const at::Tensor fp32 = read(want);
    ASSERT_EQ(got.sizes(), fp32.sizes());
    const double limit = bf16() ? 1.5 * golden::distance(read(want + "-bf16").to(at::kFloat), fp32) : 4e-4;
    EXPECT_LE(golden::distance(got.to(at::kFloat), fp32), limit);
  }
  const c10::InferenceMode mode_;
};

class Decodes : public VideoVaeCase {};
class Encodes : public VideoVaeCase {};

TEST_P(Decodes, WhatDiffusersDecodes) {
  std::vector<at::Tensor> chunks;
  load().decode(read("decode-" + frames()), [&](const at::Tensor& frames) {
    EXPECT_EQ(frames.size(2), chunks.empty() ? 1 : 4);
    chunks.push_back(frames.to(at::kCPU, at::kFloat));
  });
  compare(at::cat(chunks, 2), "frames-" + frames());
}

TEST_P(Encodes, WhatDiffusersEncodes) {
  const at::Tensor latents = load().encode(read("encode-" + frames()));
  EXPECT_EQ(latents.scalar_type(), at::kFloat);
  compare(latents.cpu(), "latents-" + frames());
}

const auto name = [](const auto& info) {
  const auto& [c, bf16] = info.param;
  return std::string(c.folder) + "_" + std::to_string(c.frames) + (bf16 ? "_bf16" : "");
};
using ::testing::Combine;
using ::testing::Values;
INSTANTIATE_TEST_SUITE_P(Fp32, Decodes,
                         Combine(Values(Case{"plain", 1}, Case{"plain", 5}, Case{"plain", 9}, Case{"plain", 17},
                                        Case{"plain", 33}, Case{"odd", 13}, Case{"residual", 1}, Case{"residual", 9},
                                        Case{"residual", 17}, Case{"residual_odd", 13}),
                                 Values(false)),
                         name);
const auto kBf16 =
    Combine(Values(Case{"plain", 9}, Case{"odd", 13}, Case{"residual", 9}, Case{"residual_odd", 13}), Values(true));
INSTANTIATE_TEST_SUITE_P(Bf16, Decodes, kBf16, name);
INSTANTIATE_TEST_SUITE_P(Fp32, Encodes,
                         Combine(Values(Case{"plain", 1}, Case{"plain", 5}, Case{"plain", 9}, Case{"odd", 13},
                                        Case{"residual", 1}, Case{"residual", 9}, Case{"residual_odd", 13}),
                                 Values(false)),
                         name);
INSTANTIATE_TEST_SUITE_P(Bf16, Encodes, kBf16, name);

// Sizes and channels that the goldens do not have.
TEST(VideoVaeCompiled, DecodesAsEagerDoes) {
  if (region::device().is_cpu()) GTEST_SKIP() << "DITFLEET_TEST_DEVICE names no GPU, and on a CPU a VAE runs eagerly";
  const c10::InferenceMode mode;
  for (const char* folder : {"vae/plain", "vae/odd", "vae/residual", "vae/residual_odd", "one/model/vae"}) {
    const auto load = [&](std::shared_ptr<region::RegionHost> host) {
      return VideoVae::load((golden::fixtures() / "wan" / folder).string(), {region::device()}, true, std::move(host));
    };
    const VideoVae eager = load(nullptr), compiled = load(region::host());
    for (const auto& [height, width] : {std::pair(6, 8), std::pair(1, 5), std::pair(9, 3)}) {
      SCOPED_TRACE(std::string(folder) + ' ' + std::to_string(height));
      const at::Tensor latents = at::randn({1, eager.config().z_dim, 3, height, width}, at::kFloat);
      std::vector<at::Tensor> want, got;
      eager.decode(latents, [&](const at::Tensor& frames) { want.push_back(frames.cpu()); });
      compiled.decode(latents, [&](const at::Tensor& frames) { got.push_back(frames.cpu()); });
      for (std::size_t i = 0; i < want.size(); ++i)
        EXPECT_LE(golden::distance(got[i].contiguous(), want[i].contiguous()), 4e-4) << "chunk " << i;
      const at::Tensor video = at::cat(want, 2);
      EXPECT_LE(golden::distance(compiled.encode(video).cpu(), eager.encode(video).cpu()), 4e-4);
    }
  }
}

TEST(VideoVaeConfig, RefusesWhatIsNotSupported) {
  const auto refused = [](const std::string& text) {
    const std::string file = ::testing::TempDir() + "video_vae.json";
    std::ofstream(file) << text;
    try {
      read_video_vae_config(ConfigFile(file));
    } catch (const Failure& failure) {
      return failure.error().message;
    }
    return std::string("accepted");
  };
  const auto expect = [&](const std::string& text, const std::string& part) {
    EXPECT_NE(refused(text).find(part), std::string::npos) << refused(text);
  };
  expect(R"({"_class_name": "AutoencoderKL"})", "it must be AutoencoderKLWan");
  expect(R"({"is_residual": true, "dim_mult": [1, 2, 3, 2]})", "192 channels of 4 pixels are not a multiple of 288");
  expect(R"({"patch_size": 2})", "scale_factor_spatial is 8; it must be 16");
  expect(R"({"temperal_downsample": [true, 1, false]})", "must be a list of true and false");
  expect(R"({"temperal_downsample": [true, true]})", "has 2 entries; it must have 3");
  expect(R"({"latents_std": [1, 2]})", "latents_std has 2 entries; it must have 16");
  expect(R"({"attn_scales": [1.0]})", "attn_scales must be empty");
  EXPECT_EQ(refused("{}"), "accepted");
}

TEST(VideoVaeShapes, AreChecked) {
  const c10::InferenceMode mode;
  const auto vae = VideoVae::load(fixture("plain"), {}, false);
  EXPECT_THROW(vae.decode(at::Tensor(golden::read_tensor(fixture("plain.safetensors"), "encode-1")), {}), Failure);
  EXPECT_THROW(vae.encode(golden::read_tensor(fixture("plain.safetensors"), "encode-1")), Failure);
}

}  // namespace
}  // namespace ditfleet::pipeline
