// Which linears a checkpoint stores quantized, in small files that the tests write: every format and every refusal.
#include <gtest/gtest.h>

#include <unistd.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>

#include "pipeline/weights/nf4.h"
#include "pipeline/weights/safetensors_writer.h"
#include "pipeline/weights/stored_weights.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;

struct Tensor {
  DType dtype;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

Tensor floats(std::vector<std::int64_t> shape, const std::vector<float>& values) {
  return {DType::kF32, std::move(shape), {reinterpret_cast<const char*>(values.data()), 4 * values.size()}};
}
Tensor bytes(DType dtype, std::vector<std::int64_t> shape, const std::string& values) {
  return {dtype, std::move(shape), values};
}
Tensor text(const std::string& json) { return {DType::kU8, {static_cast<std::int64_t>(json.size())}, json}; }

struct Component {
  std::map<std::string, Tensor> tensors;
  std::map<std::string, std::string> metadata;
  std::string config;  // quantization_config, or empty
};

class StoredWeightsTest : public testing::Test {
 protected:
  void SetUp() override { fs::create_directories(dir_); }
  void TearDown() override { fs::remove_all(dir_); }

  void write(const std::string& file, const Component& c) {
    std::vector<TensorToWrite> tensors;
    for (const auto& [name, t] : c.tensors)
      tensors.push_back({name, t.dtype, t.shape, std::as_bytes(std::span(t.bytes))});
    const auto written = write_safetensors((dir_ / file).string(), tensors, c.metadata);
    ASSERT_TRUE(written.ok()) << written.error().message;
  }

  Result<StoredWeights> find(const Component& c) {
    write("model.safetensors", c);
    checkpoint_ = Checkpoint::open(dir_.string(), Library::kDiffusers).value();
    return find_in(*checkpoint_, c.config);
  }
  static Result<StoredWeights> find_in(const Checkpoint& checkpoint, const std::string& config) {
    if (config.empty()) return StoredWeights::find(checkpoint, nullptr);
    const json::object object = parse_json(config).value().get_object();
    return StoredWeights::find(checkpoint, &object);
  }

  // Expects find() to fail with all of these in its message.
  void refuses(const Component& c, const std::vector<std::string>& parts, Code code = Code::kDataCorrupt) {
    const auto found = find(c);
    ASSERT_FALSE(found.ok()) << "accepted, but expected: " << parts.front();
    EXPECT_EQ(found.error().code, code);
    for (const std::string& part : parts)
      EXPECT_NE(found.error().message.find(part), std::string::npos) << found.error().message;
  }
  // The same of the scales of linear "a".
  void refuses_scales(const Component& c, const std::string& part) {
    const auto found = find(c);
    ASSERT_TRUE(found.ok()) << found.error().message;
    const auto scales = StoredWeights::scales(*checkpoint_, *found->find("a"));
    ASSERT_FALSE(scales.ok());
    EXPECT_EQ(scales.error().code, Code::kDataCorrupt);
    EXPECT_NE(scales.error().message.find(part), std::string::npos) << scales.error().message;
  }
  std::vector<float> scales_of(const Component& c) {
    const auto found = find(c);
    EXPECT_TRUE(found.ok()) << found.error().message;
    return StoredWeights::scales(*checkpoint_, *found->find("a")).value();
  }

