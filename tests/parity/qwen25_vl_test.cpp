// Qwen2.5-VL as a text encoder that sees pictures: patches, the vision tower's tokens and hidden states against
// transformers' (tests/fixtures/qwen25_vl), and what loading reads and refuses.
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "pipeline/device/failure.h"
#include "pipeline/families/qwen_image/prompts.h"
#include "pipeline/memory/dry_run.h"
#include "pipeline/nn/text/qwen_encoder.h"
#include "pipeline/nn/text/qwen_processor.h"
#include "pipeline/nn/text/qwen_vision.h"
#include "pipeline/weights/safetensors.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;
using c10::ScalarType;
using testing::HasSubstr;

std::string folder(const std::string& name) { return (golden::fixtures() / "qwen25_vl" / name).string(); }

at::Tensor golden_tensor(const std::string& name, const std::string& tensor) {
  return golden::read_tensor(folder(name) + ".safetensors", tensor);
}

std::vector<std::int32_t> integers(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<std::int64_t>(), tensor.const_data_ptr<std::int64_t>() + tensor.numel()};
}

media::Media picture(const std::string& name, char which) {
  const at::Tensor rgb = golden_tensor(name, std::string(1, which) + ".rgb");
  return {.width = static_cast<int>(rgb.size(1)),
          .height = static_cast<int>(rgb.size(0)),
          .rgb = {rgb.const_data_ptr<std::uint8_t>(), rgb.const_data_ptr<std::uint8_t>() + rgb.numel()}};
}

// The pictures of each case.
using Cases = std::vector<std::pair<std::string, std::string>>;
Cases cases(const std::string& name) {
  return name == "nested" ? Cases{{"text", ""}, {"one", "a"}, {"two", "bc"}}
                          : Cases{{"text", ""}, {"one", "b"}, {"two", "ca"}};
}

void fails(const std::function<void()>& run, const std::string& text) {
  try {
    run();
    ADD_FAILURE() << "accepted, but expected: " << text;
  } catch (const Failure& failure) {
    EXPECT_THAT(failure.error().message, HasSubstr(text));
  }
}

struct Model {
  QwenEncoder text;
  QwenVision vision;
  QwenProcessor processor;
};

class Qwen25Vl : public testing::TestWithParam<std::string> {
 protected:
  Model load(const Placement& placement, const std::string& quantize = {}) const {
    const std::string dir = folder(GetParam());
    const auto layers = read_qwen25_vl_config(ConfigFile(dir + "/config.json")).num_hidden_layers;
    return {QwenEncoder::load(dir, placement, layers, nullptr, quantize),
            QwenVision::load(dir, placement, nullptr, quantize), read_qwen_processor(dir)};
  }
  at::Tensor state(const Model& model, const std::string& test_case, const std::string& pictures, bool axes) const {
    std::vector<PictureTokens> grids;
    for (const char which : pictures)
      grids.push_back(model.vision.encode(model.processor.patches(picture(GetParam(), which))));
    return model.text
        .encode(integers(golden_tensor(GetParam(), test_case + ".ids")), {}, {model.text.config().num_hidden_layers},
                grids, axes)[0]
        .squeeze(0);
  }
  Placement in(ScalarType type) const {
    Placement placement = placement_;
    placement.dtype = type;
    return placement;
  }
  const Placement placement_{load_device(golden::test_device()).device};
  const c10::InferenceMode inference_{true};
};
INSTANTIATE_TEST_SUITE_P(Folders, Qwen25Vl, testing::Values("nested", "flat"));

TEST_P(Qwen25Vl, CutsPicturesIntoPatches) {
  const QwenProcessor processor = read_qwen_processor(folder(GetParam()));
  for (const char which : {'a', 'b', 'c'}) {
    const PictureTokens grid = processor.patches(picture(GetParam(), which));
    const at::Tensor sides = golden_tensor(GetParam(), std::string(1, which) + ".grid");
    EXPECT_EQ((std::vector<std::int32_t>{static_cast<int>(grid.rows), static_cast<int>(grid.columns)}),
              integers(sides));
    if (which != 'a') continue;
    const at::Tensor expected = golden_tensor(GetParam(), "a.patches").unsqueeze(2);
    const std::int64_t frames = processor.temporal_patch_size;
    EXPECT_TRUE(at::equal(grid.tokens, expected.expand({-1, -1, frames, -1, -1}).reshape(grid.tokens.sizes())));
  }
}

TEST_P(Qwen25Vl, ResizesToWholeTokens) {
  const QwenProcessor processor = read_qwen_processor(folder(GetParam()));
  const at::Tensor sizes = golden_tensor(GetParam(), "sizes");
  for (std::int64_t i = 0; i < sizes.size(0); ++i) {
    const auto row = integers(sizes[i].contiguous());
    EXPECT_EQ(processor.resized(row[0], row[1]), std::pair(row[2], row[3])) << row[0] << " × " << row[1];
  }
  fails([&] { (void)processor.resized(10, 2001); }, "10 × 2001 pixels; one side must be at most 200 times the other");
}

