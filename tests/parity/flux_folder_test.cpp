// Model folders that are not what they should be: each is refused with the file, what is wrong and what would be
// right.
#include <gtest/gtest.h>

#include <ATen/ops/equal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/flux/parameters.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/nn/vae/config.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

class FluxFolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(dir_);
    fs::copy(golden::Case{"dev", "plain"}.model_dir(), dir_, fs::copy_options::recursive);
    auto engine = Engine::create({"cpu", "fp32", 0}, {&flux_family()});
    ASSERT_TRUE(engine);
    engine_ = std::move(*engine);
  }
  void TearDown() override { fs::remove_all(dir_); }

  void replace(const std::string& file, const std::string& from, const std::string& to) {
    std::stringstream text;
    text << std::ifstream(dir_ / file, std::ios::binary).rdbuf();
    std::string all = text.str();
    const auto at = all.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    all.replace(at, from.size(), to);
    std::ofstream(dir_ / file, std::ios::binary) << all;
  }
  // The error of loading the folder as it is now; it must hold every one of the words.
  void expect_error(Code code, std::initializer_list<const char*> words) {
    auto model = engine_->load_model({"broken", dir_.string()});
    ASSERT_FALSE(model);
    EXPECT_EQ(model.error().code, code) << model.error().message;
    for (const char* word : words)
      EXPECT_NE(model.error().message.find(word), std::string::npos)
          << "no \"" << word << "\" in: " << model.error().message;
  }

  const fs::path dir_ = fs::temp_directory_path() / ("ditfleet_flux_folder_" + std::to_string(::getpid()));
  std::unique_ptr<Engine> engine_;
};

TEST_F(FluxFolderTest, NamesMissingFiles) {
  for (const char* file : {"model_index.json", "scheduler/scheduler_config.json", "text_encoder/config.json",
                           "transformer/config.json", "vae/config.json"}) {
    SetUp();
    fs::remove(dir_ / file);
    expect_error(Code::kNotFound, {file});
  }
  for (const char* part : {"text_encoder", "text_encoder_2", "transformer", "vae"}) {
    SetUp();
    for (const auto& entry : fs::directory_iterator(dir_ / part))
      if (entry.path().extension() == ".safetensors") fs::remove(entry.path());
    expect_error(Code::kNotFound, {part, "safetensors"});
  }
  SetUp();
  fs::remove_all(dir_ / "tokenizer");
  expect_error(Code::kNotFound, {"tokenizer"});
  fs::remove_all(dir_);
  expect_error(Code::kNotFound, {});
}

TEST_F(FluxFolderTest, NamesTensorsOfTheWrongShape) {
  replace("transformer/config.json", "\"num_attention_heads\": 2", "\"num_attention_heads\": 4");
  expect_error(Code::kDataCorrupt,
               {"transformer", "x_embedder.weight", "[24, 16]", "but config.json requires [48, 16]"});
}

TEST_F(FluxFolderTest, NamesMissingTensors) {
  replace("transformer/config.json", "\"num_single_layers\": 2", "\"num_single_layers\": 3");
  expect_error(Code::kNotFound, {"transformer", "single_transformer_blocks.2."});
}

TEST_F(FluxFolderTest, RefusesTruncatedWeights) {
  const fs::path file = dir_ / "vae/diffusion_pytorch_model.safetensors";
  fs::resize_file(file, fs::file_size(file) / 2);
  expect_error(Code::kDataCorrupt, {"vae/diffusion_pytorch_model.safetensors"});
}

TEST_F(FluxFolderTest, RefusesLyingHeaders) {
  replace("vae/diffusion_pytorch_model.safetensors", "\"shape\":[", "\"shape\":[7,");
  expect_error(Code::kDataCorrupt, {"vae/diffusion_pytorch_model.safetensors"});
}