  const fs::path dir_ = fs::temp_directory_path() / ("ditfleet_stored_weights" + std::to_string(::getpid()));
  std::optional<Checkpoint> checkpoint_;
};

constexpr const char* kBitsandbytes =
    R"({"quant_method":"bitsandbytes","load_in_4bit":true,"bnb_4bit_quant_type":"nf4"})";
const std::string kState = "a.weight.quant_state.bitsandbytes__nf4", kAbsmax = "a.weight.absmax",
                  kMap = "a.weight.quant_map";

Tensor book() { return floats({16}, {kNf4Book.begin(), kNf4Book.end()}); }

// Linear a: [3, 50], which are 150 values in 3 blocks.
Component nf4() {
  Component c{.config = kBitsandbytes};
  c.tensors = {{"a.weight", bytes(DType::kU8, {75, 1}, std::string(75, '\x12'))},
               {kAbsmax, floats({3}, {1, 2, 3})},
               {kMap, book()},
               {kState, text(R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[3,50]})")},
               {"a.bias", floats({3}, {0, 0, 0})}};
  return c;
}

Component nested_nf4() {
  Component c = nf4();
  std::vector<float> map(256);
  for (std::size_t i = 0; i < map.size(); ++i) map[i] = (static_cast<float>(i) - 127) / 129;
  c.tensors[kAbsmax] = bytes(DType::kU8, {3}, std::string("\x03\xc8\x7f", 3));
  c.tensors["a.weight.nested_absmax"] = floats({1}, {0.7234567F});
  c.tensors["a.weight.nested_quant_map"] = floats({256}, map);
  c.tensors[kState] =
      text(R"({"quant_type":"nf4","blocksize":64,"dtype":"bfloat16","shape":[3,50],"nested_blocksize":256,)"
           R"("nested_dtype":"float32","nested_offset":2.7291667461395264})");
  return c;
}

// Linear a [2, 3] in E4M3 with a scale per row.
Component torchao() {
  Component c{.config = R"({"quant_method":"torchao"})"};
  c.tensors = {{"a._weight_qdata", bytes(DType::kF8E4M3, {2, 3}, "123456")},
               {"a._weight_scale", floats({2, 1}, {0.5, 0.25})}};
  c.metadata["a.weight"] =
      R"({"_type":"Float8Tensor","_data":{"act_quant_kwargs":{"_data":{"granularity":{"_type":"PerRow"},)"
      R"("hp_value_lb":null}}}})";
  return c;
}

Component comfy(const std::string& scale = "a.scale_weight") {
  Component c;
  c.tensors = {{"a.weight", bytes(DType::kF8E4M3, {2, 3}, "123456")}, {scale, floats({}, {0.5})}};
  return c;
}

TEST_F(StoredWeightsTest, FindsNothingInAnUnquantizedFolder) {
  Component c;
  c.tensors = {{"a.weight", floats({1, 2}, {1, 2})}};
  const auto found = find(c);
  ASSERT_TRUE(found.ok()) << found.error().message;
  EXPECT_TRUE(found->empty());
  EXPECT_EQ(found->find("a"), nullptr);
}

TEST_F(StoredWeightsTest, FindsNf4) {
  const auto found = find(nf4());
  ASSERT_TRUE(found.ok()) << found.error().message;
  const StoredWeight* a = found->find("a");
  ASSERT_TRUE(a);
  EXPECT_TRUE(a->nf4);
  EXPECT_EQ(a->shape, (std::vector<std::int64_t>{3, 50}));
  EXPECT_EQ(found->nf4_compute(), "float32");  // bitsandbytes' default
  EXPECT_EQ(scales_of(nf4()), (std::vector<float>{1, 2, 3}));
}

TEST_F(StoredWeightsTest, RoundsProductAndSumOfDoubleQuantization) {
  const std::vector<float> scales = scales_of(nested_nf4());
  ASSERT_EQ(scales.size(), 3u);
  const int codes[] = {3, 200, 127};
  for (int i = 0; i < 3; ++i) {
    const float map = (static_cast<float>(codes[i]) - 127) / 129;
    const volatile float product = map * 0.7234567F;  // volatile: rounded to fp32
    const volatile float sum = product + 2.7291667461395264F;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(scales[static_cast<std::size_t>(i)]),
              std::bit_cast<std::uint32_t>(static_cast<float>(sum)));
  }
}