// LibTorch's kernels for bf16 differ by 1e-2 in the states of this depth; see qwen3_encoder_test.
TEST_P(Qwen25Vl, SeesPicturesAsTransformers) {
  for (const bool bf16 : {false, true}) {
    const Model model = load(in(bf16 ? ScalarType::BFloat16 : ScalarType::Float));
    const std::string type = bf16 ? ".bf16" : ".fp32";
    for (const char which : {'a', 'b', 'c'}) {
      const PictureTokens got = model.vision.encode(model.processor.patches(picture(GetParam(), which)));
      EXPECT_EQ(got.tokens.scalar_type(), bf16 ? ScalarType::BFloat16 : ScalarType::Float);
      EXPECT_EQ(got.tokens.size(0), got.rows * got.columns);
      const double apart =
          golden::distance(got.tokens, golden_tensor(GetParam(), std::string(1, which) + ".tokens" + type));
      RecordProperty(std::string(1, which) + (bf16 ? "_bf16" : "_fp32"), std::to_string(apart));
      EXPECT_LE(apart, bf16 ? 2e-2 : 1e-5) << which;
    }
  }
}

TEST_P(Qwen25Vl, ComputesTheStatesOfTransformers) {
  for (const bool bf16 : {false, true}) {
    const Model model = load(in(bf16 ? ScalarType::BFloat16 : ScalarType::Float));
    for (const auto& [test_case, pictures] : cases(GetParam()))
      for (const bool axes : {false, true}) {
        const std::string positions = axes && !pictures.empty() ? ".axes" : "";
        const at::Tensor expected = golden_tensor(GetParam(), test_case + positions + (bf16 ? ".bf16" : ".fp32"));
        const double apart = golden::distance(state(model, test_case, pictures, axes), expected);
        RecordProperty(test_case + (axes ? "_axes" : "") + (bf16 ? "_bf16" : "_fp32"), std::to_string(apart));
        EXPECT_LE(apart, bf16 ? 3e-2 : 2e-5) << test_case << positions << bf16;
      }
  }
}

TEST_P(Qwen25Vl, LeavesTheDevice) {
  Placement placement = placement_;
  placement.on_host = true;
  const Model model = load(placement), plain = load(placement_);
  EXPECT_EQ(model.vision.parts().kept_bytes(), 0);
  EXPECT_EQ(std::ssize(std::vector<int>(model.vision.parts().size())), model.vision.config().depth + 2);
  const auto [test_case, pictures] = cases(GetParam()).back();
  EXPECT_TRUE(at::equal(state(model, test_case, pictures, false), state(plain, test_case, pictures, false)));
}

TEST_P(Qwen25Vl, RunsWithoutMemory) {
  const Placement dry{.device = kDryDevice, .dtype = ScalarType::BFloat16, .stands_for = placement_.device};
  const Model model = load(dry);
  const auto [test_case, pictures] = cases(GetParam()).back();
  for (const bool axes : {false, true}) {
    const at::Tensor got = state(model, test_case, pictures, axes);
    EXPECT_TRUE(got.is_meta());
    EXPECT_EQ(got.sizes(), golden_tensor(GetParam(), test_case + ".fp32").sizes());
  }
}

TEST_P(Qwen25Vl, QuantizesToNf4AndNamesItsLinears) {
  Model model = load(placement_, "nf4");
  const auto count = [](TextEncoder& encoder) { return static_cast<int>(encoder.named_linears().size()); };
  EXPECT_EQ(model.text.linears(), (std::map<std::string, int>{{"nf4", count(model.text)}}));
  EXPECT_EQ(model.vision.linears(), (std::map<std::string, int>{{"nf4", count(model.vision)}}));
  EXPECT_EQ(count(model.vision), 5 * model.vision.config().depth + 2);
  const auto [test_case, pictures] = cases(GetParam()).back();
  const at::Tensor whole = golden_tensor(GetParam(), test_case + ".fp32");
  EXPECT_LE(at::abs(state(model, test_case, pictures, false).cpu() - whole).mean().item<double>(), 0.5);
}

