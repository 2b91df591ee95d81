// Pictures from quantized folders and files against those of diffusers (tests/fixtures/quant).
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <map>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/weights/safetensors.h"
#include "shared/core/json.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

// fp32: implementations are 1e-6 apart. Weights or scales rounded to bf16 change the latents by 4e-3.
constexpr double kLatentsFp32 = 1e-4, kPixelsMeanFp32 = 0.02;
constexpr int kPixelsMostFp32 = 1;
// bf16, relative to what NF4 changes in the latents: honest implementations are 1 to 6 % apart. For fp8, which changes
// less, they are up to 50 % apart, hence the projection below.
constexpr double kLatentsNf4 = 0.15;
constexpr double kPixelsMeanBf16 = 2;
// (made − unquantized) projected on (expected − unquantized): 1 is as expected, 0 is as without quantization. With fp8
// activations, honest implementations drift apart nearly as far as fp8 is from bf16, but the error of the weights is
// shared. They reach 0.68 to 1.1, a single scale for a matrix 0.3.
struct Bounds {
  double least, most;
};
constexpr Bounds kProjectionNf4{0.97, 1.03}, kProjectionFp8{0.85, 1.15}, kProjectionDynamic{0.65, 1.25};
constexpr double kProjectionUnquantized = 0.3;

fs::path quant(const std::string& folder) { return golden::fixtures() / "quant" / folder; }

struct Drawn {
  Media image;
  at::Tensor latents, pooled, embeds;
};

// One engine per precision and one model per source. They must go before the process ends its libraries.
class Models : public ::testing::Environment {
 public:
  static Models& get() {
    static auto* const models = dynamic_cast<Models*>(::testing::AddGlobalTestEnvironment(new Models));
    return *models;
  }
  Model& model(const ModelSource& source, bool bf16) {
    auto& engine = engines_[bf16];
    if (!engine) {
      EngineOptions options = golden::test_options(bf16 ? "bf16" : "fp32", 0);
      options.lora_slots = 1;
      engine = unwrap(Engine::create(options, {&flux_family()}));
    }
    auto& model = models_[{source.name, bf16}];
    if (!model) model = unwrap(engine->load_model(source));
    return *model;
  }
  void TearDown() override {
    for (const auto& [bf16, engine] : engines_) golden::expect_compiled(*engine);
    models_.clear();
    engines_.clear();
  }

 private:
  std::map<bool, std::unique_ptr<Engine>> engines_;
  std::map<std::pair<std::string, bool>, std::unique_ptr<Model>> models_;
};
const Models& kRegistered = Models::get();  // environments must be added before the tests run

Drawn draw(const ModelSource& source, const golden::Golden& golden) {
  Model& model = Models::get().model(source, golden.bf16);
  auto prepared = unwrap(model.encode(golden.request));
  unwrap(model.denoise(*prepared, nullptr));
  Drawn drawn{unwrap(model.decode(*prepared)), {}, {}, {}};
  const std::string dump =
      (fs::temp_directory_path() / ("ditfleet_quant_" + std::to_string(::getpid()) + ".safetensors")).string();
  unwrap(prepared->dump(dump));
  drawn.latents = golden::read_tensor(dump, "latents");
  drawn.pooled = golden::read_tensor(dump, "pooled_prompt_embeds");
  drawn.embeds = golden::read_tensor(dump, "prompt_embeds");
  fs::remove(dump);
  return drawn;
}

at::Tensor wide(const at::Tensor& t) { return t.to(at::kDouble); }
double rms(const at::Tensor& t) { return std::sqrt(at::mean(wide(t) * wide(t)).item<double>()); }

double projection(const at::Tensor& latents, const golden::Golden& golden) {
  const at::Tensor plain = wide(golden.tensor("unquantized")), change = wide(golden.tensor("expected")) - plain;
  return (at::sum((wide(latents) - plain) * change) / at::sum(change * change)).item<double>();
}

void expect_within(double value, Bounds bounds) {
  EXPECT_GE(value, bounds.least);
  EXPECT_LE(value, bounds.most);
}

// The folder and, for ComfyUI's formats, the transformer's file.
ModelSource source_of(const std::string& folder) {
  const fs::path file = quant(folder) / "transformer.safetensors";
  ModelSource source{.name = folder, .dir = (quant(folder) / "model").string()};
  if (fs::exists(file)) source.files["transformer"] = file.string();
  return source;
}

class FluxQuantized : public ::testing::TestWithParam<golden::Case> {};

