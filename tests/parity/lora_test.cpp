// Pictures with adapters against those of diffusers with PEFT (tests/fixtures/lora), every format of a file against
// the first, and that requests with different adapters do not see one another.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/kron.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <span>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/adapter_names.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/lora/packed.h"
#include "pipeline/nn/linear.h"
#include "pipeline/weights/safetensors.h"
#include "pipeline/weights/safetensors_writer.h"
#include "shared/core/json.h"
#include "tests/parity/flux_golden.h"
#include "tests/paths.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

fs::path fixtures() {
  return fs::path(golden::Case{"dev", "plain"}.model_dir()).parent_path().parent_path().parent_path() / "lora";
}
std::string adapter(const std::string& name) { return (fixtures() / "adapters" / (name + ".safetensors")).string(); }

struct LoraGolden {
  std::string path;
  GenerationRequest request;
  at::Tensor tensor(const std::string& name) const { return golden::read_tensor(path, name); }
};

LoraGolden load(const std::string& name) {
  LoraGolden g{(fixtures() / (name + ".safetensors")).string(), {}};
  const auto file = unwrap(SafetensorsFile::open(g.path));
  const json::object spec = unwrap(parse_json(file.metadata().at("request"))).as_object();
  const auto whole = [&](const char* key) { return spec.at(key).to_number<int>(); };
  g.request.prompt = std::string(spec.at("prompt").as_string());
  g.request.fields.set("width", whole("width"));
  g.request.fields.set("height", whole("height"));
  g.request.fields.set("num_inference_steps", whole("steps"));
  g.request.fields.set("guidance_scale", spec.at("guidance").to_number<double>());
  g.request.fields.set("max_sequence_length", whole("max_sequence_length"));
  g.request.seed = whole("seed");
  for (const auto& lora : spec.at("loras").as_array())
    g.request.loras.push_back({adapter(std::string(lora.at(0).as_string())), lora.at(1).to_number<double>()});
  return g;
}

struct Drawn {
  Media image;
  at::Tensor latents, pooled, embeds;
  std::vector<std::string> warnings;
};

class LoraTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    EngineOptions options = golden::test_options("fp32", 0);
    options.lora_slots = 4;
    options.max_lora_rank = 32;  // of LoKr
    engine_ = unwrap(Engine::create(options, {&flux_family()})).release();
    model_ = unwrap(engine_->load_model({"golden", golden::Case{"dev", "plain"}.model_dir()})).release();
  }
  static void TearDownTestSuite() {
    delete model_;
    delete engine_;
  }
  static Model& model() { return *model_; }

  static Drawn draw(const GenerationRequest& request) {
    auto prepared = unwrap(model().encode(request));
    unwrap(model().denoise(*prepared, nullptr));
    Drawn drawn{unwrap(model().decode(*prepared)), {}, {}, {}, prepared->warnings()};
    const std::string dump = (fs::temp_directory_path() / ("ditfleet_lora_" + std::to_string(::getpid()) + "_" +
                                                           std::to_string(++dumps_) + ".safetensors"))
                                 .string();
    unwrap(prepared->dump(dump));
    drawn.latents = golden::read_tensor(dump, "latents");
    drawn.pooled = golden::read_tensor(dump, "pooled_prompt_embeds");
    drawn.embeds = golden::read_tensor(dump, "prompt_embeds");
    fs::remove(dump);
    return drawn;
  }

  // Within the limits of fp32 (README.md).
  static void expect_golden(const Drawn& drawn, const LoraGolden& g) {
    EXPECT_LE(golden::distance(drawn.pooled, g.tensor("pooled_prompt_embeds")), 1e-4);
    EXPECT_LE(golden::distance(drawn.embeds, g.tensor("prompt_embeds")), 1e-4);
    expect_picture(drawn, g, fs::path(g.path).stem().string());
  }
  template <class Golden>
  static void expect_picture(const Drawn& drawn, const Golden& g, const std::string& name) {
    const double latents = golden::distance(drawn.latents, g.tensor("latents"));
    EXPECT_LE(latents, 1e-4);
    const at::Tensor pixels = g.tensor("pixels");
    ASSERT_EQ(static_cast<std::size_t>(pixels.numel()), drawn.image.rgb.size());
    int most = 0;
    double mean = 0;
    for (std::size_t i = 0; i < drawn.image.rgb.size(); ++i) {
      const int d = std::abs(int{drawn.image.rgb[i]} - int{pixels.const_data_ptr<std::uint8_t>()[i]});
      most = std::max(most, d);
      mean += d / static_cast<double>(drawn.image.rgb.size());
    }
    std::printf("%s: latents %.1e, pixels max %d mean %.4f\n", name.c_str(), latents, most, mean);
    EXPECT_LE(most, 1);
    EXPECT_LE(mean, 0.02);
  }

  static double mean_difference(const Media& a, const Media& b) {
    EXPECT_EQ(a.rgb.size(), b.rgb.size());
    double mean = 0;
    for (std::size_t i = 0; i < a.rgb.size(); ++i)
      mean += std::abs(int{a.rgb[i]} - int{b.rgb[i]}) / static_cast<double>(a.rgb.size());
    return mean;
  }

  inline static Engine* engine_ = nullptr;
  inline static Model* model_ = nullptr;
  inline static std::atomic<int> dumps_ = 0;
};

