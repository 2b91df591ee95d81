#include <gtest/gtest.h>

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "pipeline/weights/checkpoint.h"
#include "pipeline/weights/safetensors.h"
#include "pipeline/weights/safetensors_writer.h"

namespace ditfleet::pipeline {
namespace {

namespace fs = std::filesystem;
using testing::Test;

std::string file_bytes(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  return bytes + header + data;
}

// Expects a refusal whose message names the file and contains `part`.
void expect_corrupt(const std::string& bytes, const std::string& part) {
  const auto header = parse_safetensors_header(bytes, "weights/a.safetensors");
  ASSERT_FALSE(header.ok()) << "accepted, but expected: " << part;
  EXPECT_EQ(header.error().code, Code::kDataCorrupt);
  EXPECT_NE(header.error().message.find("weights/a.safetensors"), std::string::npos) << header.error().message;
  EXPECT_NE(header.error().message.find(part), std::string::npos) << header.error().message;
}

std::string one(const std::string& fields) { return "{\"t\":{" + fields + "}}"; }

TEST(SafetensorsHeader, ReadsTensorsAndMetadata) {
  const std::string header =
      R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("e":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]},"__metadata__":{"format":"pt","x":"é\u00e9"}}   )";
  const auto parsed = parse_safetensors_header(file_bytes(header, std::string(16, '\0')), "f");
  ASSERT_TRUE(parsed.ok()) << parsed.error().message;
  ASSERT_EQ(parsed->tensors.size(), 3u);
  EXPECT_EQ(parsed->tensors[0].name, "a");
  EXPECT_TRUE(parsed->tensors[0].shape.empty());
  EXPECT_EQ(parsed->tensors[1].name, "b");
  EXPECT_EQ(parsed->tensors[1].dtype, DType::kBF16);
  EXPECT_EQ(parsed->tensors[1].shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(parsed->tensors[1].begin, 8 + header.size() + 4);
  EXPECT_EQ(parsed->tensors[2].shape, (std::vector<std::int64_t>{0, 7}));
  EXPECT_EQ(parsed->metadata.at("x"), "éé");
}

TEST(SafetensorsHeader, AcceptsAFileWithoutTensors) {
  EXPECT_TRUE(parse_safetensors_header(file_bytes("{}", ""), "f").ok());
}

TEST(SafetensorsHeader, RefusesAWrongHeaderLength) {
  expect_corrupt("", "too few");
  expect_corrupt("1234567", "too few");
  expect_corrupt(std::string(8, '\xff'), "at most");
  expect_corrupt(file_bytes("{}", "").substr(0, 9), "truncated");
  std::string big = file_bytes("{}", "");
  big[4] = 1;
  expect_corrupt(big, "at most");
}

TEST(SafetensorsHeader, RefusesInvalidJson) {
  expect_corrupt(file_bytes("", ""), "'{'");
  expect_corrupt(file_bytes(" {}", ""), "'{'");
  expect_corrupt(file_bytes("[]", ""), "'{'");
  expect_corrupt(file_bytes("{", ""), "not JSON");
  expect_corrupt(file_bytes("{}x", ""), "extra bytes");
  expect_corrupt(file_bytes("{}{}", ""), "extra bytes");
  expect_corrupt(file_bytes("{\"a\xff\":{}}", ""), "UTF-8");
  expect_corrupt(file_bytes("{\"a\":{},}", ""), "");
}

TEST(SafetensorsHeader, RefusesWrongFields) {
  const std::string data(4, '\0');
  expect_corrupt(file_bytes(one(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"), data), "\"F33\"");
  expect_corrupt(file_bytes(one(R"("shape":[1],"data_offsets":[0,4])"), data), "has no dtype");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","data_offsets":[0,4])"), data), "has no shape");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1])"), data), "has no data_offsets");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4])"), data), "twice");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4])"), data), "twice");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), data), "negative");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), data), "not an integer");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), data),
                 "63 bits");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1e3],"data_offsets":[0,4])"), data), "tensor \"t\"");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), data), "list");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":["1"],"data_offsets":[0,4])"), data), "text");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[true],"data_offsets":[0,4])"), data), "unexpected boolean");
  expect_corrupt(file_bytes(one(R"("dtype":null,"shape":[1],"data_offsets":[0,4])"), data), "null");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), data), "number");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":{},"data_offsets":[0,4])"), data), "object");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":"y")"), data), "\"x\"");
  expect_corrupt(file_bytes("{\"t\":1}", data), "number");
  expect_corrupt(file_bytes("{\"__metadata__\":{\"a\":1}}", ""), "number");
  expect_corrupt(file_bytes("{\"__metadata__\":{\"a\":{}}}", ""), "object");
  expect_corrupt(file_bytes(R"({"__metadata__":{"a":"1","a":"1"}})", ""), "twice");
  expect_corrupt(file_bytes(R"({"__metadata__":{},"__metadata__":{}})", ""), "twice");
  const std::string entry = R"("dtype":"F32","shape":[0],"data_offsets":[0,0])";
  expect_corrupt(file_bytes("{\"t\":{" + entry + "},\"\\u0074\":{" + entry + "}}", ""), "\"t\" occurs twice");
}