TEST_F(StoredWeightsTest, FindsAWeightAndItsScalesInDifferentShards) {
  Component first, second = nf4();
  first.tensors["a.weight"] = second.tensors["a.weight"];
  second.tensors.erase("a.weight");
  write("diffusion_pytorch_model-00001-of-00002.safetensors", first);
  write("diffusion_pytorch_model-00002-of-00002.safetensors", second);
  json::object map;
  for (const auto& [name, tensor] : second.tensors) map[name] = "diffusion_pytorch_model-00002-of-00002.safetensors";
  map["a.weight"] = "diffusion_pytorch_model-00001-of-00002.safetensors";
  std::ofstream(dir_ / "diffusion_pytorch_model.safetensors.index.json")
      << json::serialize(json::object{{"weight_map", map}});
  const Checkpoint checkpoint = Checkpoint::open(dir_.string(), Library::kDiffusers).value();
  const auto found = find_in(checkpoint, kBitsandbytes);
  ASSERT_TRUE(found.ok()) << found.error().message;
  EXPECT_TRUE(found->find("a"));
}

TEST_F(StoredWeightsTest, RefusesDamagedNf4) {
  const auto with = [](const std::string& name, const Tensor& tensor, Component c = nf4()) {
    c.tensors[name] = tensor;
    return c;
  };
  const auto without = [](const std::string& name, Component c = nf4()) {
    c.tensors.erase(name);
    return c;
  };
  const auto state = [&](const std::string& json) { return with(kState, text(json)); };
  refuses(with(kAbsmax, floats({2}, {1, 2})), {kAbsmax, "[2]", "[3]"});
  refuses(with(kAbsmax, floats({3, 1}, {1, 2, 3})), {kAbsmax, "[3, 1]"});
  refuses(with(kAbsmax, bytes(DType::kF16, {3}, "123456")), {kAbsmax, "F16", "F32"});
  refuses(with(kAbsmax, bytes(DType::kU8, {3}, "123")), {"nested_blocksize"});
  refuses(without(kAbsmax), {kAbsmax}, Code::kNotFound);
  refuses(without(kMap), {kMap}, Code::kNotFound);
  refuses(without("a.weight"), {"a.weight"}, Code::kNotFound);
  refuses(with("a.weight", bytes(DType::kU8, {74, 1}, std::string(74, 'x'))), {"a.weight", "[74, 1]", "[75, 1]"});
  refuses(with("a.weight", floats({3, 50}, std::vector<float>(150))), {"a.weight", "F32", "U8"});
  auto other = kNf4Book;
  other[3] = std::nextafter(other[3], 0.0F);
  refuses(with(kMap, floats({16}, {other.begin(), other.end()})), {kMap, "code book"});
  refuses(with(kMap, floats({15}, std::vector<float>(15))), {kMap, "[16]"});
  refuses(state(R"({"quant_type":"nf4","blocksize":128,"shape":[3,50]})"), {kState, "blocksize 128", "64"});
  refuses(state(R"({"quant_type":"fp4","blocksize":64,"shape":[3,50]})"), {kState, "fp4"});
  refuses(state(R"({"quant_type":"nf4","blocksize":64})"), {kState, "shape missing"});
  for (const char* shape : {"[3]", "[3,50,1]", "[0,50]", "[-3,50]", "[true,50]", "[4294967296,4294967296]", "7"})
    refuses(state(R"({"quant_type":"nf4","blocksize":64,"shape":)" + std::string(shape) + "}"), {kState, shape});
  refuses(state(R"({"quant_type":"nf4","blocksize":64,"shape":[50,4]})"), {"a.weight", "[100, 1]"});
  refuses(state("not JSON"), {kState, "not JSON"});
  refuses_scales(with(kAbsmax, floats({3}, {1, -2, 3})), "-2.0");
  refuses_scales(with(kAbsmax, floats({3}, {1, 2, std::numeric_limits<float>::quiet_NaN()})), "nan");
  refuses_scales(with(kAbsmax, floats({3}, {1, 2, std::numeric_limits<float>::infinity()})), "inf");
  Component config_only{.config = kBitsandbytes};
  config_only.tensors["a.weight"] = floats({1, 1}, {1});
  refuses(config_only, {"quantization_config", "no linear is stored quantized"});

  const auto nested = [&](const std::string& name, const Tensor& t) { return with(name, t, nested_nf4()); };
  refuses(nested("a.weight.nested_absmax", floats({2}, {1, 2})), {"nested_absmax", "[2]", "[1]"});
  refuses(nested("a.weight.nested_quant_map", floats({16}, std::vector<float>(16))), {"nested_quant_map", "[256]"});
  refuses(without("a.weight.nested_absmax", nested_nf4()), {"nested_absmax"}, Code::kNotFound);
  const std::string begin = R"({"quant_type":"nf4","blocksize":64,"shape":[3,50],"nested_blocksize":)";
  refuses(nested(kState, text(begin + R"(64,"nested_dtype":"float32","nested_offset":1})")), {"nested_blocksize 64"});
  refuses(nested(kState, text(begin + R"(256,"nested_dtype":"float16","nested_offset":1})")), {"nested_dtype"});
  refuses(nested(kState, text(begin + R"(256,"nested_dtype":"float32"})")), {"nested_offset"});
  refuses_scales(nested("a.weight.nested_absmax", floats({1}, {-1})), "nested_absmax");
  refuses_scales(nested("a.weight.nested_quant_map",
                        floats({256}, std::vector<float>(256, std::numeric_limits<float>::infinity()))),
                 "nested_quant_map");
}

