// Components from single files: GGUF, stored fp8, and the names of other programs. A file in blocks draws what a file
// with the blocks' values draws, also when both are quantized on load and with adapters.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <regex>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/wan/wan.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/quantized.h"
#include "pipeline/nn/vae/config.h"
#include "pipeline/nn/video_vae/config.h"
#include "pipeline/region/libraries/fp8.h"
#include "pipeline/weights/checkpoint.h"
#include "pipeline/weights/gguf.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/parity/flux_golden.h"
#include "tests/paths.h"
#include "tests/unit/pipeline/weights/gguf_file.h"

namespace ditfleet::pipeline {
namespace {

struct Demo {
  std::string folder;
  const Family& family;
  std::int64_t frames;
  golden::Case images = {};  // has them
};
const Demo& image() {
  static const Demo demo{source_path("deploy/demo-model/model"), flux_family(), 1};
  return demo;
}
const Demo& video() {
  static const Demo demo{source_path("deploy/demo-model/video/model"), wan_family(), 5};
  return demo;
}

const Demo& ti2v() {
  static const Demo demo{golden::Case{"ti2v", "", "wan"}.model_dir(), wan_family(), 5};
  return demo;
}

const Demo& flf() {
  static const golden::Case which{"flf", "nine", "wan"};
  static const Demo demo{which.model_dir(), wan_family(), 5, which};
  return demo;
}

const Demo& qwen() {
  static const golden::Case which{"edit", "plain", "qwen_image"};
  static const Demo demo{which.model_dir(), qwen_image_family(), 1, which};
  return demo;
}

std::string temporary(const std::string& name) { return ::testing::TempDir() + "/" + name; }

// The transformer's tensors, each matrix of a linear in the next format that divides its rows. The blocks are random,
// with scales of a weight's size.
void write_files(const Demo& demo, const std::string& gguf, const std::string& values) {
  const auto checkpoint = unwrap(Checkpoint::open(demo.folder + "/transformer", Library::kDiffusers));
  std::mt19937 random(9);
  std::vector<GgufTensor> blocks;
  std::map<std::string, std::vector<float>> floats;
  std::map<std::string, std::vector<std::int64_t>> shapes;
  std::size_t turns[2] = {};  // among the blocks of 32 and of 256 values, so that each has some
  for (const std::string& name : checkpoint.names()) {
    const auto [file, entry] = unwrap(checkpoint.tensor(name));
    const auto view = unwrap(file.view(*entry));
    const auto all = static_cast<std::size_t>(
        std::accumulate(entry->shape.begin(), entry->shape.end(), std::int64_t{1}, std::multiplies<>()));
    std::vector<float>& to = floats[name];
    to.resize(all);
    shapes[name] = entry->shape;
    if (entry->shape.size() != 2 || !name.ends_with(".weight") || entry->shape[1] % 32 != 0) {
      for (std::size_t i = 0; i < all; ++i) {
        std::uint16_t bits = 0;
        if (entry->dtype == DType::kF32)
          std::memcpy(&to[i], view.bytes.data() + 4 * i, 4);
        else
          std::memcpy(&bits, view.bytes.data() + 2 * i, 2), to[i] = std::bit_cast<float>(std::uint32_t{bits} << 16);
      }
      blocks.push_back({name, entry->shape, 0, {reinterpret_cast<const char*>(to.data()), 4 * all}});
      continue;
    }
    std::uint8_t number = 0;
    const bool long_blocks = entry->shape[1] % 256 == 0;
    do number = static_cast<std::uint8_t>(1 + turns[long_blocks]++ % gguf_block_count());
    while ((gguf_blocks(number).values == 256) != long_blocks);
    const GgufBlocks& format = gguf_blocks(number);
    const std::size_t count = all / static_cast<std::size_t>(format.values);
    std::string bytes;
    for (std::size_t i = 0; i < count * static_cast<std::size_t>(format.bytes); ++i)
      bytes += static_cast<char>(random());
    const bool k = format.values == 256;
    for (std::size_t i = 0; i < count; ++i) {
      const auto set = [&](int at, unsigned bits) {
        for (int b = 0; b < 2; ++b)
          bytes[i * static_cast<std::size_t>(format.bytes) + static_cast<std::size_t>(at + b)] =
              static_cast<char>(bits >> 8 * b);
      };
      const unsigned scale = (k                       ? 0x0800U
                              : format.name == "Q8_0" ? 0x0c00U
                                                      : 0x1800U) +
                             random() % 64;  // 1e-4, 2e-4, 2e-3
      set(format.name == "Q6_K" ? 208 : 0, scale);
      if (format.name.ends_with("_1") || format.name == "Q4_K" || format.name == "Q5_K")
        set(2, scale | 0x8000U * (format.name.ends_with("_1")));
    }
    gguf_values(number, reinterpret_cast<const std::byte*>(bytes.data()), static_cast<std::int64_t>(count), to.data());
    blocks.push_back({name, entry->shape, format.id, bytes});
  }
  std::ofstream(gguf, std::ios::binary) << gguf_file(blocks);
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, all] : floats)
    tensors.push_back({name, DType::kF32, shapes[name], std::as_bytes(std::span(all))});
  unwrap(write_safetensors(values, tensors));
}

