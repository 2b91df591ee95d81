// The adapter files of a host: which are kept, evicted and refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "shared/core/bytes.h"
#include "shared/loras/content.h"
#include "tests/system/temporary_folder.h"
#include "worker/adapters/fetcher.h"
#include "worker/adapters/loader.h"

namespace ditfleet::worker {
namespace {

namespace fs = std::filesystem;

class AdapterFiles : public testing::FolderTest {
 protected:
  static std::string content(char c, std::size_t bytes = 100) { return std::string(bytes, c); }
  AdapterCopyPtr keep(const std::string& bytes, AdapterCopies* copies = nullptr) {
    auto writer = (copies ? copies : &copies_)->begin(sha256_hex(bytes), static_cast<std::int64_t>(bytes.size()));
    EXPECT_TRUE(writer.ok()) << (writer ? "" : writer.error().message);
    EXPECT_TRUE((*writer)->write(std::string_view(bytes).substr(0, bytes.size() / 2)).ok());
    EXPECT_TRUE((*writer)->write(std::string_view(bytes).substr(bytes.size() / 2)).ok());
    auto copy = (*writer)->commit();
    EXPECT_TRUE(copy.ok()) << (copy ? "" : copy.error().message);
    return copy ? *copy : nullptr;
  }
  bool has(char c) { return fs::exists(cache_ + "/" + sha256_hex(content(c)) + ".safetensors"); }

