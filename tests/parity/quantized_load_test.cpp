// Loading quantized linears: NF4 bit for bit against its rules, stacks, errors, and single files in BFL's names.
#include <gtest/gtest.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "pipeline/device/failure.h"
#include "pipeline/engine.h"
#include "pipeline/families/flux/flux.h"
#include "pipeline/nn/parameters.h"
#include "pipeline/nn/text/clip_encoder.h"
#include "pipeline/nn/text/t5_encoder.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/weights/safetensors_writer.h"
#include "tests/parity/flux_golden.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;
using c10::ScalarType;
using Tensors = std::map<std::string, at::Tensor>;

DType dtype_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::kF32;
    case ScalarType::BFloat16: return DType::kBF16;
    case ScalarType::Float8_e4m3fn: return DType::kF8E4M3;
    case ScalarType::Float8_e5m2: return DType::kF8E5M2;
    default: return DType::kU8;
  }
}

void write(const fs::path& file, Tensors tensors, const std::map<std::string, std::string>& metadata = {}) {
  std::vector<TensorToWrite> out;
  for (auto& [name, t] : tensors) {
    t = t.contiguous();
    out.push_back(
        {name, dtype_of(t), t.sizes().vec(), {static_cast<const std::byte*>(t.const_data_ptr()), t.nbytes()}});
  }
  unwrap(write_safetensors(file.string(), out, metadata));
}

// The rules of NF4, value by value.
struct ScalarNf4 {
  std::vector<std::uint8_t> bytes;
  std::vector<float> absmax, values;
};
ScalarNf4 scalar_nf4(const at::Tensor& weight) {
  const at::Tensor wide = weight.to(ScalarType::Float).contiguous();
  const float* w = wide.const_data_ptr<float>();
  const std::int64_t n = wide.numel();
  ScalarNf4 made;
  for (std::int64_t begin = 0; begin < n; begin += 64) {
    const std::int64_t end = std::min(n, begin + 64);
    float largest = 0;
    for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(w[i]));
    const bool whole = end == begin + 64;
    const float safe = largest == 0 ? 1e-38F : largest;
    made.absmax.push_back(whole ? largest : safe);
    const volatile float reciprocal = 1 / safe;
    for (std::int64_t i = begin; i < end; ++i) {
      const volatile float product = w[i] * reciprocal;
      const float unit = std::clamp(whole ? static_cast<float>(product) : w[i] / safe, -1.0F, 1.0F);
      int code = 0;
      for (int k = 0; k < 15; ++k) code += (kNf4Book[k] + kNf4Book[k + 1]) / 2 < unit;
      const volatile float value = kNf4Book[static_cast<std::size_t>(code)] * made.absmax.back();
      made.values.push_back(static_cast<float>(value));
      if (i % 2 == 0)
        made.bytes.push_back(static_cast<std::uint8_t>(code << 4 | 7));
      else
        made.bytes.back() = static_cast<std::uint8_t>((made.bytes.back() & 0xf0) | code);
    }
  }
  return made;
}

// Adds linear `name` as bitsandbytes stores it.
void add_nf4(Tensors& tensors, const std::string& name, const at::Tensor& weight) {
  const ScalarNf4 q = scalar_nf4(weight);
  const std::string state = R"({"quant_type":"nf4","blocksize":64,"dtype":"float32","shape":[)" +
                            std::to_string(weight.size(0)) + "," + std::to_string(weight.size(1)) + "]}";
  const auto bytes = [](const void* data, std::size_t size, ScalarType type, std::int64_t count) {
    at::Tensor t = at::zeros({count}, type);
    std::memcpy(t.mutable_data_ptr(), data, size);
    return t;
  };
  const auto blocks = static_cast<std::int64_t>(q.absmax.size());
  const std::string at = name + ".weight";
  tensors[at] =
      bytes(q.bytes.data(), q.bytes.size(), ScalarType::Byte, static_cast<std::int64_t>(q.bytes.size())).unsqueeze(1);
  tensors[at + ".absmax"] = bytes(q.absmax.data(), 4 * q.absmax.size(), ScalarType::Float, blocks);
  tensors[at + ".quant_map"] = bytes(kNf4Book.data(), 64, ScalarType::Float, 16);
  tensors[at + ".quant_state.bitsandbytes__nf4"] =
      bytes(state.data(), state.size(), ScalarType::Byte, static_cast<std::int64_t>(state.size()));
}