TEST_F(StoredWeightsTest, RefusesOtherMethodsByName) {
  const auto config = [](const std::string& json) {
    Component c = nf4();
    c.config = json;
    return c;
  };
  refuses(config(R"({"quant_method":"bitsandbytes","load_in_8bit":true})"), {"int8", "`quantize`"});
  refuses(config(R"({"quant_method":"bitsandbytes","load_in_4bit":true})"), {"fp4", "`quantize`"});
  refuses(config(R"({"quant_method":"bitsandbytes","bnb_4bit_quant_type":"nf4","bnb_4bit_quant_storage":"bfloat16"})"),
          {"bnb_4bit_quant_storage", "bfloat16"});
  refuses(config(R"({"quant_method":"bitsandbytes","bnb_4bit_quant_type":"nf4","bnb_4bit_compute_dtype":"int8"})"),
          {"bnb_4bit_compute_dtype is int8", "bfloat16"});
  refuses(config(R"({"quant_method":"modelopt","quant_algo":"NVFP4"})"), {"ModelOpt NVFP4"});
  refuses(config(R"({"quant_method":"modelopt","quant_type":"INT8"})"), {"ModelOpt INT8"});
  refuses(config(R"({"quant_method":"quanto"})"), {"\"quanto\"", "bitsandbytes NF4"});
  refuses(config("{}"), {"quant_method"});
  const auto tensor = [](const std::string& name) {
    Component c = comfy();
    c.tensors[name] = floats({1}, {1});
    return c;
  };
  refuses(tensor("a.SCB"), {"int8", "a.SCB"});
  refuses(tensor("a.weight_scale_2"), {"NVFP4"});
  refuses(tensor("a.weight_code"), {"ComfyUI's NF4"});
  refuses(tensor("a.weight_scale_inv"), {"per block"});
  refuses(tensor("a.pre_quant_scale"), {"AWQ"});
  refuses(tensor("b.weight.quant_state.bitsandbytes__fp4"), {"bitsandbytes fp4"});
}