struct Options {
  std::string quantize = {}, lora = {}, dtype = "fp32";
};

// Runs a request, and passes the model and its generation to `use`.
void run(const Demo& demo, const std::map<std::string, std::string>& files, const Options& o,
         const std::function<void(Model&, Generation&)>& use) {
  EngineOptions options = golden::test_options(o.dtype, 0);
  options.lora_slots = 1;
  options.max_lora_rank = 64;
  options.lora_together_rank = 64;
  const auto engine = unwrap(Engine::create(options, {&demo.family}));
  ModelSource source{.name = "demo", .dir = demo.folder, .files = files};
  if (!o.quantize.empty()) source.quantize["transformer"] = o.quantize;
  const auto model = unwrap(engine->load_model(source));
  GenerationRequest request;
  request.prompt = "a red circle";
  request.seed = 3;
  request.fields.set("width", 64);
  request.fields.set("height", 64);
  request.fields.set("num_inference_steps", 2);
  if (demo.frames > 1) request.fields.set("frames", demo.frames);
  if (!demo.images.name.empty()) request.images = golden::load(demo.images).request.images;
  if (!o.lora.empty()) request.loras = {{.path = o.lora, .scale = 1}};
  const auto prepared = unwrap(model->encode(request));
  unwrap(model->denoise(*prepared, nullptr));
  golden::expect_compiled(*engine);
  use(*model, *prepared);
}

at::Tensor latents(const Demo& demo, const std::string& file, const Options& o = {}) {
  const std::string dump = temporary("gguf_dump.safetensors");
  std::map<std::string, std::string> files;
  if (!file.empty()) files["transformer"] = file;
  run(demo, files, o, [&](Model&, Generation& made) { unwrap(made.dump(dump)); });
  return golden::read_tensor(dump, "latents");
}

std::vector<std::uint8_t> picture(const Demo& demo, const std::map<std::string, std::string>& files) {
  std::vector<std::uint8_t> rgb;
  run(demo, files, {}, [&](Model& model, Generation& made) { rgb = unwrap(model.decode(made)).rgb; });
  return rgb;
}

class GgufModel : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override { write_files(demo_, gguf_, values_); }
  const Demo& demo_ = GetParam() ? video() : image();
  const std::string gguf_ = temporary("blocks.gguf"), values_ = temporary("values.safetensors");
};

TEST_P(GgufModel, DrawsWhatItsValuesDraw) {
  const at::Tensor drawn = latents(demo_, gguf_);
  EXPECT_TRUE(drawn.isfinite().all().item<bool>());
  EXPECT_FALSE(at::equal(drawn, latents(demo_, {})));
  // Compiled blocks keep weights as they are stored, or as values: their products may differ in the last bit.
  const double most = golden::test_compile().backend == "eager" && golden::test_device() == "cpu" ? 0 : 2e-5;
  EXPECT_LE(golden::distance(drawn, latents(demo_, values_)), most);
}

TEST_P(GgufModel, IsConvertedOnLoad) {
  for (const char* format : {"nf4", "fp8"})
    EXPECT_LE(
        golden::distance(latents(demo_, gguf_, {.quantize = format}), latents(demo_, values_, {.quantize = format})), 0)
        << format;
}

INSTANTIATE_TEST_SUITE_P(Demo, GgufModel, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "video" : "image"; });