TEST_F(FluxFolderTest, RefusesHeadersThatCannotBe) {
  const fs::path file = dir_ / "transformer/diffusion_pytorch_model.safetensors";
  const auto begin_with = [&](std::string_view bytes) {
    SetUp();
    std::fstream(file, std::ios::binary | std::ios::in | std::ios::out)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  };
  using namespace std::string_view_literals;
  begin_with("\xff\xff\xff\xff\xff\xff\xff\xff"sv);
  expect_error(Code::kDataCorrupt, {"transformer/diffusion_pytorch_model.safetensors", "header"});
  begin_with("\x00\x00\x00\x00\x00\x00\x00\x00"sv);
  expect_error(Code::kDataCorrupt, {"transformer/diffusion_pytorch_model.safetensors"});
  SetUp();
  fs::resize_file(file, 0);
  expect_error(Code::kDataCorrupt, {"transformer/diffusion_pytorch_model.safetensors", "0 bytes"});
  SetUp();
  replace("transformer/diffusion_pytorch_model.safetensors", "\"data_offsets\":[0,", "\"data_offsets\":[4,");
  expect_error(Code::kDataCorrupt, {"transformer/diffusion_pytorch_model.safetensors", "bytes"});
}

TEST_F(FluxFolderTest, RefusesWeightsThatAreNotNumbersToComputeWith) {
  // The same size, so that only the type is wrong.
  replace("transformer/diffusion_pytorch_model.safetensors", "\"dtype\":\"F32\"", "\"dtype\":\"I32\"");
  expect_error(Code::kDataCorrupt, {"transformer", "is of type I32", "weights must be F32, BF16"});
}

// As diffusers does, with a warning.
TEST_F(FluxFolderTest, LeavesTensorsAloneThatNobodyAsksFor) {
  const auto unused = [&] {
    auto parameters = Parameters::open((dir_ / "transformer").string(), Library::kDiffusers, {});
    load_weights(flux_spec(read_flux_config(ConfigFile((dir_ / "transformer/config.json").string()))), parameters);
    return parameters.unused("");
  };
  EXPECT_EQ(unused(), std::vector<std::string>());
  replace("transformer/config.json", "\"num_single_layers\": 2", "\"num_single_layers\": 1");
  EXPECT_TRUE(engine_->load_model({"smaller", dir_.string()}));
  const auto left = unused();
  ASSERT_EQ(left.size(), 14u);  // weight and bias of six linears, and two norms
  for (const std::string& name : left) EXPECT_TRUE(name.starts_with("single_transformer_blocks.1.")) << name;
}

// A file of both, as it comes of changing one of them, draws with the encoder's own.
TEST_F(FluxFolderTest, TakesTheEncodersOwnEmbeddingOfTwo) {
  const std::string t5 = (dir_ / "text_encoder_2").string(), path = t5 + "/model.safetensors";
  const at::Tensor before = T5Encoder::load(t5, {}).encode({3, 4, 1});
  const std::string own = "encoder.embed_tokens.weight", shared = "shared.weight";
  {
    const auto file = SafetensorsFile::open(path);
    ASSERT_TRUE(file);
    std::vector<TensorToWrite> tensors;
    std::vector<std::byte> other;
    std::vector<TensorView> views;  // own the bytes
    for (const TensorEntry& entry : file->entries()) {
      const TensorView view = views.emplace_back(*file->view(entry));
      const bool embedding = entry.name == own || entry.name == shared;
      tensors.push_back(
          {embedding ? own : std::string(view.name), view.dtype, {view.shape.begin(), view.shape.end()}, view.bytes});
      if (!embedding) continue;
      other.assign(view.bytes.size(), std::byte{0});
      tensors.push_back({shared, view.dtype, {view.shape.begin(), view.shape.end()}, other});
    }
    ASSERT_TRUE(write_safetensors(path, tensors));
  }
  EXPECT_TRUE(at::equal(T5Encoder::load(t5, {}).encode({3, 4, 1}), before));
}