// Messages may be printed on a terminal.
TEST(SafetensorsHeader, EscapesControlCharactersInNames) {
  const std::string name = R"(evil\n\u001b[2J\u0007\u007f\u009b\u00e9)";
  expect_corrupt(
      file_bytes("{\"" + name + R"(":{"dtype":"F32","shape":[3],"data_offsets":[0,4]}})", std::string(4, '\0')),
      R"("evil\n\x1b[2J\x07\x7f\u009bé")");
}

TEST(SafetensorsHeader, RefusesInvalidRanges) {
  const std::string data(8, '\0');
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), data), "takes 4 bytes");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), data), "begin ≤ end");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,4])"), data), "begin ≤ end");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), data), "gap");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), data), "follow the header");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[3],"data_offsets":[0,12])"), data), "truncated");
  expect_corrupt(file_bytes(one(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])"), data), "whole bytes");
  expect_corrupt(file_bytes(one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), data),
                 "larger than");
  expect_corrupt(
      file_bytes(one(R"("dtype":"I64","shape":[1],"data_offsets":[9223372036854775800,9223372036854775807])"), data),
      "takes 8 bytes");
  expect_corrupt(file_bytes(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                            R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
                            std::string(6, '\0')),
                 "inside the previous tensor");
}

// Every prefix of a valid file is refused. No single changed header byte causes a crash.
TEST(SafetensorsHeader, SurvivesTruncationAndChangedBytes) {
  const std::string good = file_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "12345678");
  for (std::size_t n = 0; n < good.size(); ++n) {
    EXPECT_FALSE(parse_safetensors_header(good.substr(0, n), "f").ok()) << n;
  }
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (int value = 0; value < 256; ++value) {
      std::string changed = good;
      changed[i] = static_cast<char>(value);
      (void)parse_safetensors_header(changed, "f");
    }
  }
}

class SafetensorsFiles : public Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("ditfleet-safetensors-" + std::to_string(::getpid()) + "-" +
                                        testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  void write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  // Writes a file with the named float tensors, each of shape [2] and filled with its position.
  void write_tensors(const std::string& name, const std::vector<std::string>& tensors) const {
    std::vector<std::vector<float>> values;
    for (std::size_t i = 0; i < tensors.size(); ++i) values.push_back({float(i), float(i)});
    std::vector<TensorToWrite> list;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      list.push_back({tensors[i], DType::kF32, {2}, std::as_bytes(std::span(values[i]))});
    }
    ASSERT_TRUE(write_safetensors(path(name), list).ok());
  }
  fs::path dir_;
};

TEST_F(SafetensorsFiles, RoundTrips) {
  std::vector<float> floats(6);
  std::iota(floats.begin(), floats.end(), 0.5f);
  const std::vector<std::int64_t> ids = {1, -2, 49407};
  const std::vector<std::uint8_t> pixels = {1, 2, 3};
  const auto written = write_safetensors(path("x.safetensors"),
                                         {{"pixels", DType::kU8, {3}, std::as_bytes(std::span(pixels))},
                                          {"floats", DType::kF32, {2, 3}, std::as_bytes(std::span(floats))},
                                          {"ids", DType::kI64, {1, 3}, std::as_bytes(std::span(ids))}},
                                         {{"revision", "a \"quoted\" one"}});
  ASSERT_TRUE(written.ok()) << written.error().message;
  const auto file = SafetensorsFile::open(path("x.safetensors"));
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->metadata().at("revision"), "a \"quoted\" one");
  const auto view = file->tensor("floats");
  ASSERT_TRUE(view.ok());
  ASSERT_EQ(view->bytes.size(), 24u);
  EXPECT_EQ(std::memcmp(view->bytes.data(), floats.data(), 24), 0);
  const auto id_view = file->tensor("ids");
  ASSERT_TRUE(id_view.ok());
  EXPECT_EQ(std::memcmp(id_view->bytes.data(), ids.data(), 24), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(id_view->bytes.data()) % 8, 0u);
  EXPECT_TRUE(file->contains("pixels"));
  const auto absent = file->tensor("pixel");
  ASSERT_FALSE(absent.ok());
  EXPECT_NE(absent.error().message.find("\"pixel\""), std::string::npos);
}