TEST(GgufAdapters, AreAppliedBesideBlocks) {
  const std::string gguf = temporary("blocks.gguf"), values = temporary("values.safetensors"),
                    lora = temporary("lora.safetensors");
  write_files(image(), gguf, values);
  at::Generator generator = at::detail::createCPUGenerator(2);
  const at::Tensor down = at::rand({4, 192}, generator), up = at::rand({192, 4}, generator);
  const auto bytes = [](const at::Tensor& t) {
    return std::as_bytes(std::span(t.const_data_ptr<float>(), static_cast<std::size_t>(t.numel())));
  };
  const std::string module = "transformer.transformer_blocks.0.attn.to_out.0.";
  unwrap(write_safetensors(lora, {{module + "lora_A.weight", DType::kF32, {4, 192}, bytes(down)},
                                  {module + "lora_B.weight", DType::kF32, {192, 4}, bytes(up)}}));
  const at::Tensor drawn = latents(image(), gguf, {.lora = lora});
  EXPECT_GT(golden::distance(drawn, latents(image(), gguf)), 1e-3);
  EXPECT_LE(golden::distance(drawn, latents(image(), values, {.lora = lora})), 2e-5);
}

// The blocks' linears in fp8 with a scale for each row, as LightX2V writes them; or with one scale for all rows, the
// same for each row or alone and beside a scale of inputs, as ModelOpt does.
enum class Fp8Scales { kRows, kEqualRows, kModelOpt };

std::string write_fp8(const Demo& demo, Fp8Scales kind) {
  const auto checkpoint = unwrap(Checkpoint::open(demo.folder + "/transformer", Library::kDiffusers));
  std::vector<TensorToWrite> tensors;
  std::vector<TensorView> views;  // own the bytes, as `made` does
  std::vector<at::Tensor> made;
  const auto add = [&](const std::string& name, DType type, const at::Tensor& t, std::vector<std::int64_t> shape) {
    made.push_back(t);
    tensors.push_back(
        {name, type, std::move(shape), {static_cast<const std::byte*>(t.const_data_ptr()), std::size_t(t.nbytes())}});
  };
  for (const std::string& name : checkpoint.names()) {
    const auto [file, entry] = unwrap(checkpoint.tensor(name));
    const TensorView& view = views.emplace_back(unwrap(file.view(*entry)));
    if (entry->shape.size() != 2 || name.find("blocks.") == name.npos || name.find(".norm") != name.npos ||
        !name.ends_with(".weight")) {
      tensors.push_back({name, view.dtype, {view.shape.begin(), view.shape.end()}, view.bytes});
      continue;
    }
    const at::Tensor weight = copy_to({at::kCPU, at::kBFloat16}, view);
    QuantizedRows rows = quantize_fp8(weight);
    if (kind != Fp8Scales::kRows) {
      rows.scales = at::full({rows.rows}, weight.abs().max().item<float>() / 448);
      rows.codes = region::fp8_codes(weight, rows.scales.unsqueeze(1));
    }
    const std::string linear = name.substr(0, name.size() - 7);
    add(name, DType::kF8E4M3, rows.codes, entry->shape);
    if (kind == Fp8Scales::kModelOpt) {
      add(linear + ".weight_scale", DType::kF32, rows.scales.narrow(0, 0, 1), {});
      add(linear + ".input_scale", DType::kF32, at::full({1}, 0.05F), {});
    } else {
      add(linear + ".weight_scale", DType::kF32, rows.scales, {rows.rows, 1});
    }
  }
  const std::string path = temporary("fp8.safetensors");
  unwrap(write_safetensors(path, tensors));
  return path;
}

class StoredFp8 : public ::testing::TestWithParam<bool> {};

TEST_P(StoredFp8, IsMultipliedAsItIs) {
  const Demo& demo = GetParam() ? video() : image();
  const Options bf16{.dtype = "bf16"};
  const at::Tensor rows = latents(demo, write_fp8(demo, Fp8Scales::kRows), bf16);
  if (&demo == &image()) {  // the video's second transformer would be quantized too
    EXPECT_TRUE(at::equal(rows, latents(demo, {}, {.quantize = "fp8", .dtype = "bf16"})));
  }
  const at::Tensor equal_rows = latents(demo, write_fp8(demo, Fp8Scales::kEqualRows), bf16);
  EXPECT_FALSE(at::equal(equal_rows, rows));
  EXPECT_TRUE(at::equal(latents(demo, write_fp8(demo, Fp8Scales::kModelOpt), bf16), equal_rows));
}