TEST_F(FluxFolderTest, RefusesATokenizerLongerThanTheEncoder) {
  replace("tokenizer/tokenizer_config.json", "\"model_max_length\": 77", "\"model_max_length\": 78");
  expect_error(Code::kDataCorrupt, {"tokenizer/tokenizer_config.json", "model_max_length is 78", "positions for 77"});
}

// Of another class the same files mean other ids.
TEST_F(FluxFolderTest, RefusesTokenizersOfOtherClasses) {
  replace("model_index.json", "CLIPTokenizer", "BertTokenizer");
  expect_error(Code::kDataCorrupt, {"model_index.json", "tokenizer is", "BertTokenizer", "CLIPTokenizer"});
  SetUp();
  replace("model_index.json", "\"tokenizer_2\"", "\"tokenizer_3\"");
  expect_error(Code::kDataCorrupt, {"model_index.json", "tokenizer_2 is missing", "T5Tokenizer"});
}

TEST_F(FluxFolderTest, RefusesWhatDiffusersHasAndThisHasNot) {
  replace("scheduler/scheduler_config.json", "\"stochastic_sampling\": false", "\"stochastic_sampling\": true");
  expect_error(Code::kDataCorrupt, {"scheduler/scheduler_config.json", "stochastic_sampling", "not supported"});
  SetUp();
  replace("scheduler/scheduler_config.json", "\"time_shift_type\": \"exponential\"", "\"time_shift_type\": \"cubic\"");
  expect_error(Code::kDataCorrupt, {"scheduler/scheduler_config.json", "cubic", "exponential or linear"});
}

TEST_F(FluxFolderTest, RefusesFieldsOfTheWrongKind) {
  replace("transformer/config.json", "\"num_layers\": 2", "\"num_layers\": \"two\"");
  expect_error(Code::kDataCorrupt, {"transformer/config.json", "num_layers is \"two\"", "integer"});
  SetUp();
  replace("transformer/config.json", "\"guidance_embeds\": true", "\"guidance_embeds\": 1");
  expect_error(Code::kDataCorrupt, {"guidance_embeds is 1; it must be true or false"});
  SetUp();
  replace("text_encoder/config.json", "quick_gelu", "slow_gelu");
  expect_error(Code::kDataCorrupt, {"text_encoder/config.json", "slow_gelu", "quick_gelu"});
  SetUp();
  replace("vae/config.json", "UpDecoderBlock2D", "UpBlock3D");
  expect_error(Code::kDataCorrupt, {"vae/config.json", "UpBlock3D", "AttnUpDecoderBlock2D"});
  SetUp();
  replace("transformer/config.json", "{", "");
  expect_error(Code::kDataCorrupt, {"transformer/config.json", "not valid JSON"});
}

// transformers keeps what feed_forward_proj comes to beside it, and believes that.
TEST_F(FluxFolderTest, ReadsT5sActivationWhereTransformersDoes) {
  replace("text_encoder_2/config.json", "\"dense_act_fn\": \"gelu_new\"", "\"dense_act_fn\": \"relu\"");
  EXPECT_EQ(read_t5_config(ConfigFile((dir_ / "text_encoder_2/config.json").string())).activation,
            find_activation("relu"));
  replace("text_encoder_2/config.json", "\"is_gated_act\": true", "\"is_gated_act\": false");
  EXPECT_FALSE(read_t5_config(ConfigFile((dir_ / "text_encoder_2/config.json").string())).gated);
  replace("text_encoder_2/config.json", "\"dense_act_fn\": \"relu\"", "\"dense_act_fn\": \"rely\"");
  expect_error(Code::kDataCorrupt, {"text_encoder_2/config.json", "dense_act_fn is \"rely\"", "relu"});
}