class LoraPicture : public LoraTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(LoraPicture, IsWhatDiffusersDraws) {
  const LoraGolden g = load(GetParam());
  expect_golden(draw(g.request), g);
}
INSTANTIATE_TEST_SUITE_P(Cases, LoraPicture,
                         ::testing::Values("one", "two", "all", "clip", "clip_half", "t5", "alpha", "metadata"),
                         [](const auto& info) { return std::string(info.param); });

TEST_F(LoraTest, EveryFormatOfAFileDrawsTheSame) {
  for (const auto& [of, formats] : std::map<std::string, std::vector<std::string>>{
           {"all", {"all_kohya", "all_bfl", "all_kohya_diffusers", "all_named"}},
           {"clip", {"clip_kohya"}},
           {"t5", {"t5_kohya"}}}) {
    LoraGolden g = load(of);
    for (const auto& format : formats) {
      SCOPED_TRACE(format);
      g.request.loras.at(0).path = adapter(format);
      expect_golden(draw(g.request), g);
    }
  }
}

class LoraLayout : public LoraTest, public ::testing::WithParamInterface<golden::Layout> {};

TEST_P(LoraLayout, DrawsWhatDiffusersDraws) {
  const golden::Layout& layout = GetParam();
  golden::Golden g = golden::load(layout.picture);
  g.request.loras = {{layout.path}};
  const Drawn drawn = draw(g.request);
  expect_picture(drawn, g, layout.picture.name + " " + layout.name);
  golden::expect_left_out(drawn.warnings, layout);
}
INSTANTIATE_TEST_SUITE_P(Flux, LoraLayout, ::testing::ValuesIn(golden::all_layouts("flux")),
                         [](const auto& info) { return info.param.picture.name + "_" + info.param.name; });

TEST_F(LoraTest, LeavesTheModelAsItWas) {
  GenerationRequest plain = load("one").request;
  plain.loras.clear();
  const Media before = draw(plain).image;
  for (const char* name : {"all", "clip", "t5"}) {
    const Media with = draw(load(name).request).image;
    EXPECT_GT(mean_difference(before, with), 1) << name;
    EXPECT_EQ(draw(plain).image.rgb, before.rgb) << name;
  }
  GenerationRequest none = load("clip").request;
  none.loras.at(0).scale = 0;
  EXPECT_EQ(draw(none).image.rgb, before.rgb);
}

// The prompt is the same, so the cache of prompts must tell them apart.
TEST_F(LoraTest, StrengthsOfATextAdapterAreNotMixedUp) {
  GenerationRequest request = load("clip").request;
  const Drawn whole = draw(request);
  request.loras.at(0).scale = -0.5;
  const Drawn negative = draw(request);
  EXPECT_GT(golden::distance(negative.pooled, whole.pooled), 1e-2);
  request.loras.at(0).scale = 1;
  EXPECT_EQ(draw(request).image.rgb, whole.image.rgb);
}

TEST_F(LoraTest, RequestsAtOnceDoNotSeeOneAnother) {
  const std::vector<std::string> names = {"two", "clip", "t5"};
  std::vector<Media> alone;
  for (const auto& name : names) alone.push_back(draw(load(name).request).image);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < names.size(); ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 3; ++round) {
        const Media image = draw(load(names[i]).request).image;
        EXPECT_LE(mean_difference(image, alone[i]), 0.02)
            << names[i];  // threads share the cores, and so sums may be split elsewhere
      }
    });
  for (auto& thread : threads) thread.join();
}

// Encoded together, denoised later: each keeps what it was encoded with.
TEST_F(LoraTest, StagesOfDifferentAdaptersInterleave) {
  const LoraGolden a = load("two"), b = load("alpha");
  auto first = unwrap(model().encode(a.request)), second = unwrap(model().encode(b.request));
  unwrap(model().denoise(*second, nullptr));
  unwrap(model().denoise(*first, nullptr));
  EXPECT_EQ(unwrap(model().decode(*first)).rgb, draw(a.request).image.rgb);
  EXPECT_EQ(unwrap(model().decode(*second)).rgb, draw(b.request).image.rgb);
}