INSTANTIATE_TEST_SUITE_P(Demo, StoredFp8, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "video" : "image"; });

using Rename = std::string (*)(std::string name);

std::string replaced(std::string name, const std::vector<std::pair<std::string, std::string>>& by) {
  for (const auto& [from, to] : by) name = std::regex_replace(name, std::regex(from), to);
  return name;
}

std::string wan_transformer(std::string name) {
  return replaced(name, {{"^condition_embedder.image_embedder.norm1", "img_emb.proj.0"},
                         {"^condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"},
                         {"^condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"},
                         {"^condition_embedder.image_embedder.norm2", "img_emb.proj.4"},
                         {"^condition_embedder.image_embedder.pos_embed", "img_emb.emb_pos"},
                         {"\\.add_([kv])_proj\\.", ".$1_img."},
                         {"\\.norm_added_k\\.", ".norm_k_img."},
                         {"^condition_embedder.text_embedder.linear_1", "text_embedding.0"},
                         {"^condition_embedder.text_embedder.linear_2", "text_embedding.2"},
                         {"^condition_embedder.time_embedder.linear_1", "time_embedding.0"},
                         {"^condition_embedder.time_embedder.linear_2", "time_embedding.2"},
                         {"^condition_embedder.time_proj", "time_projection.1"},
                         {"^proj_out", "head.head"},
                         {"^scale_shift_table", "head.modulation"},
                         {"scale_shift_table", "modulation"},
                         {"\\.norm2\\.", ".norm3."},
                         {"\\.attn1\\.", ".self_attn."},
                         {"\\.attn2\\.", ".cross_attn."},
                         {"\\.to_([qkv])\\.", ".$1."},
                         {"\\.to_out\\.0\\.", ".o."},
                         {"\\.ffn\\.net\\.0\\.proj\\.", ".ffn.0."},
                         {"\\.ffn\\.net\\.2\\.", ".ffn.2."}});
}

// The blocks of a coder are counted through its levels.
std::string wan_vae(std::string name) {
  std::smatch m;
  if (std::regex_match(name, m, std::regex("decoder\\.up_blocks\\.(\\d)\\.(resnets|upsamplers)\\.(\\d)\\.(.*)"))) {
    static const int resnets =
        1 + static_cast<int>(read_video_vae_config(ConfigFile(video().folder + "/vae/config.json")).num_res_blocks);
    name = "decoder.upsamples." +
           std::to_string((resnets + 1) * std::stoi(m[1]) + (m[2] == "resnets" ? std::stoi(m[3]) : resnets)) + "." +
           m[4].str();
  }
  return replaced(name, {{"^post_quant_conv", "conv2"},
                         {"^quant_conv", "conv1"},
                         {"\\.down_blocks\\.", ".downsamples."},
                         {"\\.conv_in\\.", ".conv1."},
                         {"\\.norm_out\\.", ".head.0."},
                         {"\\.conv_out\\.", ".head.2."},
                         {"\\.mid_block\\.resnets\\.0\\.", ".middle.0."},
                         {"\\.mid_block\\.attentions\\.0\\.", ".middle.1."},
                         {"\\.mid_block\\.resnets\\.1\\.", ".middle.2."},
                         {"(middle\\.[02]|samples\\.\\d+)\\.norm1\\.", "$1.residual.0."},
                         {"(middle\\.[02]|samples\\.\\d+)\\.conv1\\.", "$1.residual.2."},
                         {"(middle\\.[02]|samples\\.\\d+)\\.norm2\\.", "$1.residual.3."},
                         {"(middle\\.[02]|samples\\.\\d+)\\.conv2\\.", "$1.residual.6."},
                         {"\\.conv_shortcut\\.", ".shortcut."}});
}

// Levels have lists of their own, with the resampling at the end.
std::string wan_22_vae(std::string name) {
  return wan_vae(replaced(name, {{"up_blocks\\.(\\d)\\.resnets\\.", "upsamples.$1.upsamples."},
                                 {"up_blocks\\.(\\d)\\.upsampler\\.", "upsamples.$1.upsamples.2."},
                                 {"down_blocks\\.(\\d)\\.resnets\\.", "downsamples.$1.downsamples."},
                                 {"down_blocks\\.(\\d)\\.downsampler\\.", "downsamples.$1.downsamples.1."}}));
}