class QuantizedLoad : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(dir_); }
  void TearDown() override { fs::remove_all(dir_); }
  Parameters open(const Tensors& tensors, ScalarType type = ScalarType::Float,
                  const std::map<std::string, std::string>& metadata = {}) {
    write(dir_ / "model.safetensors", tensors, metadata);
    return Parameters::open(dir_.string(), Library::kTransformers, {.dtype = type});
  }
  // Expects a Failure with all of these in its message.
  static void fails(const std::function<void()>& run, Code code, const std::vector<std::string>& parts) {
    try {
      run();
      ADD_FAILURE() << "accepted, but expected: " << parts.front();
    } catch (const Failure& failure) {
      EXPECT_EQ(failure.error().code, code) << failure.what();
      for (const std::string& part : parts)
        EXPECT_NE(failure.error().message.find(part), std::string::npos) << failure.what();
    }
  }
  const fs::path dir_ = fs::temp_directory_path() / ("ditfleet_quantized_load" + std::to_string(::getpid()));
};

at::Tensor codes_of(const QuantizedRows& rows) { return rows.codes.flatten().contiguous(); }

TEST_F(QuantizedLoad, Nf4FollowsItsRulesBitForBit) {
  for (const auto& [out, in] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {1, 1}, {3, 50}, {2, 64}, {5, 13}, {24, 96}, {7, 65}, {16, 160}})
    for (const ScalarType type : {ScalarType::Float, ScalarType::BFloat16}) {
      SCOPED_TRACE(std::to_string(out) + " x " + std::to_string(in));
      at::Tensor weight = at::randn({out, in}).to(type);
      if (out > 4) weight.narrow(0, 0, 3).zero_();  // blocks of zeros
      // Values exactly between two codes take the lower one.
      if (in >= 64)
        weight.select(0, out - 1).copy_(at::ones({in}, type) * static_cast<double>((kNf4Book[9] + kNf4Book[10]) / 2));
      if (in >= 64) weight[out - 1][in - 1] = 1;
      const ScalarNf4 q = scalar_nf4(weight);
      const auto check = [&](const LinearSlot& slot) {
        ASSERT_TRUE(slot.quantized);
        EXPECT_FALSE(slot.weight.defined());
        ASSERT_EQ(slot.quantized->parts.size(), 1u);
        const QuantizedRows& rows = slot.quantized->parts[0];
        const at::Tensor codes = codes_of(rows), scales = rows.scales.contiguous();
        ASSERT_EQ(static_cast<std::size_t>(codes.numel()), q.bytes.size());
        ASSERT_EQ(static_cast<std::size_t>(scales.numel()), q.absmax.size());
        EXPECT_EQ(std::memcmp(codes.const_data_ptr(), q.bytes.data(), q.bytes.size()), 0);
        EXPECT_EQ(std::memcmp(scales.const_data_ptr(), q.absmax.data(), 4 * q.absmax.size()), 0);
        const at::Tensor values = dequantized(*slot.quantized, ScalarType::Float);
        EXPECT_EQ(std::memcmp(values.const_data_ptr(), q.values.data(), 4 * q.values.size()), 0);
      };
      Tensors plain{{"a.weight", weight.to(ScalarType::Float)}}, stored;
      Parameters on_load = open(plain, type);
      on_load.quantize_on_load("nf4", [](std::string_view) { return true; });
      check(on_load.linear("a", in, out, false));
      EXPECT_EQ(on_load.linears(), (std::map<std::string, int>{{"nf4", 1}}));
      EXPECT_EQ(on_load.bytes(), static_cast<std::int64_t>(q.bytes.size() + 4 * q.absmax.size()));
      add_nf4(stored, "a", weight);
      Parameters read = open(stored, type);
      check(read.linear("a", in, out, false));
      read.finish("");
      EXPECT_EQ(read.bytes(), on_load.bytes());
    }
}