TEST_F(LoraTest, AFileThatChangesIsReadAgain) {
  const fs::path file =
      fs::temp_directory_path() / ("ditfleet_lora_swap_" + std::to_string(::getpid()) + ".safetensors");
  LoraGolden clip = load("clip"), t5 = load("t5");
  fs::copy_file(adapter("clip"), file, fs::copy_options::overwrite_existing);
  clip.request.loras.at(0).path = file.string();
  expect_golden(draw(clip.request), clip);
  fs::remove(file);
  fs::copy_file(adapter("t5"), file);
  t5.request.loras.at(0).path = file.string();
  expect_golden(draw(t5.request), t5);
  fs::remove(file);
  auto gone = model().encode(t5.request);
  ASSERT_FALSE(gone);
  EXPECT_EQ(gone.error().code, Code::kNotFound) << gone.error().message;
  EXPECT_EQ(gone.error().param, "loras");
}

TEST_F(LoraTest, RefusesBadRequests) {
  const LoraGolden g = load("one");
  const auto refusal = [&](auto&& spoil) {
    GenerationRequest request = g.request;
    spoil(request);
    auto result = model().encode(request);
    EXPECT_FALSE(result);
    if (result) return Error{};
    EXPECT_EQ(result.error().param, "loras");
    return result.error();
  };
  for (const double scale : {static_cast<double>(NAN), static_cast<double>(INFINITY), 1e300, -1e300, 100.5})
    EXPECT_NE(refusal([&](auto& r) { r.loras[0].scale = scale; }).message.find("a finite number from -100 to 100"),
              std::string::npos)
        << scale;
  EXPECT_NE(refusal([](auto& r) { r.loras.resize(17, r.loras[0]); }).message.find("at most 16"), std::string::npos);
  EXPECT_EQ(refusal([](auto& r) { r.loras[0].path = "/"; }).code, Code::kNotFound);  // a folder without an adapter
  const auto foreign = fs::path(source_path("deploy/demo-model/loras/night.safetensors"));
  const Error other = refusal([&](auto& r) { r.loras[0].path = foreign.string(); });
  EXPECT_EQ(other.code, Code::kInvalidArgument);
  EXPECT_NE(other.message.find("another base model"), std::string::npos) << other.message;
  expect_golden(draw(g.request), g);  // none of them harmed the model
}

// Finite weights, an infinite product: the request fails and says why, and the next one finds the model as it was.
TEST_F(LoraTest, APictureThatIsNotFiniteIsAnErrorOfItsRequest) {
  const LoraGolden g = load("one");
  const auto file = unwrap(SafetensorsFile::open(adapter("attention")));
  std::vector<std::vector<float>> values;
  std::vector<TensorToWrite> tensors;
  for (const auto& entry : file.entries()) {
    const auto view = unwrap(file.view(entry));
    ASSERT_EQ(view.dtype, DType::kF32);
    auto& large = values.emplace_back(view.bytes.size() / sizeof(float));
    std::memcpy(large.data(), view.bytes.data(), view.bytes.size());
    for (float& v : large) v *= 1e30f;
    tensors.push_back({std::string(entry.name), DType::kF32, {view.shape.begin(), view.shape.end()}, {}});
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].bytes = std::as_bytes(std::span(values[i]));
  const fs::path path =
      fs::temp_directory_path() / ("ditfleet_lora_large_" + std::to_string(::getpid()) + ".safetensors");
  unwrap(write_safetensors(path.string(), tensors));
  GenerationRequest request = g.request;
  request.loras = {{path.string(), 0.5}, {adapter("alpha"), -1}};
  auto prepared = unwrap(model().encode(request));
  int previews = 0;
  unwrap(model().denoise(*prepared, [&](const StepProgress& progress) {
    const auto preview = progress.preview();
    previews += preview.ok();
    return true;
  }));
  EXPECT_EQ(previews, 0);
  const auto image = model().decode(*prepared);
  ASSERT_FALSE(image);
  EXPECT_EQ(image.error().code, Code::kInvalidArgument);
  EXPECT_EQ(image.error().param, "loras");
  EXPECT_NE(image.error().message.find("NaN or infinity with adapters at the strengths 0.5 and -1"), std::string::npos)
      << image.error().message;
  expect_golden(draw(g.request), g);
  fs::remove(path);
}

// A slot has room for an adapter with max_lora_rank at every layer.
TEST_F(LoraTest, AHigherRankAtFewerLayersFitsASlot) {
  EngineOptions options = golden::test_options("fp32", 0);
  options.max_lora_rank = 3;
  options.lora_together_rank = 16;
  options.lora_slots = 1;
  auto engine = unwrap(Engine::create(options, {&flux_family()}));
  auto model = unwrap(engine->load_model({"golden", golden::Case{"dev", "plain"}.model_dir()}));
  const auto one = model->encode(load("one").request);  // rank 4
  EXPECT_TRUE(one) << one.error().message;
}

