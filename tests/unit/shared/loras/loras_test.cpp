// shared/loras as far as it needs no Redis: what an adapter's file must be, which paths may be registered, records.
#include "shared/loras/adapter.h"
#include "shared/loras/content.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "shared/core/bytes.h"
#include "tests/paths.h"
#include "tests/system/temporary_folder.h"

namespace ditfleet::loras {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

std::string file_of(const std::string& header, const std::string& data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return out + header + data;
}

// A file of two tensors, each of 4 × 8 elements.
std::string adapter_file(const std::string& down = "a.lora_A.weight", const std::string& up = "a.lora_B.weight") {
  return file_of(R"({")" + down + R"(":{"dtype":"F32","shape":[4,8],"data_offsets":[0,128]},")" + up +
                     R"(":{"dtype":"BF16","shape":[8,4],"data_offsets":[128,192]}})",
                 std::string(192, 'x'));
}

Result<Content> check(const std::string& bytes, std::size_t piece, bool told_size) {
  ContentCheck check("the upload", told_size ? std::optional<std::uint64_t>(bytes.size()) : std::nullopt);
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    if (auto good = check.feed(std::string_view(bytes).substr(at, piece)); !good) return good.error();
  }
  return check.finish();
}

TEST(LoraContent, IsTheSameHoweverTheBytesCome) {
  const std::string file = adapter_file();
  for (const std::size_t piece : {1, 7, 8, 9, 100, 100'000}) {
    for (const bool told : {false, true}) {
      const auto content = check(file, piece, told);
      ASSERT_TRUE(content.ok()) << piece << ": " << content.error().message;
      EXPECT_EQ(content->tensors, 2);
      EXPECT_EQ(content->parameters, 64);
      EXPECT_EQ(content->rank, 4);
      const std::string cut = file.substr(0, file.size() - 1);
      EXPECT_FALSE(check(cut, piece, told).ok()) << piece;
      const auto pickle = check("PK\x03\x04" + std::string(1000, '\0'), piece, told);
      ASSERT_FALSE(pickle.ok());
      EXPECT_THAT(pickle.error().message, HasSubstr("pickle"));
      EXPECT_EQ(pickle.error().code, Code::kInvalidArgument);
    }
  }
}

TEST(LoraContent, TakesEveryLayoutOfTrainers) {
  int files = 0;
  for (fs::recursive_directory_iterator at(source_path("tests/fixtures/layouts")), end; at != end; ++at) {
    if (at.depth() < 2 || at->path().extension() != ".safetensors") continue;
    ++files;
    const auto inspected = inspect_file(at->path().string(), 1 << 20);
    EXPECT_TRUE(inspected.ok()) << inspected.error().message;
  }
  EXPECT_GT(files, 60);
}

// What no model could apply is refused when it is registered, by its name.
TEST(LoraContent, RefusesKindsAndTypesThatCannotBeApplied) {
  for (const auto& [down, up, said] :
       {std::tuple("a.lora_A.weight", "a.lora_magnitude_vector", "is a DoRA adapter ('a.lora_magnitude_vector')"),
        {"a.lora_down.weight", "a.dora_scale", "is a DoRA adapter"},
        {"a.hada_w1_a", "a.hada_t1", "is a LoHa of convolutions adapter"},
        {"a.oft_blocks", "b.oft_blocks", "is a OFT adapter"},
        {"a.weight", "b.weight", "contains no LoRA adapter: none of its 2 tensors"}}) {
    const auto content = check(adapter_file(down, up), 64, true);
    ASSERT_FALSE(content.ok()) << down;
    EXPECT_THAT(content.error().message, HasSubstr(said));
  }
  for (const char* name : {"a.hada_w1_a", "a.lokr_w1", "a.diff_b"})
    EXPECT_TRUE(check(adapter_file(name), 64, true).ok()) << name;
  const auto numbers =
      check(file_of(R"({"a.lora_A.weight":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}})", std::string(16, 'x')),
            64, true);
  ASSERT_FALSE(numbers.ok());
  EXPECT_THAT(numbers.error().message, HasSubstr("is of type I32; adapters must be F32, BF16, F16, F64, F8_E4M3"));
  const auto pointer = check("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", 64, true);
  ASSERT_FALSE(pointer.ok());
  EXPECT_THAT(pointer.error().message, HasSubstr("Git LFS pointer"));
}

TEST(LoraContent, KnowsTheUsualNames) {
  for (const char* down : {"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "x.lora_A.default.weight",
                           "double_blocks.0.processor.qkv_lora1.down.weight", "x.lora.down.weight",
                           "x.lora_linear_layer.down.weight", "LORA_UNET_x.lora_down.weight"}) {
    const auto content = check(adapter_file(down), 64, false);
    ASSERT_TRUE(content.ok()) << down << ": " << content.error().message;
    EXPECT_EQ(content->rank, 4) << down;
  }
  const auto other = check(adapter_file("blocks.0.weight", "blocks.1.weight"), 64, true);
  ASSERT_FALSE(other.ok());
  EXPECT_THAT(other.error().message, HasSubstr("'blocks.0.weight'"));
}

TEST(LoraContent, RefusesALieBeforeTheRestIsSent) {
  // The first bytes say that the header, or the data, is longer than the whole.
  ContentCheck header("the upload", 1000);
  const auto refused = header.feed(std::string("\xff\xff\0\0\0\0\0\0{", 9));
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.error().message, HasSubstr("only 1000 in total"));
  ContentCheck data("the upload", 100'000);
  EXPECT_FALSE(data.feed(adapter_file().substr(0, 200)).ok());
  ContentCheck fewer("the upload", 20);
  EXPECT_FALSE(fewer.finish().ok());
  ContentCheck grown("the file", adapter_file().size());
  ASSERT_TRUE(grown.feed(adapter_file() + "more").ok());
  EXPECT_THAT(grown.finish().error().message, HasSubstr("modified while it was read"));
  // A pickle of any protocol is none, a header of 0x0280 bytes is one.
  ContentCheck honest("the upload");
  EXPECT_TRUE(honest.feed(std::string("\x80\x02\0\0\0\0\0\0{", 9)).ok());
  ContentCheck pickle("the upload");
  EXPECT_FALSE(pickle.feed(std::string("\x80\x02}q\0(X\0\0", 9)).ok());
  // So is one of 0x010280 bytes, and one of none is neither.
  const std::string json = adapter_file().substr(8, adapter_file().size() - 8 - 192);
  EXPECT_TRUE(check(file_of(json + std::string(0x010280 - json.size(), ' '), std::string(192, 'x')), 1000, true).ok());
  for (const bool told : {false, true}) {
    const auto none = check(std::string(8, '\0') + "{}", 100, told);
    ASSERT_FALSE(none.ok());
    EXPECT_THAT(none.error().message, HasSubstr("does not start with '{'"));
  }
}

class LoraPaths : public ditfleet::testing::FolderTest {
 protected:
  void SetUp() override {
    for (const char* folder : {"one/below", "two", "outside"}) fs::create_directories(dir_ + "/" + folder);
    for (const char* file : {"one/a", "one/below/b", "two/c", "outside/d"})
      std::ofstream(dir_ + "/" + file) << adapter_file();
    fs::create_symlink(dir_ + "/outside/d", dir_ + "/one/link");
    fs::create_symlink(dir_ + "/two/c", dir_ + "/one/inside");
    fs::create_directory_symlink(dir_ + "/one", dir_ + "/alias");
    real_ = fs::canonical(dir_).string();
  }
  std::string real_;
};

TEST_F(LoraPaths, ResolvesWhatLiesInAFolderAndNothingElse) {
  const std::string folders = dir_ + "/one:" + dir_ + "/two/:/no/such/folder";
  for (const auto& [path, found] : std::map<std::string, std::string>{{dir_ + "/one/a", "/one/a"},
                                                                      {"a", "/one/a"},
                                                                      {"below/b", "/one/below/b"},
                                                                      {"c", "/two/c"},
                                                                      {"inside", "/two/c"},
                                                                      {"below/../a", "/one/a"},
                                                                      {dir_ + "/outside/../two/c", "/two/c"}}) {
    const auto resolved = resolve_path(path, folders);
    ASSERT_TRUE(resolved.ok()) << path << ": " << resolved.error().message;
    EXPECT_EQ(*resolved, real_ + found) << path;
  }
  // A folder that is a link itself is what it points to.
  EXPECT_EQ(*resolve_path(dir_ + "/alias/a", dir_ + "/alias"), real_ + "/one/a");
  for (const std::string& path : {dir_ + "/outside/d", std::string("link"), std::string("../outside/d"),
                                  std::string("/etc/passwd"), dir_ + "/one-and-more", dir_}) {
    const auto resolved = resolve_path(path, folders);
    ASSERT_FALSE(resolved.ok()) << path;
    EXPECT_THAT(resolved.error().message, HasSubstr("outside loras.folders")) << path;
    EXPECT_EQ(resolved.error().param, "path");
  }
  for (const std::string& path : {std::string("none"), std::string("below"), std::string("a/b")}) {
    const auto resolved = resolve_path(path, folders);
    ASSERT_FALSE(resolved.ok()) << path;
    EXPECT_THAT(resolved.error().message, HasSubstr("no file")) << path;
  }
  EXPECT_THAT(resolve_path(dir_ + "/one/a", "").error().message, HasSubstr("loras.folders"));
  EXPECT_FALSE(resolve_path("", folders).ok());
  EXPECT_FALSE(resolve_path(std::string("a\0b", 3), folders).ok());
}

TEST_F(LoraPaths, InspectsAFile) {
  const auto file = inspect_file(dir_ + "/one/a", 1 << 20);
  ASSERT_TRUE(file.ok()) << file.error().message;
  EXPECT_EQ(file->sha256, sha256_hex(adapter_file()));
  EXPECT_EQ(file->bytes, static_cast<std::int64_t>(adapter_file().size()));
  EXPECT_EQ(file->content.rank, 4);
  std::ofstream(dir_ + "/one/bad") << "PK\x03\x04 and so on";
  const auto large = inspect_file(dir_ + "/one/a", 10);
  ASSERT_FALSE(large.ok());
  EXPECT_EQ(large.error().code, Code::kPayloadTooLarge);
  EXPECT_THAT(large.error().message, HasSubstr("loras.max_upload_bytes is 10"));
  EXPECT_EQ(inspect_file(dir_ + "/one/bad", 1 << 20).error().param, "path");
  EXPECT_EQ(inspect_file(dir_ + "/one", 1 << 20).error().code, Code::kInvalidArgument);
}

TEST(LoraRecord, IsReadBack) {
  Adapter adapter;
  adapter.tenant = "ada", adapter.name = "ink-1.0_b", adapter.sha256 = std::string(64, 'a'), adapter.bytes = 1LL << 40,
  adapter.path = "/a \"b\"";
  adapter.models = {"dev", "schnell"}, adapter.pinned = true, adapter.created_ms = 1'700'000'000'000,
  adapter.tensors = 3, adapter.parameters = 5, adapter.rank = 7;
  adapter.dtype = "BF16";
  const auto again = Adapter::parse(adapter.to_json());
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(*again, adapter);
  EXPECT_TRUE(adapter.serves("dev"));
  EXPECT_FALSE(adapter.serves("other"));
  for (const char* text : {"", "[]", "{}", R"({"name":"a","sha256":"b","bytes":1})"})
    EXPECT_EQ(Adapter::parse(text).error().code, Code::kDataCorrupt) << text;
}

}  // namespace
}  // namespace ditfleet::loras