TEST_F(QuantizedLoad, StacksKeepTheirRows) {
  const at::Tensor q = at::randn({16, 32}), k = at::randn({16, 32}), v = at::randn({16, 32});
  const auto fp8 = [](Tensors& tensors, const std::string& name, const at::Tensor& weight, ScalarType type) {
    tensors[name + ".weight"] = weight.to(type);
    tensors[name + ".weight_scale"] = at::ones({16}) * 0.5;
  };
  const auto values = [](const at::Tensor& weight, ScalarType type) {
    return weight.to(type).to(ScalarType::Float) * 0.5;
  };
  const ScalarType e4m3 = ScalarType::Float8_e4m3fn, e5m2 = ScalarType::Float8_e5m2;
  Tensors tensors;
  fp8(tensors, "q", q, e4m3);
  fp8(tensors, "k", k, e4m3);
  fp8(tensors, "v", v, e4m3);
  fp8(tensors, "k5", k, e5m2);
  tensors["plain.weight"] = v;
  Parameters p = open(tensors);
  const LinearSlot same = p.stacked_linear({"q", "k", "v"}, 32, 16, false);
  EXPECT_EQ(same.quantized->parts.size(), 1u);
  EXPECT_TRUE(at::equal(dequantized(*same.quantized, ScalarType::Float),
                        at::cat({values(q, e4m3), values(k, e4m3), values(v, e4m3)})));
  const LinearSlot mixed = p.stacked_linear({"q", "k5", "plain"}, 32, 16, false, {.count = 4});
  EXPECT_EQ(mixed.quantized->parts.size(), 3u);
  EXPECT_EQ(mixed.out(), 48);
  EXPECT_EQ(mixed.in(), 32);
  EXPECT_EQ(mixed.wide.sizes().vec(), (std::vector<std::int64_t>{48, 4}));
  EXPECT_TRUE(
      at::equal(dequantized(*mixed.quantized, ScalarType::Float), at::cat({values(q, e4m3), values(k, e5m2), v})));
  EXPECT_EQ(p.linears(), (std::map<std::string, int>{{"fp8", 5}, {"fp32", 1}}));
}

TEST_F(QuantizedLoad, DynamicFp8NeedsAllRowsOfAStack) {
  const at::Tensor w = at::randn({16, 32});
  const std::string dynamic =
      R"({"_type":"Float8Tensor","_data":{"act_quant_kwargs":{"_data":{"granularity":{"_type":"PerRow"}}}}})";
  Tensors tensors;
  for (const char* name : {"a", "b", "c"}) {
    tensors[std::string(name) + "._weight_qdata"] = w.to(ScalarType::Float8_e4m3fn);
    tensors[std::string(name) + "._weight_scale"] = at::ones({16, 1});
  }
  Parameters p = open(tensors, ScalarType::BFloat16,
                      {{"a.weight", dynamic},
                       {"b.weight", dynamic},
                       {"c.weight", R"({"_type":"Float8Tensor","_data":{"act_quant_kwargs":null}})"}});
  EXPECT_TRUE(p.stacked_linear({"a", "b"}, 32, 16, false).quantized->dynamic);
  EXPECT_FALSE(p.stacked_linear({"a", "c"}, 32, 16, false).quantized->dynamic);
  EXPECT_EQ(p.linears(), (std::map<std::string, int>{{"fp8", 2}, {"fp8 with dynamic activations", 2}}));
}

TEST_F(QuantizedLoad, Fp8OnLoadLeavesRaggedLinears) {
  Parameters p = open({{"a.weight", at::randn({16, 32})}, {"b.weight", at::randn({16, 24})}});
  p.quantize_on_load("fp8", [](std::string_view) { return true; });
  const LinearSlot a = p.linear("a", 32, 16, false), b = p.linear("b", 24, 16, false);
  ASSERT_TRUE(a.quantized);
  EXPECT_TRUE(a.quantized->dynamic);
  EXPECT_EQ(a.quantized->compute, ScalarType::Float);
  EXPECT_FALSE(b.quantized);
  EXPECT_TRUE(b.weight.defined());
  EXPECT_EQ(p.linears(), (std::map<std::string, int>{{"fp8 with dynamic activations", 1}, {"fp32", 1}}));
}