TEST_F(SafetensorsFiles, OrderOfTensorsDoesNotChangeTheBytes) {
  const std::vector<float> v = {1, 2};
  const TensorToWrite a{"a", DType::kF32, {2}, std::as_bytes(std::span(v))},
      b{"b", DType::kF32, {1, 2}, std::as_bytes(std::span(v))};
  EXPECT_EQ(*encode_safetensors({a, b}), *encode_safetensors({b, a}));
}

TEST_F(SafetensorsFiles, WriterRefusesMismatchedData) {
  const std::vector<float> v = {1, 2};
  const auto bytes = std::as_bytes(std::span(v));
  EXPECT_FALSE(encode_safetensors({{"a", DType::kF32, {3}, bytes}}).ok());
  EXPECT_FALSE(encode_safetensors({{"", DType::kF32, {2}, bytes}}).ok());
  EXPECT_FALSE(encode_safetensors({{"__metadata__", DType::kF32, {2}, bytes}}).ok());
  EXPECT_FALSE(encode_safetensors({{"a", DType::kF32, {2}, bytes}, {"a", DType::kF32, {2}, bytes}}).ok());
  EXPECT_FALSE(encode_safetensors({{"\xff", DType::kF32, {2}, bytes}}).ok());
}

TEST_F(SafetensorsFiles, OpenNamesTheFault) {
  const auto missing = SafetensorsFile::open(path("no.safetensors"));
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  const auto folder = SafetensorsFile::open(dir_.string());
  ASSERT_FALSE(folder.ok());
  EXPECT_EQ(folder.error().code, Code::kDataCorrupt);
  write("empty.safetensors", "");
  const auto empty = SafetensorsFile::open(path("empty.safetensors"));
  ASSERT_FALSE(empty.ok());
  EXPECT_EQ(empty.error().code, Code::kDataCorrupt);
  write_tensors("good.safetensors", {"a"});
  fs::resize_file(path("good.safetensors"), fs::file_size(path("good.safetensors")) - 1);
  const auto cut = SafetensorsFile::open(path("good.safetensors"));
  ASSERT_FALSE(cut.ok());
  EXPECT_NE(cut.error().message.find("good.safetensors"), std::string::npos);
  EXPECT_NE(cut.error().message.find("\"a\""), std::string::npos) << cut.error().message;
}