TEST_P(FluxQuantized, DrawsWhatDiffusersDraws) {
  const golden::Golden golden = golden::load(GetParam());
  const std::string& folder = GetParam().folder;
  const bool nf4 = folder.starts_with("nf4"), dynamic = folder.starts_with("fp8_rows");
  const Drawn drawn = draw(source_of(folder), golden);

  const auto file = unwrap(SafetensorsFile::open(golden.path));
  const json::object request = unwrap(parse_json(file.metadata().at("request"))).as_object();
  const auto& linears = Models::get().model(source_of(folder), golden.bf16).info().linears;
  for (const auto& [part, wanted] : request.at("quantized").as_object()) {
    int found = 0;
    for (const auto& [format, count] : linears.at(std::string(part)))
      if (format.starts_with("nf4") || format.starts_with("fp8")) found += count;
    EXPECT_EQ(found, wanted.to_number<int>()) << part;
  }

  const double text = golden.bf16 ? 4e-2 : 1e-4;
  EXPECT_LE(golden::distance(drawn.pooled, golden.tensor("pooled_prompt_embeds")), text);
  EXPECT_LE(golden::distance(drawn.embeds, golden.tensor("prompt_embeds")), text);

  const at::Tensor pixels = golden.tensor("pixels");
  ASSERT_EQ(static_cast<std::size_t>(pixels.numel()), drawn.image.rgb.size());
  int most = 0;
  double mean = 0;
  for (std::size_t i = 0; i < drawn.image.rgb.size(); ++i) {
    const int d = std::abs(int{drawn.image.rgb[i]} - int{pixels.const_data_ptr<std::uint8_t>()[i]});
    most = std::max(most, d);
    mean += d / static_cast<double>(drawn.image.rgb.size());
  }
  const at::Tensor expected = golden.tensor("expected");
  ASSERT_EQ(drawn.latents.sizes(), expected.sizes());
  const double along = projection(drawn.latents, golden);
  const double apart = rms(drawn.latents - expected) / rms(expected - golden.tensor("unquantized"));
  std::printf("%s/%s: pixels max %d mean %.4f, latents apart %.2e of the change, projection %.3f\n", folder.c_str(),
              GetParam().name.c_str(), most, mean, apart, along);
  if (!golden.bf16) {
    EXPECT_LE(golden::distance(drawn.latents, golden.tensor("latents")), kLatentsFp32);
    EXPECT_LE(most, kPixelsMostFp32);
    EXPECT_LE(mean, kPixelsMeanFp32);
    return;
  }
  expect_within(along, dynamic ? kProjectionDynamic : nf4 ? kProjectionNf4 : kProjectionFp8);
  if (!dynamic) {
    EXPECT_LE(mean, kPixelsMeanBf16);
  }
  if (nf4) {
    EXPECT_LE(apart, kLatentsNf4);
  }
}

std::vector<golden::Case> cases() {
  std::vector<golden::Case> all = golden::all_cases("quant");
  std::erase_if(all, [](const golden::Case& c) { return c.name == "transformer"; });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Cases, FluxQuantized, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.folder + "_" + info.param.name; });

// A folder that bitsandbytes wrote and the folder it was made from, quantized on load.
TEST(FluxQuantize, Nf4OnLoadEqualsBitsandbytesFolderBitForBit) {
  struct Pair {
    std::string folder, name, base;
    std::map<std::string, std::string> quantize;
  };
  for (const Pair& pair :
       {Pair{"nf4", "bf16", "schnell", {{"transformer", "nf4"}, {"text_encoder_2", "nf4"}}},
        Pair{
            "nf4_fp32", "fp32", "dev", {{"transformer", "nf4"}, {"text_encoder", "nf4"}, {"text_encoder_2", "nf4"}}}}) {
    SCOPED_TRACE(pair.folder);
    const golden::Golden golden = golden::load({pair.folder, pair.name, "quant"});
    const Drawn stored = draw(source_of(pair.folder), golden);
    const Drawn loaded = draw({.name = pair.base + " nf4",
                               .dir = (golden::fixtures() / "flux" / pair.base / "model").string(),
                               .quantize = pair.quantize},
                              golden);
    const auto linears = [&](const ModelSource& source) {
      return Models::get().model(source, golden.bf16).info().linears;
    };
    const auto here = linears({.name = pair.base + " nf4"});
    EXPECT_EQ(here, linears(source_of(pair.folder)));
    for (const auto& [component, format] : pair.quantize) EXPECT_GT(here.at(component).at(format), 0) << component;
    EXPECT_TRUE(at::equal(stored.pooled, loaded.pooled));
    EXPECT_TRUE(at::equal(stored.embeds, loaded.embeds));
    EXPECT_TRUE(at::equal(stored.latents, loaded.latents));
    EXPECT_EQ(stored.image.rgb, loaded.image.rgb);
  }
}

// fp8 on load quantizes the linears of the blocks by row, as torchao does in fp8_rows_blocks.
TEST(FluxQuantize, Fp8OnLoadDrawsAsTorchao) {
  const std::string dir = (quant("width48") / "model").string();
  for (const char* name : {"bf16", "tall", "other"}) {
    SCOPED_TRACE(name);
    const golden::Golden golden = golden::load({"fp8_rows_blocks", name, "quant"});
    const double quantized = projection(
        draw({.name = "width48 fp8", .dir = dir, .quantize = {{"transformer", "fp8"}}}, golden).latents, golden);
    const double plain = projection(draw({.name = "width48", .dir = dir}, golden).latents, golden);
    std::printf("%s: projection %.3f, unquantized %.3f\n", name, quantized, plain);
    // 14 linears of each double block and 6 of each single one, but their modulations.
    const auto linears = Models::get().model({.name = "width48 fp8"}, golden.bf16).info().linears.at("transformer");
    EXPECT_GT(linears.at("fp8 with dynamic activations"), linears.at("bf16"));
    expect_within(quantized, kProjectionDynamic);
    EXPECT_LE(std::abs(plain), kProjectionUnquantized);
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