TEST_F(QuantizedLoad, HonoursTheStoredComputeType) {
  Tensors tensors;
  add_nf4(tensors, "a", at::randn({4, 64}));
  for (const auto& [stored, expected] : std::map<std::string, ScalarType>{
           {"float32", ScalarType::Float}, {"float16", ScalarType::Float}, {"bfloat16", ScalarType::BFloat16}}) {
    std::ofstream(dir_ / "config.json")
        << R"({"quantization_config":{"quant_method":"bitsandbytes","bnb_4bit_quant_type":"nf4",)"
        << "\"bnb_4bit_compute_dtype\":\"" << stored << "\"}}";
    Parameters p = open(tensors, ScalarType::BFloat16);
    EXPECT_EQ(p.linear("a", 64, 4, false).quantized->compute, expected) << stored;
  }
  fs::remove(dir_ / "config.json");
  Parameters p = open(tensors, ScalarType::BFloat16);
  EXPECT_EQ(p.linear("a", 64, 4, false).quantized->compute, ScalarType::BFloat16);
}

TEST_F(QuantizedLoad, RefusesWhatItWouldDrawWrong) {
  Tensors nf4, scaled;
  add_nf4(nf4, "a", at::randn({4, 64}));
  scaled["a.weight"] = at::randn({4, 32}).to(ScalarType::Float8_e4m3fn);
  scaled["a.scale_weight"] = at::ones({});
  // Another model.
  fails([&] { open(nf4).linear("a", 64, 8, false); }, Code::kDataCorrupt, {"a.weight", "[4, 64]", "[8, 64]"});
  fails([&] { open(scaled).linear("a", 16, 8, false); }, Code::kDataCorrupt, {"a.weight", "[4, 32]", "[8, 16]"});
  // A scale that no linear takes.
  fails([&] { open(scaled).finish(""); }, Code::kDataCorrupt, {"a.scale_weight", "no quantized linear"});
  Tensors lone{{"a.weight", at::randn({4, 32})}, {"b._weight_scale", at::ones({4, 1})}};
  fails(
      [&] {
        Parameters p = open(lone);
        p.linear("a", 32, 4, false);
        p.finish("");
      },
      Code::kDataCorrupt, {"b._weight_scale"});
  // An fp8 weight that lost its scale.
  Tensors lost = scaled;
  lost["b.weight"] = scaled["a.weight"];
  fails([&] { open(lost).linear("b", 32, 4, false); }, Code::kDataCorrupt, {"b.weight", "no scale"});
  // A quantized tensor that is no linear.
  fails([&] { open(scaled).tensor("a.weight", {4, 32}); }, Code::kDataCorrupt, {"a.weight", "is quantized"});
  // Codes without their quantization state.
  Tensors bare{{"a.weight", nf4["a.weight"]}};
  fails([&] { open(bare).linear("a", 64, 4, false); }, Code::kDataCorrupt, {"a.weight", "[128, 1]"});
  // Quantized twice.
  for (const Tensors& tensors : {nf4, scaled})
    fails([&] { open(tensors).quantize_on_load("nf4", [](std::string_view) { return true; }); }, Code::kInvalidArgument,
          {"already quantized"});
}

// The fixture "dev" in BFL's names: two double blocks, two single blocks.
class BflFile : public QuantizedLoad {
 protected:
  static fs::path folder() { return golden::Case{"dev", "plain"}.model_dir(); }