  const std::string cache_ = dir_ + "/cache";
  AdapterCopies copies_{cache_, 250};
};

TEST_F(AdapterFiles, TheLeastRecentlyUsedCopyIsEvictedUnlessItIsInUse) {
  keep(content('a'));
  keep(content('b'));
  ASSERT_TRUE(copies_.find(sha256_hex(content('a'))));  // b is the older one now
  keep(content('c'));
  EXPECT_TRUE(has('a') && has('c'));
  EXPECT_FALSE(has('b'));
  const auto a = copies_.find(sha256_hex(content('a'))), c = copies_.find(sha256_hex(content('c')));
  const auto d = keep(content('d'));
  EXPECT_TRUE(has('a') && has('c') && has('d')) << "over the limit, because all are in use";
  EXPECT_EQ(copies_.bytes(), 300);
}

std::int64_t bytes_in(const std::string& folder) {
  std::int64_t sum = 0;
  for (const auto& file : fs::directory_iterator(folder)) sum += static_cast<std::int64_t>(file.file_size());
  return sum;
}

TEST_F(AdapterFiles, CopiesAreEvictedWhenTheDiskIsFull) {
  AdapterCopies copies(cache_, 1 << 30, [](const std::string& folder) { return 350 - bytes_in(folder); });
  for (const char c : {'a', 'b', 'c'}) keep(content(c), &copies);
  ASSERT_TRUE(copies.find(sha256_hex(content('a'))));  // b is the oldest now
  keep(content('d'), &copies);
  EXPECT_TRUE(has('a') && has('c') && has('d'));
  EXPECT_FALSE(has('b'));
  const auto used = copies.find(sha256_hex(content('c')));
  EXPECT_EQ(copies.begin(sha256_hex("x"), 360).error().code, Code::kResourceExhausted);
  EXPECT_TRUE(has('a') && has('c') && has('d')) << "evicting them would not be enough";
  EXPECT_TRUE(copies.begin(sha256_hex("x"), 240).ok());
  EXPECT_TRUE(has('c')) << "in use";
}

TEST_F(AdapterFiles, ACopyInUseStaysReadableAfterItsRemoval) {
  const auto made = keep(content('a')), found = copies_.find(sha256_hex(content('a')));
  copies_.remove(sha256_hex(content('a')));
  EXPECT_FALSE(has('a'));
  for (const auto& copy : {made, found}) EXPECT_EQ(*read_file(copy->path()), content('a'));
}

TEST_F(AdapterFiles, ACopyThatAnotherProcessUsesIsNotEvicted) {
  AdapterCopies other(cache_, 250);
  const auto used = keep(content('a'), &other);
  keep(content('b'));
  keep(content('c'));
  EXPECT_TRUE(has('a'));
  EXPECT_FALSE(has('b'));
}

TEST_F(AdapterFiles, EachProcessChecksACopyBeforeItsFirstUse) {
  const std::string sha256 = sha256_hex(content('a'));
  fs::create_directories(cache_);
  std::ofstream(cache_ + "/" + sha256 + ".safetensors") << content('b');
  EXPECT_FALSE(copies_.find_checked(sha256));
  EXPECT_FALSE(copies_.find(sha256));
  EXPECT_FALSE(has('a')) << "its content does not match its name";
  AdapterCopies other(cache_, 250);
  keep(content('a'), &other);
  EXPECT_FALSE(copies_.find_checked(sha256)) << "another process has checked it";
  EXPECT_TRUE(copies_.find(sha256));
  EXPECT_TRUE(copies_.find_checked(sha256));
  // Changed by another program.
  std::ofstream(cache_ + "/" + sha256 + ".safetensors") << content('z', 99);
  EXPECT_FALSE(copies_.find_checked(sha256));
  EXPECT_FALSE(copies_.find(sha256));
}

TEST_F(AdapterFiles, OnlyTheAnnouncedBytesBecomeACopy) {
  const std::string sha256 = sha256_hex(content('a'));
  for (const std::string& bytes : {content('b'), content('a', 99)}) {
    auto writer = copies_.begin(sha256, 100);
    ASSERT_TRUE(writer.ok() && (*writer)->write(bytes).ok());
    const auto copy = (*writer)->commit();
    ASSERT_FALSE(copy.ok());
    EXPECT_EQ(copy.error().code, Code::kDataCorrupt);
    EXPECT_NE(copy.error().message.find(sha256_hex(bytes)), std::string::npos);
  }
  {
    auto writer = copies_.begin(sha256, 100);
    EXPECT_EQ((*writer)->write(content('a', 101)).error().code, Code::kDataCorrupt);
  }
  EXPECT_TRUE(fs::is_empty(cache_)) << "partial files are left";
}

TEST_F(AdapterFiles, AFullDiskAndAMissingFolderAreReportedBeforeTheFetch) {
  const std::string sha256 = sha256_hex("x");
  const auto full = copies_.begin(sha256, std::int64_t{1} << 60);
  ASSERT_FALSE(full.ok());
  EXPECT_EQ(full.error().code, Code::kResourceExhausted);
  EXPECT_NE(full.error().message.find("worker.lora.cache_dir"), std::string::npos) << full.error().message;
  EXPECT_TRUE(fs::is_empty(cache_));
  AdapterCopies none("", 100);
  EXPECT_EQ(none.begin(sha256, 1).error().code, Code::kUnavailable);
  EXPECT_FALSE(none.find(sha256));
  std::ofstream(dir_ + "/file") << "x";
  AdapterCopies blocked(dir_ + "/file", 100);
  EXPECT_EQ(blocked.begin(sha256, 1).error().code, Code::kUnavailable);
}

TEST_F(AdapterFiles, AnAbandonedPartialFileIsRemoved) {
  fs::create_directories(cache_);
  std::ofstream(cache_ + "/old.part") << "x";
  std::ofstream(cache_ + "/new.part") << "x";
  const timespec long_ago[2] = {{.tv_sec = 1'000'000'000, .tv_nsec = 0}, {.tv_sec = 1'000'000'000, .tv_nsec = 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, (cache_ + "/old.part").c_str(), long_ago, 0), 0);
  keep(content('a'));
  EXPECT_FALSE(fs::exists(cache_ + "/old.part"));
  EXPECT_TRUE(fs::exists(cache_ + "/new.part"));
}

TEST(WithAdapterNames, ReplacesPathsEvenIfOneIsAPrefixOfAnother) {
  const std::vector<job::LoraUse> uses = {{"ink", 1, {}}, {"oil", 1, {}}};
  const std::vector<pipeline::LoraRequest> loras = {{.path = "/fd/3"}, {.path = "/fd/31"}};
  EXPECT_EQ(with_adapter_names(invalid_argument("/fd/31: not as /fd/3"), uses, loras).message, "oil: not as ink");
}

// Which registered files a worker accepts.
TEST_F(AdapterFiles, OnlyRegularFilesBelowAFolderAreCopied) {
  const std::string folder = dir_ + "/in", bytes = content('a');
  fs::create_directories(folder + "/deep");
  loras::Location location;
  location.sha256 = sha256_hex(bytes);
  location.bytes = static_cast<std::int64_t>(bytes.size());
  const auto code = [&](const std::string& path, const std::vector<std::string>& folders) {
    const auto copied = copy_registered_file(copies_, location, path, folders);
    return copied ? std::string("ok") : std::string(code_name(copied.error().code));
  };
  std::ofstream(folder + "/deep/a") << bytes;
  EXPECT_EQ(code(folder + "/deep/a", {dir_ + "/none", folder}), "ok");
  EXPECT_EQ(code(folder + "/deep/a", {}), "permission_denied");
  EXPECT_EQ(code(folder + "/missing", {folder}), "not_found");
  EXPECT_EQ(code(folder + "/deep", {folder}), "not_found") << "a folder, but not PEFT's";
  ASSERT_EQ(::mkfifo((folder + "/pipe").c_str(), 0600), 0);
  EXPECT_EQ(code(folder + "/pipe", {folder}), "data_corrupt") << "it must not wait for a writer";
  fs::create_directory_symlink(folder + "/deep", dir_ + "/alias");
  EXPECT_EQ(code(dir_ + "/alias/a", {folder}), "ok") << "a link from outside to inside";
  EXPECT_EQ(code(folder + "/deep/a", {dir_ + "/alias"}), "ok") << "a folder that is a link";
}

// PEFT's folder is copied as one file, and only as it was when it was registered.
TEST_F(AdapterFiles, AFolderOfPeftIsCopiedAsOneFile) {
  const std::string folder = dir_ + "/in/peft",
                    header = R"({"a.lora_A.weight":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}})";
  fs::create_directories(folder);
  const auto write_config = [&](int alpha) {
    std::ofstream(folder + "/adapter_config.json") << R"({"r":1,"lora_alpha":)" << alpha << "}";
  };
  write_config(2);
  std::ofstream(folder + "/adapter_model.safetensors", std::ios::binary)
      << static_cast<char>(header.size()) << std::string(7, '\0') << header << "x";
  const auto found = loras::inspect_file(folder, 1 << 20);
  ASSERT_TRUE(found.ok()) << found.error().message;
  loras::Location location;
  location.sha256 = found->sha256;
  location.bytes = found->bytes;
  const auto copied = copy_registered_file(copies_, location, folder, {dir_ + "/in"});
  ASSERT_TRUE(copied.ok()) << copied.error().message;
  std::ifstream in((*copied)->path(), std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  EXPECT_EQ(sha256_hex(whole), found->sha256);
  EXPECT_NE(whole.find("lora_alpha"), std::string::npos);
  write_config(3);
  EXPECT_EQ(copy_registered_file(copies_, location, folder, {dir_ + "/in"}).error().code, Code::kDataCorrupt);
  EXPECT_EQ(copy_registered_file(copies_, location, folder, {}).error().code, Code::kPermissionDenied);
}

}  // namespace
}  // namespace ditfleet::worker