TEST_F(StoredWeightsTest, FindsTorchao) {
  const auto found = find(torchao());
  ASSERT_TRUE(found.ok()) << found.error().message;
  const StoredWeight* a = found->find("a");
  ASSERT_TRUE(a);
  EXPECT_TRUE(a->dynamic);
  EXPECT_FALSE(a->nf4);
  EXPECT_EQ(a->shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(scales_of(torchao()), (std::vector<float>{0.5, 0.25}));

  Component weight_only = torchao();
  weight_only.metadata["a.weight"] = R"({"_type":"Float8Tensor","_data":{"act_quant_kwargs":null}})";
  weight_only.tensors["a._weight_scale"] = floats({1, 1}, {0.75});
  EXPECT_EQ(scales_of(weight_only), (std::vector<float>{0.75, 0.75}));
  EXPECT_FALSE(find(weight_only)->find("a")->dynamic);
}

TEST_F(StoredWeightsTest, RefusesDamagedTorchao) {
  const auto with = [](const std::string& name, const Tensor& tensor) {
    Component c = torchao();
    c.tensors[name] = tensor;
    return c;
  };
  const auto metadata = [](const std::string& json) {
    Component c = torchao();
    c.metadata["a.weight"] = json;
    return c;
  };
  refuses(with("a._weight_scale", floats({3, 1}, {1, 2, 3})), {"a._weight_scale", "[3, 1]", "[2, 1]"});
  refuses(with("a._weight_scale", bytes(DType::kBF16, {2, 1}, "1234")), {"a._weight_scale", "BF16", "F32"});
  refuses(with("a._weight_qdata", bytes(DType::kF8E5M2, {2, 3}, "123456")), {"a._weight_qdata", "F8_E4M3"});
  refuses(with("a._weight_qdata", bytes(DType::kF8E4M3, {6}, "123456")), {"a._weight_qdata", "[out, in]"});
  refuses_scales(with("a._weight_scale", floats({2, 1}, {1, -1})), "a._weight_scale");
  Component missing = torchao();
  missing.tensors.erase("a._weight_scale");
  refuses(missing, {"a._weight_scale"}, Code::kNotFound);
  missing = torchao();
  missing.metadata.clear();
  refuses(missing, {"no metadata \"a.weight\""});
  refuses(metadata(R"({"_type":"Int4Tensor","_data":{}})"), {"Int4Tensor"});
  refuses(metadata(R"({"_type":"Float8Tensor"})"), {"_data"});
  refuses(metadata(R"({"_type":"Float8Tensor","_data":{}})"), {"act_quant_kwargs"});
  refuses(
      metadata(
          R"({"_type":"Float8Tensor","_data":{"act_quant_kwargs":{"_data":{"granularity":{"_type":"PerTensor"}}}}})"),
      {"PerTensor", "PerRow"});
  refuses(metadata(R"({"_type":"Float8Tensor","_data":{"act_quant_kwargs":{"_data":{"granularity":{"_type":"PerRow"},)"
                   R"("hp_value_ub":1}}}})"),
          {"hp_value_ub"});
  refuses(metadata("nothing"), {"the metadata of a.weight"});
}

TEST_F(StoredWeightsTest, FindsScaledFp8InOldAndNewNames) {
  for (const char* scale : {"a.scale_weight", "a.weight_scale"}) {
    const auto found = find(comfy(scale));
    ASSERT_TRUE(found.ok()) << found.error().message;
    EXPECT_FALSE(found->find("a")->dynamic);
    EXPECT_TRUE(found->has_scales());
    EXPECT_EQ(scales_of(comfy(scale)), (std::vector<float>{0.5, 0.5}));
  }
  Component by_row = comfy();
  by_row.tensors["a.scale_weight"] = floats({2, 1}, {0.5, 2});
  by_row.tensors["scaled_fp8"] = bytes(DType::kF8E4M3, {2}, "12");
  by_row.tensors["a.scale_input"] = floats({}, {1});
  EXPECT_EQ(scales_of(by_row), (std::vector<float>{0.5, 2}));
  Component e5m2 = comfy("a.weight_scale");
  e5m2.tensors["a.weight"].dtype = DType::kF8E5M2;
  e5m2.metadata["_quantization_metadata"] =
      R"({"layers":{"a":{"format":"float8_e5m2"},"other.b":{"format":"nvfp4"}}})";  // b is not in this component
  EXPECT_TRUE(find(e5m2).ok()) << find(e5m2).error().message;
  Component layers = comfy("a.weight_scale");
  layers.tensors["a.comfy_quant"] = text(R"({"format":"float8_e4m3fn"})");
  const auto found = find(layers);
  ASSERT_TRUE(found.ok()) << found.error().message;
  EXPECT_EQ(found->find("a")->tensors.size(), 3u);
}

// Products quantize their inputs if the file has a scale for inputs, or scales of rows in LightX2V's way.
TEST_F(StoredWeightsTest, TellsWhoseProductsAreInFp8) {
  const auto dynamic = [&](const std::function<void(Component&)>& change, std::int64_t in = 32) {
    Component c;
    c.tensors["a.weight"] = bytes(DType::kF8E4M3, {16, in}, std::string(static_cast<std::size_t>(16 * in), '1'));
    c.tensors["a.weight_scale"] = floats({}, {0.5});
    change(c);
    const auto found = find(c);
    EXPECT_TRUE(found.ok()) << found.error().message;
    return found.ok() && found->find("a")->dynamic;
  };
  const auto scale_of_inputs = [](Component& c) { c.tensors["a.input_scale"] = floats({1}, {0.01F}); };
  const auto by_row = [](Component& c) { c.tensors["a.weight_scale"] = floats({16, 1}, std::vector<float>(16, 0.5)); };
  EXPECT_FALSE(dynamic([](Component&) {}));
  EXPECT_TRUE(dynamic(scale_of_inputs));
  EXPECT_TRUE(dynamic(by_row));
  EXPECT_FALSE(dynamic(scale_of_inputs, 33)) << "cuBLASLt needs multiples of 16";
  EXPECT_FALSE(dynamic([](Component& c) { c.tensors["a.input_scale"] = floats({}, {1}); })) << "stands for none";
  EXPECT_TRUE(dynamic([&](Component& c) {
    scale_of_inputs(c);
    c.config = R"({"quant_method":"modelopt","quant_algo":"FP8"})";
  }));
  EXPECT_FALSE(dynamic([&](Component& c) {
    by_row(c);
    c.tensors["a.comfy_quant"] = text(R"({"format":"float8_e4m3fn"})");
  }));
  EXPECT_FALSE(dynamic([&](Component& c) {
    scale_of_inputs(c);
    c.tensors["a.comfy_quant"] = text(R"({"format":"float8_e4m3fn","full_precision_matrix_mult":true})");
  }));
  EXPECT_FALSE(dynamic([&](Component& c) {
    scale_of_inputs(c);
    c.tensors["scaled_fp8"] = bytes(DType::kF8E4M3, {2}, "12");
  }));
  EXPECT_FALSE(dynamic([&](Component& c) {
    scale_of_inputs(c);
    c.tensors["a.weight"].dtype = DType::kF8E5M2;
  }));
}

TEST_F(StoredWeightsTest, RefusesDamagedOrOtherScaledFp8) {
  const auto with = [](const std::string& name, const Tensor& tensor) {
    Component c = comfy("a.weight_scale");
    c.tensors[name] = tensor;
    return c;
  };
  refuses(with("a.input_scale", floats({}, {-1})), {"a.input_scale", "not negative"});
  refuses(with("a.input_scale", floats({2}, {1, 1})), {"a.input_scale", "[2]"});
  refuses(with("a.scale_input", bytes(DType::kU8, {}, "1")), {"a.scale_input", "U8"});
  refuses(with("a.weight_scale", floats({3}, {1, 2, 3})), {"a.weight_scale", "[3]", "[2, 1]"});
  refuses(with("a.weight_scale", bytes(DType::kU8, {}, "1")), {"a.weight_scale", "U8"});
  refuses(with("a.weight", bytes(DType::kI8, {2, 3}, "123456")), {"integers", "I8"});
  refuses(with("a.weight", floats({2, 3}, std::vector<float>(6))), {"a.weight", "F32", "F8_E4M3"});
  refuses(with("b.weight_scale", floats({}, {1})), {"b.weight_scale", "no weight"});
  refuses(with("a.scale_weight", floats({}, {1})), {"a.weight", "several"});
  refuses(with("scaled_fp8", bytes(DType::kU8, {1}, "1")), {"scaled_fp8", "U8"});
  refuses_scales(with("a.weight_scale", floats({}, {-1})), "a.weight_scale");
  for (const char* format : {"mxfp8", "nvfp4", "int8_tensorwise", "convrot_w4a4", ""})
    refuses(with("a.comfy_quant", text(R"({"format":")" + std::string(format) + "\"}")), {"ComfyUI's", format});
  refuses(with("a.comfy_quant", text(R"({"format":"float8_e5m2"})")), {"a.weight", "F8_E5M2"});
  refuses(with("a.comfy_quant", text("[]")), {"a.comfy_quant"});
  Component lost;
  lost.tensors["a.weight"] = bytes(DType::kF8E4M3, {2, 3}, "123456");
  lost.metadata["_quantization_metadata"] = R"({"layers":{"a":{"format":"float8_e4m3fn"}}})";
  refuses(lost, {"a has the format float8_e4m3fn", "a.weight_scale"});
  lost.metadata["_quantization_metadata"] = "{}";
  refuses(lost, {"_quantization_metadata", "layers"});
}