  // The transformer's tensors in BFL's names.
  static Tensors bfl() {
    auto p = Parameters::open((folder() / "transformer").string(), Library::kDiffusers, {});
    Tensors from, made;
    for (const std::string& name : p.names()) {
      const auto stored = unwrap(unwrap(Checkpoint::open(folder() / "transformer", Library::kDiffusers)).tensor(name));
      from[name] = p.tensor(name, stored.entry->shape);
    }
    const auto put = [&](const std::string& bfl, const std::vector<std::string>& linears) {
      for (const char* suffix : {".weight", ".bias"}) {
        std::vector<at::Tensor> rows;
        for (const std::string& linear : linears) rows.push_back(from.at(linear + suffix));
        made[bfl + suffix] = at::cat(rows);
      }
    };
    put("img_in", {"x_embedder"});
    put("txt_in", {"context_embedder"});
    for (const auto& [bfl_name, name] : std::map<std::string, std::string>{
             {"time_in", "timestep_embedder"}, {"vector_in", "text_embedder"}, {"guidance_in", "guidance_embedder"}}) {
      put(bfl_name + ".in_layer", {"time_text_embed." + name + ".linear_1"});
      put(bfl_name + ".out_layer", {"time_text_embed." + name + ".linear_2"});
    }
    for (const char* i : {"0", "1"}) {
      const std::string d = "transformer_blocks." + std::string(i) + ".", b = "double_blocks." + std::string(i) + ".";
      put(b + "img_attn.qkv", {d + "attn.to_q", d + "attn.to_k", d + "attn.to_v"});
      put(b + "txt_attn.qkv", {d + "attn.add_q_proj", d + "attn.add_k_proj", d + "attn.add_v_proj"});
      put(b + "img_attn.proj", {d + "attn.to_out.0"});
      put(b + "txt_attn.proj", {d + "attn.to_add_out"});
      put(b + "img_mlp.0", {d + "ff.net.0.proj"});
      put(b + "img_mlp.2", {d + "ff.net.2"});
      put(b + "txt_mlp.0", {d + "ff_context.net.0.proj"});
      put(b + "txt_mlp.2", {d + "ff_context.net.2"});
      put(b + "img_mod.lin", {d + "norm1.linear"});
      put(b + "txt_mod.lin", {d + "norm1_context.linear"});
      made[b + "img_attn.norm.query_norm.scale"] = from.at(d + "attn.norm_q.weight");
      made[b + "img_attn.norm.key_norm.scale"] = from.at(d + "attn.norm_k.weight");
      made[b + "txt_attn.norm.query_norm.scale"] = from.at(d + "attn.norm_added_q.weight");
      made[b + "txt_attn.norm.key_norm.scale"] = from.at(d + "attn.norm_added_k.weight");
      const std::string s = "single_transformer_blocks." + std::string(i) + ".",
                        o = "single_blocks." + std::string(i) + ".";
      put(o + "linear1", {s + "attn.to_q", s + "attn.to_k", s + "attn.to_v", s + "proj_mlp"});
      put(o + "linear2", {s + "proj_out"});
      put(o + "modulation.lin", {s + "norm.linear"});
      made[o + "norm.query_norm.scale"] = from.at(s + "attn.norm_q.weight");
      made[o + "norm.key_norm.scale"] = from.at(s + "attn.norm_k.weight");
    }
    put("final_layer.linear", {"proj_out"});
    for (const char* suffix : {".weight", ".bias"}) {
      const auto halves = from.at("norm_out.linear" + std::string(suffix)).chunk(2);
      made["final_layer.adaLN_modulation.1" + std::string(suffix)] = at::cat({halves[1], halves[0]});
    }
    return made;
  }

  // The latents after two steps.
  at::Tensor draw(const ModelSource& source) {
    EngineOptions options{"cpu", "fp32", 1};
    options.compile.backend = "eager";
    auto engine = unwrap(Engine::create(options, {&flux_family()}));
    auto model = unwrap(engine->load_model(source));
    if (!source.files.empty() || !source.quantize.empty()) linears_ = model->info().linears;
    GenerationRequest request;
    request.prompt = "a red circle above a white star";
    request.fields.set("width", 2 * model->info().size_multiple);
    request.fields.set("height", 3 * model->info().size_multiple);
    request.fields.set("num_inference_steps", 2);
    request.fields.set("max_sequence_length", 16);
    auto generation = unwrap(model->encode(request));
    unwrap(model->denoise(*generation, nullptr));
    unwrap(model->decode(*generation));
    unwrap(generation->dump((dir_ / "dump.safetensors").string()));
    const auto file = unwrap(SafetensorsFile::open((dir_ / "dump.safetensors").string()));
    return copy_to({}, unwrap(file.tensor("latents")));
  }

  std::map<std::string, std::map<std::string, int>> linears_;
};