// The pair of a packed LoHa or LoKr has the difference that LyCORIS computes.
TEST(PackedAdapter, LohaAndLokrBecomePairs) {
  constexpr std::int64_t kIn = 12, kOut = 18;
  const LoraNames names(flux_lora_base({{"transformer_blocks.0.attn.to_out.0", 0, 0, kIn, kOut}}, {}, {}));
  const std::string module = "lycoris_transformer_blocks_0_attn_to_out_0.";
  const std::string path = (fs::temp_directory_path() / ("ditfleet_lycoris_" + std::to_string(::getpid()))).string();
  at::Generator generator = at::detail::createCPUGenerator(5);
  const auto draw = [&](std::int64_t a, std::int64_t b) { return at::randn({a, b}, generator); };
  const auto check = [&](const std::vector<std::pair<std::string, at::Tensor>>& parts, const at::Tensor& expected,
                         std::int64_t rank) {
    std::vector<TensorToWrite> tensors;
    for (const auto& [part, values] : parts)
      tensors.push_back(
          {module + part, DType::kF32, values.sizes().vec(),
           std::as_bytes(std::span(values.const_data_ptr<float>(), static_cast<std::size_t>(values.numel())))});
    const float alpha = 2;
    tensors.push_back({module + "alpha", DType::kF32, {}, std::as_bytes(std::span(&alpha, 1))});
    unwrap(write_safetensors(path, tensors));
    const auto packed =
        read_packed_adapter(path, names, 256, {c10::Device(c10::DeviceType::CPU), c10::ScalarType::Float});
    ASSERT_EQ(packed->terms.size(), 1u);
    const auto& term = packed->terms[0];
    EXPECT_EQ(term.rank, rank);
    const at::Tensor down = packed->values.narrow(0, term.down_at, rank * kIn).view({rank, kIn}),
                     up = packed->values.narrow(0, term.up_at, kOut * rank).view({kOut, rank});
    EXPECT_LE(golden::distance(up.mm(down) * term.scale, expected), 1e-6) << parts.front().first;
  };
  const at::Tensor a1 = draw(kOut, 2), b1 = draw(2, kIn), a2 = draw(kOut, 3), b2 = draw(3, kIn);
  check({{"hada_w1_a", a1}, {"hada_w1_b", b1}, {"hada_w2_a", a2}, {"hada_w2_b", b2}}, a1.mm(b1) * a2.mm(b2), 6);
  const at::Tensor wide = draw(3, 4), tall = draw(6, 3), left = draw(6, 2), right = draw(2, 3), thin = draw(3, 1),
                   flat = draw(1, 4);
  check({{"lokr_w1", wide}, {"lokr_w2", tall}}, at::kron(wide, tall), 9);
  check({{"lokr_w1", wide}, {"lokr_w2_a", left}, {"lokr_w2_b", right}}, at::kron(wide, left.mm(right)), 6);
  check({{"lokr_w1_a", thin}, {"lokr_w1_b", flat}, {"lokr_w2", tall}}, at::kron(thin.mm(flat), tall) * 2, 3);
  fs::remove(path);
}

// The strength 0.7 is 0.69921875 in bf16: PEFT multiplies by 0.7 and rounds the product.
TEST(ApplyLinear, AStrengthIsNotRoundedToTheModelsType) {
  at::Generator generator = at::detail::createCPUGenerator(1);
  const auto draw = [&](std::vector<std::int64_t> shape) { return at::randn(shape, generator).to(at::kBFloat16); };
  LinearSlot slot{.weight = draw({24, 16}), .bias = draw({24})};
  const at::Tensor x = draw({1, 40, 16}), down = draw({4, 16}), up = draw({12, 4}), plain = apply_linear(slot, x);
  const at::Tensor product = at::linear(at::linear(x, down), up).to(at::kFloat);
  for (const double strength : {0.7, -0.3, 1.0, 0.5}) {
    slot.low_rank = {{down, up, 12, strength}};
    const at::Tensor out = apply_linear(slot, x);
    EXPECT_TRUE(at::equal(out.narrow(-1, 0, 12), plain.narrow(-1, 0, 12)));
    const at::Tensor term = (product * at::scalar_tensor(strength, at::kFloat)).to(at::kBFloat16);
    EXPECT_TRUE(at::equal(out.narrow(-1, 12, 12), plain.narrow(-1, 12, 12) + term)) << strength;
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