TEST_F(StoredWeightsTest, FindsFp8WithoutScales) {
  Component c;
  c.tensors = {{"a.weight", bytes(DType::kF8E5M2, {2, 3}, "123456")},
               {"norm.weight", bytes(DType::kF8E5M2, {2}, "12")}};
  const auto found = find(c);
  ASSERT_TRUE(found.ok()) << found.error().message;
  EXPECT_TRUE(found->find("a")->scales.empty());
  EXPECT_EQ(found->find("norm"), nullptr);
  EXPECT_FALSE(found->has_scales());
}

TEST_F(StoredWeightsTest, KnowsTheNamesOfQuantizationTensors) {
  for (const char* name : {"a.weight.absmax", "a.weight.quant_map", "a.weight.nested_quant_map", "a._weight_scale",
                           "a.weight.quant_state.bitsandbytes__nf4", "a.scale_weight", "a.input_scale", "a.comfy_quant",
                           "scaled_fp8", "a.SCB", "a._weight_qdata", "a.weight_scale_2"})
    EXPECT_TRUE(is_quantization_tensor(name)) << name;
  for (const char* name : {"a.weight", "quant_conv.weight", "img_attn.norm.query_norm.scale", "a.bias", "weight"})
    EXPECT_FALSE(is_quantization_tensor(name)) << name;
}