TEST_F(FluxFolderTest, TakesNullForFalseWhereDiffusersDoes) {
  const auto vae = [&] { return read_vae_config(ConfigFile((dir_ / "vae/config.json").string())); };
  replace("vae/config.json", "\"mid_block_add_attention\": true", "\"mid_block_add_attention\": null");
  replace("vae/config.json", "\"use_post_quant_conv\": false", "\"use_post_quant_conv\": null");
  EXPECT_FALSE(vae().mid_block_attention);
  EXPECT_FALSE(vae().post_quant_conv);
  replace("vae/config.json", "\"mid_block_add_attention\"", "\"a\"");
  replace("vae/config.json", "\"use_post_quant_conv\"", "\"b\"");
  EXPECT_TRUE(vae().mid_block_attention);
  EXPECT_TRUE(vae().post_quant_conv);
}

TEST_F(FluxFolderTest, RefusesAT5ThatLooksBackOnly) {
  replace("text_encoder_2/config.json", "\"is_decoder\": false", "\"is_decoder\": true");
  expect_error(Code::kDataCorrupt, {"text_encoder_2/config.json", "is_decoder is true", "false"});
}

TEST_F(FluxFolderTest, RefusesRequestsThatTheFolderHasNoNumbersFor) {
  const auto encode_error = [&](int tokens, int steps) {
    auto model = engine_->load_model({"broken", dir_.string()});
    EXPECT_TRUE(model);
    GenerationRequest request;
    request.fields.set("width", 16);
    request.fields.set("height", 16);
    request.fields.set("num_inference_steps", steps);
    request.fields.set("max_sequence_length", tokens);
    auto prepared = model ? (*model)->encode(request) : Result<std::unique_ptr<Generation>>(model.error());
    return prepared ? Error{Code::kInternal, "it was encoded", {}} : prepared.error();
  };
  replace("text_encoder_2/config.json", "\"relative_attention_max_distance\": 128",
          "\"relative_attention_max_distance\": 8");
  EXPECT_EQ(encode_error(8, 2).message, "it was encoded");  // these are near enough
  Error error = encode_error(9, 2);
  EXPECT_EQ(error.code, Code::kDataCorrupt);
  EXPECT_NE(error.message.find("relative_attention_max_distance is 8, which leaves distances up to 8 without a bucket; "
                               "with 32 buckets it must be above 8"),
            std::string::npos)
      << error.message;
  SetUp();
  replace("scheduler/scheduler_config.json", "\"use_dynamic_shifting\": true", "\"use_dynamic_shifting\": false");
  replace("scheduler/scheduler_config.json", "\"shift\": 3.0", "\"shift\": 0.0");
  error = encode_error(8, 3);
  EXPECT_EQ(error.code, Code::kDataCorrupt);
  EXPECT_NE(error.message.find("shift (above 0)"), std::string::npos) << error.message;
}

TEST_F(FluxFolderTest, PipelinesForImageInputServeTextToImage) {
  for (const char* name : {"FluxImg2ImgPipeline", "FluxKontextPipeline"}) {
    SetUp();
    replace("model_index.json", "FluxPipeline", name);
    const auto model = engine_->load_model({"m", dir_.string()});
    EXPECT_TRUE(model) << (model ? "" : model.error().message);
  }
}

TEST_F(FluxFolderTest, RefusesPartsThatDoNotFit) {
  replace("transformer/config.json", "\"joint_attention_dim\": 20", "\"joint_attention_dim\": 24");
  expect_error(Code::kDataCorrupt, {"joint_attention_dim is 24", "d_model is 20"});
  SetUp();
  replace("model_index.json", "FluxPipeline", "StableDiffusion3Pipeline");
  expect_error(Code::kDataCorrupt, {"model_index.json", "it must be one of FluxPipeline, "});
  SetUp();
  replace("model_index.json", "AutoencoderKL", "AutoencoderTiny");
  expect_error(Code::kDataCorrupt, {"model_index.json", "vae", "AutoencoderKL"});
}

}  // namespace
}  // namespace ditfleet::pipeline
