// Each stage of the pipeline against diffusers, fed with diffusers' own inputs of that stage, so that a failure
// names the stage. The limit is the project's: max |a − b| ≤ 1e-4 · max(1, max |reference|) in fp32.
// DITFLEET_TEST_DEVICE=cuda runs the same on a GPU, against the same references from a CPU: in fp32 the limit stays,
// since the pipeline keeps TF32 off.
#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "pipeline/families/flux/rope.h"
#include "pipeline/families/flux/transformer.h"
#include "pipeline/nn/text/clip_encoder.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/nn/vae/image_vae.h"
#include "pipeline/region/run/region.h"
#include "pipeline/sampling/latents.h"
#include "pipeline/sampling/schedule.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

using golden::distance;
constexpr double kLimit = 1e-4;
// bf16 keeps 8 bits; stages differ by a rounding here and there that later layers spread.
constexpr double kBf16Limit = 4e-2;

class FluxStage : public ::testing::TestWithParam<golden::Case> {
 protected:
  void SetUp() override {
    device_ = load_device(golden::test_device()).device;
    golden_ = golden::load(GetParam());
  }
  Placement placement() const { return {device_, golden_.bf16 ? c10::ScalarType::BFloat16 : c10::ScalarType::Float}; }
  at::Tensor input(const char* name) const { return golden_.tensor(name).to(device_); }
  double limit() const { return golden_.bf16 ? kBf16Limit : kLimit; }
  std::string dir(const char* part) const { return GetParam().model_dir() + "/" + part; }
  std::vector<std::int32_t> ids(const char* name) const {
    const at::Tensor t = golden_.tensor(name);
    const auto* data = t.const_data_ptr<std::int64_t>();
    return {data, data + t.numel()};
  }
  c10::Device device_{c10::DeviceType::CPU};
  golden::Golden golden_;
  c10::InferenceMode inference_{true};
};

TEST_P(FluxStage, PoolsWithClip) {
  const auto clip = ClipEncoder::load(dir("text_encoder"), placement());
  EXPECT_LE(distance(clip.pooled(ids("clip_ids")), golden_.tensor("pooled_prompt_embeds")), limit());
}

TEST_P(FluxStage, EncodesWithT5) {
  const auto t5 = T5Encoder::load(dir("text_encoder_2"), placement());
  EXPECT_LE(distance(t5.encode(ids("t5_ids")), golden_.tensor("prompt_embeds")), limit());
}

TEST_P(FluxStage, DrawsTheNoise) {
  const at::Tensor noise = golden_.tensor("noise");
  const at::Tensor drawn = draw_noise(golden_.request.seed, noise.sizes(), placement().dtype);
  EXPECT_EQ(drawn.scalar_type(), noise.scalar_type());
  EXPECT_LE(distance(drawn, noise), 5e-6);  // AVX and scalar code differ by 2e-6
}

TEST_P(FluxStage, SetsTheSchedule) {
  const auto config = read_scheduler_config(ConfigFile(dir("scheduler") + "/scheduler_config.json"));
  const at::Tensor noise = golden_.tensor("noise"), sigmas = golden_.tensor("sigmas"),
                   steps = golden_.tensor("timesteps");
  const Schedule schedule = make_schedule(config, *golden_.request.fields.integer("num_inference_steps"),
                                          noise.size(2) / 2 * (noise.size(3) / 2));
  ASSERT_EQ(schedule.sigmas.size(), static_cast<std::size_t>(sigmas.numel()));
  ASSERT_EQ(schedule.timesteps.size(), static_cast<std::size_t>(steps.numel()));
  for (std::size_t i = 0; i < schedule.sigmas.size(); ++i)
    EXPECT_FLOAT_EQ(schedule.sigmas[i], sigmas.const_data_ptr<float>()[i]) << "sigma " << i;
  for (std::size_t i = 0; i < schedule.timesteps.size(); ++i)
    EXPECT_FLOAT_EQ(schedule.timesteps[i], steps.const_data_ptr<float>()[i]) << "timestep " << i;
}

// Without true CFG, which needs the negative prompt's embeddings too: flux_engine_test.cpp has it.
class FluxDenoising : public FluxStage {};

TEST_P(FluxDenoising, Denoises) {
  const auto host = region::make_region_host(golden::test_compile(), device_, nullptr);
  auto transformer = FluxTransformer::load({.files = dir("transformer"), .regions = host}, placement());
  Transformer::compile({&transformer}, host);
  const at::Tensor noise = input("noise"), prompt = input("prompt_embeds"), sigmas = input("sigmas");
  const auto table = transformer.modulation(input("timesteps"), *golden_.request.fields.real("guidance_scale"),
                                            input("pooled_prompt_embeds"));
  const at::Tensor rope =
      rope_table(transformer.config(), prompt.size(1), {{noise.size(2) / 2, noise.size(3) / 2}}, placement());
  const at::Tensor text = transformer.embed_text(prompt);
  at::Tensor tokens = pack_latents(noise);
  for (int i = 0; i < *golden_.request.fields.integer("num_inference_steps"); ++i)
    tokens = euler_step(tokens, transformer.velocity(tokens, text, table.step(i), rope), sigmas[i], sigmas[i + 1]);
  const double d = distance(tokens, golden_.tensor("latents"));
  RecordProperty("distance", std::to_string(d));
  EXPECT_LE(d, limit());
}

TEST_P(FluxStage, DecodesLatents) {
  const auto vae =
      ImageVae::load(dir("vae"), placement(), region::make_region_host(golden::test_compile(), device_, nullptr));
  const at::Tensor noise = golden_.tensor("noise");
  const at::Tensor latents = unpack_latents(input("latents"), noise.size(2) / 2, noise.size(3) / 2);
  const at::Tensor image = unit_range(vae.decode(latents));
  EXPECT_LE(distance(image, golden_.tensor("image")), limit());
  const Media pixels = to_media(image);
  const at::Tensor reference = golden_.tensor("pixels");
  ASSERT_EQ(pixels.rgb.size(), static_cast<std::size_t>(reference.numel()));
  int most = 0;
  double sum = 0;
  for (std::size_t i = 0; i < pixels.rgb.size(); ++i) {
    const int d = std::abs(int{pixels.rgb[i]} - int{reference.const_data_ptr<std::uint8_t>()[i]});
    most = std::max(most, d);
    sum += d;
  }
  if (!golden_.bf16) {
    EXPECT_LE(most, 1);
    EXPECT_LE(sum / static_cast<double>(pixels.rgb.size()), 0.02);
  } else {
    EXPECT_LE(sum / static_cast<double>(pixels.rgb.size()), 2);
  }
}

std::string name_of(const ::testing::TestParamInfo<golden::Case>& info) {
  return info.param.folder + "_" + info.param.name;
}

std::vector<golden::Case> cases_without_cfg() {
  std::vector<golden::Case> cases;
  for (const auto& one : golden::all_cases())
    if (!golden::load(one).request.fields.has("negative_prompt")) cases.push_back(one);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Cases, FluxStage, ::testing::ValuesIn(golden::all_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Cases, FluxDenoising, ::testing::ValuesIn(cases_without_cfg()), name_of);

}  // namespace
}  // namespace ditfleet::pipeline