std::string bfl_vae(std::string name) {
  std::smatch m;
  if (std::regex_match(name, m, std::regex("decoder\\.up_blocks\\.(\\d)\\.(.*)"))) {
    static const int last =
        static_cast<int>(read_vae_config(ConfigFile(image().folder + "/vae/config.json")).block_out_channels.size()) -
        1;
    name = "decoder.up." + std::to_string(last - std::stoi(m[1])) + "." + m[2].str();
  }
  return replaced(name, {{"^(quant_conv|post_quant_conv)", "$1"},
                         {"\\.mid_block\\.resnets\\.0", ".mid.block_1"},
                         {"\\.mid_block\\.resnets\\.1", ".mid.block_2"},
                         {"\\.mid_block\\.attentions\\.0\\.group_norm", ".mid.attn_1.norm"},
                         {"\\.mid_block\\.attentions\\.0\\.to_([qkv])", ".mid.attn_1.$1"},
                         {"\\.mid_block\\.attentions\\.0\\.to_out\\.0", ".mid.attn_1.proj_out"},
                         {"\\.down_blocks\\.", ".down."},
                         {"\\.resnets\\.", ".block."},
                         {"\\.downsamplers\\.0\\.conv", ".downsample.conv"},
                         {"\\.upsamplers\\.0\\.conv", ".upsample.conv"},
                         {"conv_shortcut", "nin_shortcut"},
                         {"\\.conv_norm_out", ".norm_out"}});
}

std::string llama_t5(std::string name) {
  return replaced(name, {{"^shared\\.", "token_embd."},
                         {"^encoder\\.final_layer_norm", "enc.output_norm"},
                         {"^encoder\\.block\\.", "enc.blk."},
                         {"layer\\.0\\.layer_norm", "attn_norm"},
                         {"layer\\.1\\.layer_norm", "ffn_norm"},
                         {"layer\\.0\\.SelfAttention\\.relative_attention_bias", "attn_rel_b"},
                         {"layer\\.0\\.SelfAttention\\.", "attn_"},
                         {"layer\\.1\\.DenseReluDense\\.wi_0", "ffn_gate"},
                         {"layer\\.1\\.DenseReluDense\\.wi_1", "ffn_up"},
                         {"layer\\.1\\.DenseReluDense\\.wo", "ffn_down"}});
}

std::string as_it_is(std::string name) { return name; }
std::string clip_vision(std::string name) { return "vision_model." + name; }

struct OtherNames {
  const char* name;
  const Demo& (*demo)();
  const char* component;
  Library library;
  Rename rename;
  std::vector<std::string> prefixes;
};

class SingleFile : public ::testing::TestWithParam<OtherNames> {};