TEST(Qwen25VlConfig, RefusesWhatItCannotDo) {
  const fs::path dir = fs::temp_directory_path() / ("ditfleet_qwen25_vl" + std::to_string(::getpid()));
  fs::create_directories(dir);
  const auto with = [&](const std::string& name, const std::string& source, const json::object& fields) {
    json::object config = ConfigFile(folder(source)).fields();
    for (const auto& [key, value] : fields) config[key] = value;
    std::ofstream(dir / name) << json::serialize(config);
  };
  const auto config = [&](const json::object& fields) {
    with("config.json", "flat/config.json", fields);
    return ConfigFile((dir / "config.json").string());
  };
  const QwenConfig flat = read_qwen25_vl_config(config({})),
                   nested = read_qwen25_vl_config(ConfigFile(folder("nested") + "/config.json"));
  EXPECT_EQ(flat.rope_theta, 5e3);
  EXPECT_EQ(flat.mrope_section, (Shape{1, 1, 2}));
  EXPECT_EQ(flat.image_token, 40);
  EXPECT_EQ(nested.rope_theta, 1e6);
  EXPECT_EQ(nested.mrope_section, (Shape{2, 5, 3}));
  const auto text = [&](const json::object& fields) { return [&] { read_qwen25_vl_config(config(fields)); }; };
  fails(text({{"model_type", "qwen3"}}), "model_type is \"qwen3\"; it must be \"qwen2_5_vl\"");
  fails(text({{"use_sliding_window", true}}), "use_sliding_window is true, which is not supported");
  fails(text({{"rope_scaling", {{"type", "yarn"}}}}), "rope_type is \"yarn\"");
  fails(text({{"rope_scaling", {{"mrope_section", {1, 2, 2}}}}}), "sum of mrope_section is 5; it must be half");
  fails(text({{"num_attention_heads", 8}}), "num_attention_heads is 8, which num_key_value_heads (3) must divide");
  fails(text({{"num_attention_heads", 48}}), "hidden_size is 48, which twice num_attention_heads (48) must divide");
  const auto vision = [&](const json::object& fields) {
    return [&] { read_qwen_vision_config(config({{"vision_config", fields}})); };
  };
  fails([&] { read_qwen_vision_config(config({{"vision_config", nullptr}})); }, "vision_config is missing");
  fails(vision({{"in_channels", 4}}), "in_channels is 4; it must be 3");
  fails(vision({{"hidden_size", 24}, {"num_heads", 4}}), "hidden_size is 24, which four times num_heads (4)");
  fails(vision({{"window_size", 27}}), "window_size is 27; it must be at least 28");
  const auto processor = [&](const json::object& fields) {
    return [&] {
      with("preprocessor_config.json", "nested/preprocessor_config.json", fields);
      read_qwen_processor(dir.string());
    };
  };
  processor({})();
  fails(processor({{"do_resize", false}}), "do_resize is false, which is not supported");
  fails(processor({{"resample", 2}}), "resample is 2, which is not supported; it must be 3, bicubic");
  fails(processor({{"image_mean", {1, 2}}}), "image_mean must have three numbers");
  with("preprocessor_config.json", "nested/preprocessor_config.json", {{"min_pixels", 77}, {"max_pixels", nullptr}});
  EXPECT_EQ(read_qwen_processor(dir.string()).min_pixels, 77);
  EXPECT_EQ(read_qwen_processor(dir.string()).max_pixels, 14000);
  fs::remove_all(dir);
}

TEST(Qwen25VlTokens, MustFitThePictures) {
  const c10::InferenceMode inference(true);
  const auto encoder = QwenEncoder::load(folder("nested"), {}, 3);
  const PictureTokens grid{at::zeros({4, 40}), 2, 2};
  fails([&] { encoder.encode({1, 60, 60, 60, 2}, {}, {3}, {{grid}}); }, "3 image tokens for 4 of pictures");
  EXPECT_EQ(encoder.encode({1, 60, 2}, {}, {3})[0].sizes(), (Shape{1, 3, 40}));
}

TEST(Qwen25VlPrompts, AreThoseOfDiffusers) {
  const auto file = unwrap(SafetensorsFile::open(folder("nested") + ".safetensors"));
  const json::object templates = unwrap(parse_json(file.metadata().at("templates"))).as_object();
  const auto expect = [&](const std::string& pipeline, const std::string& message, const std::string& got,
                          std::int64_t dropped) {
    const json::array& known = templates.at(pipeline).as_array();
    std::string text(known.at(0).as_string());
    EXPECT_EQ(got, text.replace(text.find("{}"), 2, message));
    EXPECT_EQ(dropped, known.at(1).as_int64());
  };
  const std::string picture = "<|vision_start|><|image_pad|><|vision_end|>";
  expect("image", "a {} cat", qwen_image_chat("a {} cat"), kQwenImageDropped);
  expect("edit", " as a cat", qwen_edit_chat(" as a cat", 1, false), kQwenEditDropped);
  expect("edit_plus", "Picture 1: " + picture + "Picture 2: " + picture + "both", qwen_edit_chat("both", 2, true),
         kQwenEditDropped);
  expect("edit_plus", "none", qwen_edit_chat("none", 0, true), kQwenEditDropped);
}

TEST(Qwen25VlPrompts, HaveATokenForEachOfThePicture) {
  const std::vector<std::int32_t> three{1, 9, 2, 3, 9, 4, 5, 9, 6, 7};
  EXPECT_EQ(unwrap(expand_pictures(three, 9, {2, 1, 3}, 3)),
            (std::vector<std::int32_t>{1, 9, 9, 2, 3, 9, 4, 5, 9, 9, 9, 6, 7}));
  EXPECT_EQ(unwrap(expand_pictures(three, 9, {2}, 3)), (std::vector<std::int32_t>{1, 9, 9, 2, 7}));
  EXPECT_EQ(unwrap(expand_pictures(three, 9, {1, 2}, 3)), (std::vector<std::int32_t>{1, 9, 2, 3, 9, 9, 4, 7}));
  const auto refused = expand_pictures(three, 9, {4}, 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
  EXPECT_EQ(refused.error().param, "prompt");
}

}  // namespace
}  // namespace ditfleet::pipeline