TEST_F(BflFile, DrawsTheFoldersLatents) {
  const at::Tensor expected = draw({"m", folder()});
  const std::string file = (dir_ / "flux.safetensors").string();
  const Tensors tensors = bfl();
  for (const std::string prefix : {"", "model.diffusion_model.", "diffusion_model."}) {
    Tensors named;
    for (const auto& [name, t] : tensors) named[prefix + name] = t;
    named["vae.decoder.conv_in.weight"] = at::ones({1});
    named["text_encoders.t5xxl.transformer.a.scale_weight"] = at::ones({});
    write(file, named);
    EXPECT_TRUE(at::equal(draw({"m", folder(), {{"transformer", file}}}), expected)) << prefix;
  }
  // Without the folder's own weights, and in diffusers' names.
  const fs::path bare = dir_ / "bare";
  fs::copy(folder(), bare, fs::copy_options::recursive);
  fs::rename(bare / "transformer" / "diffusion_pytorch_model.safetensors", dir_ / "diffusers.safetensors");
  EXPECT_TRUE(at::equal(draw({"m", bare, {{"transformer", (dir_ / "diffusers.safetensors").string()}}}), expected));
  EXPECT_TRUE(at::equal(draw({"m", bare, {{"transformer", file}}}), expected));
}

TEST_F(BflFile, DrawsTheSameInNf4AsTheFolderQuantizedOnLoad) {
  Tensors tensors = bfl(), stored;
  for (const auto& [name, t] : tensors)
    if (name.ends_with(".weight"))
      add_nf4(stored, name.substr(0, name.size() - 7), t);
    else
      stored[name] = t;
  const std::string file = (dir_ / "nf4.safetensors").string(), plain = (dir_ / "plain.safetensors").string();
  write(file, stored);
  write(plain, tensors);
  const at::Tensor expected = draw({"m", folder(), {}, {{"transformer", "nf4"}}});
  const auto linears = linears_;
  EXPECT_EQ(linears.at("transformer"), (std::map<std::string, int>{{"nf4", 50}}));
  EXPECT_FALSE(at::equal(expected, draw({"m", folder()})));
  EXPECT_TRUE(at::equal(draw({"m", folder(), {{"transformer", file}}}), expected));
  EXPECT_EQ(linears_, linears);
  EXPECT_TRUE(at::equal(draw({"m", folder(), {{"transformer", plain}}, {{"transformer", "nf4"}}}), expected));
}

TEST_F(BflFile, NamesTheMissingTensor) {
  Tensors tensors = bfl();
  tensors.erase("double_blocks.1.img_attn.qkv.weight");
  const std::string file = (dir_ / "flux.safetensors").string();
  write(file, tensors);
  fails(
      [&] {
        draw({"m", folder(), {{"transformer", file}}});
      },
      Code::kNotFound, {file, "double_blocks.1.img_attn.qkv.weight"});
  tensors["double_blocks.1.img_attn.qkv.weight"] = at::ones({24, 24});
  write(file, tensors);
  fails(
      [&] {
        draw({"m", folder(), {{"transformer", file}}});
      },
      Code::kDataCorrupt, {"qkv.weight", "[24, 24]", "[72, 24]"});
  fails(
      [&] {
        draw({"m", folder(), {{"transformer", (dir_ / "none.safetensors").string()}}});
      },
      Code::kNotFound, {"none.safetensors"});
}

TEST_F(BflFile, RefusesOtherValuesOfQuantize) {
  fails([&] { draw({"m", folder(), {}, {{"vae", "nf4"}}}); }, Code::kInvalidArgument, {"\"vae\"", "text_encoder_2"});
  fails(
      [&] {
        draw({"m", folder(), {}, {{"text_encoder", "fp8"}}});
      },
      Code::kInvalidArgument, {"quantize.text_encoder is \"fp8\"", "nf4"});
  fails([&] { draw({"m", folder(), {}, {{"transformer", "int8"}}}); }, Code::kInvalidArgument, {"fp8 or nf4"});
}

TEST_F(BflFile, QuantizesTextEncodersOnLoad) {
  draw({"m", folder(), {}, {{"text_encoder", "nf4"}, {"text_encoder_2", "nf4"}}});
  EXPECT_EQ(linears_.at("text_encoder").count("fp32"), 0u);
  EXPECT_EQ(linears_.at("text_encoder_2"), (std::map<std::string, int>{{"fp32", 2}, {"nf4", 12}}));  // fp32: wo
}

}  // namespace
}  // namespace ditfleet::pipeline