TEST_F(StoredWeightsTest, OpensOneComponentOfAFile) {
  const auto names = [&](const std::vector<std::string>& tensors) {
    Component c;
    for (const std::string& name : tensors) c.tensors[name] = floats({}, {1});
    write("all.safetensors", c);
    return Checkpoint::open_file((dir_ / "all.safetensors").string(), {"model.diffusion_model.", "diffusion_model."})
        .value()
        .names();
  };
  EXPECT_EQ(names({"model.diffusion_model.a", "vae.b", "text_encoders.t5.scale_weight", "c"}),
            (std::vector<std::string>{"a"}));
  EXPECT_EQ(names({"diffusion_model.a", "b"}), (std::vector<std::string>{"a"}));
  EXPECT_EQ(names({"a", "vae.b", "text_encoders.c"}), (std::vector<std::string>{"a"}));
  std::ofstream(dir_ / "model.gguf") << "GGUF";
  fs::remove(dir_ / "all.safetensors");
  const auto gguf = Checkpoint::open(dir_.string(), Library::kDiffusers);  // the only weights in the folder
  EXPECT_EQ(gguf.error().code, Code::kDataCorrupt);
  EXPECT_NE(gguf.error().message.find("model.gguf"), std::string::npos) << gguf.error().message;
}

}  // namespace
}  // namespace ditfleet::pipeline