// A component's file as other programs name its tensors, alone and in a checkpoint with another component.
TEST_P(SingleFile, DrawsWhatTheFolderDraws) {
  const OtherNames& p = GetParam();
  const auto checkpoint = unwrap(Checkpoint::open(p.demo().folder + "/" + p.component, p.library));
  const std::vector<std::uint8_t> expected = picture(p.demo(), {});
  for (const std::string& prefix : p.prefixes) {
    std::vector<TensorToWrite> tensors;
    std::vector<TensorView> views;  // own the bytes
    for (const std::string& name : checkpoint.names()) {
      const auto [file, entry] = unwrap(checkpoint.tensor(name));
      const TensorView& view = views.emplace_back(unwrap(file.view(*entry)));
      std::vector<std::int64_t> shape(view.shape.begin(), view.shape.end());
      if (p.rename == bfl_vae && name.find("attentions") != name.npos && shape.size() == 2)
        shape.insert(shape.end(), 2, 1);  // 1×1 convolutions
      tensors.push_back({prefix + p.rename(name), view.dtype, shape, view.bytes});
    }
    if (!prefix.empty()) tensors.push_back({"another.weight", DType::kU8, {1}, tensors.front().bytes.first(1)});
    const std::string path = temporary("other_names.safetensors");
    unwrap(write_safetensors(path, tensors));
    EXPECT_EQ(picture(p.demo(), {{p.component, path}}), expected) << prefix;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Demo, SingleFile,
    ::testing::Values(
        OtherNames{"wan", video, "transformer", Library::kDiffusers, wan_transformer, {"", "model.diffusion_model."}},
        OtherNames{"wan_flf", flf, "transformer", Library::kDiffusers, wan_transformer, {""}},
        OtherNames{"qwen_image", qwen, "transformer", Library::kDiffusers, as_it_is, {"model.diffusion_model."}},
        OtherNames{"qwen_vae", qwen, "vae", Library::kDiffusers, wan_vae, {""}},
        OtherNames{"qwen25_vl",
                   qwen,
                   "text_encoder",
                   Library::kTransformers,
                   as_it_is,
                   {"text_encoders.qwen25_7b.transformer."}},
        OtherNames{"clip_vision", flf, "image_encoder", Library::kTransformers, clip_vision, {""}},
        OtherNames{"wan_vae", video, "vae", Library::kDiffusers, wan_vae, {"", "first_stage_model."}},
        OtherNames{"wan_22_vae", ti2v, "vae", Library::kDiffusers, wan_22_vae, {""}},
        OtherNames{"umt5", video, "text_encoder", Library::kTransformers, as_it_is, {""}},
        OtherNames{"umt5_gguf", video, "text_encoder", Library::kTransformers, llama_t5, {""}},
        OtherNames{"ae", image, "vae", Library::kDiffusers, bfl_vae, {"", "vae."}},
        OtherNames{"clip_l",
                   image,
                   "text_encoder",
                   Library::kTransformers,
                   as_it_is,
                   {"", "text_encoders.clip_l.transformer."}},
        OtherNames{"t5xxl",
                   image,
                   "text_encoder_2",
                   Library::kTransformers,
                   as_it_is,
                   {"", "text_encoders.t5xxl.transformer."}},
        OtherNames{"t5_gguf", image, "text_encoder_2", Library::kTransformers, llama_t5, {""}}),
    [](const auto& info) { return std::string(info.param.name); });

// The folder has no weights of its own for the text encoder, and all its weights are in a checkpoint of ComfyUI.
TEST(SingleFiles, ArePlannedWithoutTheFoldersWeights) {
  namespace fs = std::filesystem;
  const fs::path folder = temporary("no_t5"), t5 = folder / "text_encoder_2";
  fs::remove_all(folder);
  fs::create_directories(t5);
  for (const auto& entry : fs::directory_iterator(image().folder))
    if (entry.path().filename() != "text_encoder_2") fs::create_symlink(entry.path(), folder / entry.path().filename());
  fs::copy_file(image().folder + "/text_encoder_2/config.json", t5 / "config.json");
  const auto checkpoint = unwrap(Checkpoint::open(image().folder + "/text_encoder_2", Library::kTransformers));
  std::vector<TensorToWrite> tensors;
  std::vector<TensorView> views;  // own the bytes
  for (const std::string& name : checkpoint.names()) {
    const auto [file, entry] = unwrap(checkpoint.tensor(name));
    const TensorView& view = views.emplace_back(unwrap(file.view(*entry)));
    tensors.push_back(
        {"text_encoders.t5xxl.transformer." + name, view.dtype, {view.shape.begin(), view.shape.end()}, view.bytes});
  }
  const std::string path = temporary("planned.safetensors");
  unwrap(write_safetensors(path, tensors));
  const auto engine = unwrap(Engine::create(golden::test_options("fp32", 0), {&image().family}));
  GenerationRequest request;
  request.prompt = "a red circle";
  const auto plan = engine->plan(
      {.name = "m", .dir = folder.string(), .files = {{"text_encoder_2", path}}, .quantize = {{"*", "auto"}}}, request);
  EXPECT_TRUE(plan) << (plan ? "" : plan.error().message);
}

TEST(SingleFiles, OfComponentsThatTheModelLacksAreRefused) {
  for (const auto& [demo, component] : {std::pair(&image, "transformer_2"), {&video, "text_encoder_2"}}) {
    const auto engine = unwrap(Engine::create(golden::test_options("fp32", 0), {&demo().family}));
    const auto loaded = engine->load_model({.name = "m", .dir = demo().folder, .files = {{component, "/none"}}});
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, Code::kInvalidArgument);
    EXPECT_THAT(loaded.error().message, ::testing::HasSubstr(std::string("a file is given for ") + component));
  }
}

}  // namespace
}  // namespace ditfleet::pipeline