// As when someone copies other weights over a file that a worker loads. A mapping would end the process with SIGBUS.
TEST_F(SafetensorsFiles, AFileThatIsTruncatedWhileItIsOpenIsAnError) {
  std::vector<float> values(100'000, 1.0f);
  const std::vector<std::int64_t> shape = {100'000};
  ASSERT_TRUE(write_safetensors(path("a.safetensors"), {{"a", DType::kF32, shape, std::as_bytes(std::span(values))}}));
  const auto file = SafetensorsFile::open(path("a.safetensors"));
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_TRUE(file->tensor("a").ok());
  fs::resize_file(path("a.safetensors"), 4096);
  const auto cut = file->tensor("a");
  ASSERT_FALSE(cut.ok());
  EXPECT_EQ(cut.error().code, Code::kDataCorrupt);
  EXPECT_NE(cut.error().message.find("a.safetensors is shorter than when it was opened"), std::string::npos)
      << cut.error().message;
}

TEST_F(SafetensorsFiles, CheckpointReadsSingleFilesAndShards) {
  write_tensors("model.safetensors", {"a", "b"});
  const auto single = Checkpoint::open(dir_.string(), Library::kDiffusers);
  ASSERT_TRUE(single.ok()) << single.error().message;
  EXPECT_EQ(single->names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(single->bytes(), 16u);

  write_tensors("diffusion_pytorch_model-00001-of-00002.safetensors", {"x", "unlisted"});
  write_tensors("diffusion_pytorch_model-00002-of-00002.safetensors", {"y", "z"});
  write("diffusion_pytorch_model.safetensors.index.json",
        R"({"metadata":{"total_size":32},"weight_map":{"x":"diffusion_pytorch_model-00001-of-00002.safetensors",
            "y":"diffusion_pytorch_model-00002-of-00002.safetensors",
            "z":"diffusion_pytorch_model-00002-of-00002.safetensors"}})");
  auto sharded = Checkpoint::open(dir_.string(), Library::kDiffusers);
  ASSERT_TRUE(sharded.ok()) << sharded.error().message;
  EXPECT_EQ(sharded->names(), (std::vector<std::string>{"unlisted", "x", "y", "z"}));
  const Checkpoint moved = std::move(*sharded);
  const auto z = moved.tensor("z");
  ASSERT_TRUE(z.ok());
  float value = 0;
  ASSERT_TRUE(z->file.read(*z->entry, 4, std::as_writable_bytes(std::span(&value, 1))).ok());
  EXPECT_EQ(value, 1.0f);
  EXPECT_EQ(moved.tensor("a").error().code, Code::kNotFound);
}

// If several files exist, diffusers and transformers load different ones.
TEST_F(SafetensorsFiles, CheckpointLoadsTheFileOfTheFoldersLibrary) {
  const auto names = [&](Library library) {
    const auto opened = Checkpoint::open(dir_.string(), library);
    EXPECT_TRUE(opened.ok());
    return opened.ok() ? opened->names() : std::vector<std::string>();
  };
  using Names = std::vector<std::string>;
  write_tensors("model.safetensors", {"single"});
  write_tensors("model-00001-of-00001.safetensors", {"shard"});
  write("model.safetensors.index.json", R"({"weight_map":{"shard":"model-00001-of-00001.safetensors"}})");
  EXPECT_EQ(names(Library::kTransformers), Names{"single"});
  EXPECT_EQ(names(Library::kDiffusers), Names{"shard"});
  write_tensors("diffusion_pytorch_model.safetensors", {"other"});
  EXPECT_EQ(names(Library::kTransformers), Names{"single"});
  EXPECT_EQ(names(Library::kDiffusers), Names{"other"});
  fs::remove(path("model.safetensors"));
  EXPECT_EQ(names(Library::kTransformers), Names{"shard"});
  fs::remove(path("model.safetensors.index.json"));
  EXPECT_EQ(names(Library::kTransformers), Names{"other"});
}

TEST_F(SafetensorsFiles, CheckpointLoadsTheOnlyVariant) {
  write_tensors("model.fp16.safetensors", {"half"});
  const auto only = Checkpoint::open(dir_.string(), Library::kDiffusers);
  ASSERT_TRUE(only.ok()) << only.error().message;
  EXPECT_EQ(only->names(), (std::vector<std::string>{"half"}));

  write_tensors("model.bf16-00001-of-00001.safetensors", {"x"});  // a shard is not a variant
  write("model.safetensors.index.bf16.json", R"({"weight_map":{"x":"model.bf16-00001-of-00001.safetensors"}})");
  const auto two = Checkpoint::open(dir_.string(), Library::kDiffusers);
  ASSERT_FALSE(two.ok());
  EXPECT_EQ(two.error().code, Code::kNotFound);
  EXPECT_NE(two.error().message.find("several variants (bf16, fp16)"), std::string::npos) << two.error().message;

  std::filesystem::remove(path("model.fp16.safetensors"));
  const auto sharded = Checkpoint::open(dir_.string(), Library::kDiffusers);
  ASSERT_TRUE(sharded.ok()) << sharded.error().message;
  EXPECT_EQ(sharded->names(), (std::vector<std::string>{"x"}));

  write_tensors("model.safetensors", {"whole"});
  const auto whole = Checkpoint::open(dir_.string(), Library::kDiffusers);
  ASSERT_TRUE(whole.ok()) << whole.error().message;
  EXPECT_EQ(whole->names(), (std::vector<std::string>{"whole"}));
}

TEST_F(SafetensorsFiles, CheckpointRefusesABadIndex) {
  const auto open_with = [&](const std::string& index) {
    write("model.safetensors.index.json", index);
    return Checkpoint::open(dir_.string(), Library::kDiffusers);
  };
  EXPECT_EQ(Checkpoint::open(dir_.string(), Library::kDiffusers).error().code, Code::kNotFound);
  EXPECT_EQ(Checkpoint::open(path("nowhere"), Library::kDiffusers).error().code, Code::kNotFound);
  write("pytorch_model.bin", "PK");
  EXPECT_NE(Checkpoint::open(dir_.string(), Library::kDiffusers).error().message.find("pytorch_model.bin is a pickle"),
            std::string::npos);
  write_tensors("s1.safetensors", {"a"});
  for (const char* bad :
       {"", "[]", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})", R"({"weight_map":{"a":1}})",
        R"({"weight_map":{"a":"../s1.safetensors"}})", R"({"weight_map":{"a":"/etc/passwd"}})",
        R"({"weight_map":{"a":".."}})", R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors"}})"}) {
    const auto opened = open_with(bad);
    ASSERT_FALSE(opened.ok()) << bad;
    EXPECT_EQ(opened.error().code, Code::kDataCorrupt) << bad;
    EXPECT_NE(opened.error().message.find("model.safetensors.index.json"), std::string::npos) << opened.error().message;
  }
  const auto missing = open_with(R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_NE(missing.error().message.find("s2.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace ditfleet::pipeline
