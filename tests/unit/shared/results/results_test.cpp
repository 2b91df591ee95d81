// Manifests and the file backend. (The Redis backend: tests/system/results_redis_test.cpp.)
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/use_future.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/results/file_store.h"
#include "shared/results/store.h"

namespace {

std::atomic<bool> folders_can_sync = true;

}  // namespace

// What the store calls in this program.
extern "C" int fsync(int fd) {
  struct stat status {};
  if (folders_can_sync || ::fstat(fd, &status) != 0 || !S_ISDIR(status.st_mode))
    return static_cast<int>(::syscall(SYS_fsync, fd));
  errno = EINVAL;
  return -1;
}

namespace ditfleet::results {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

Deadline soon() { return Deadline::after(10s); }

ResultKey result_key(const std::string& job = "01JOB", int unit = 0) { return {job, unit, new_nonce()}; }

TEST(Manifest, ReadsBackWhatItWrote) {
  const Manifest written{"redis", "df:{0}:blob:j:0:n", "image/png", 12, std::string(64, 'a'), 640,
                         480,     INT64_MAX,           "n",         3};
  const auto read = Manifest::parse(written.to_json());
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(read->to_json(), written.to_json());
  EXPECT_EQ(read->seed, INT64_MAX);
  EXPECT_EQ(read->height, 480);
  EXPECT_EQ(read->skipped_steps, 3);
}

TEST(Manifest, RefusesWhatIsNotOne) {
  const std::string good = Manifest{"redis", "k", "image/png", 12, std::string(64, 'a'), 640, 480, 1, "n"}.to_json();
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const auto at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  for (const std::string& bad :
       {std::string(), std::string("["), std::string("[]"), with("\"key\"", "\"kex\""), with(":12", ":-1"),
        with(":12", ":\"12\""), with(":12", ":99999999999999"), with(":640", ":1e9"), with("aaaa", "AAAA"),
        with("aaaa", "aa"), with(":480", ":48000000")}) {
    const auto parsed = Manifest::parse(bad);
    ASSERT_FALSE(parsed.ok()) << bad;
    EXPECT_EQ(parsed.error().code, Code::kDataCorrupt);
    EXPECT_NE(parsed.error().message.find("manifest"), std::string::npos);
  }
}

TEST(OpenStore, SaysWhatIsWrongWithItsOptions) {
  EXPECT_EQ(open_store({.backend = "nfs"}, nullptr).error().param, "results.backend");
  EXPECT_EQ(open_store({.backend = "s3"}, nullptr).error().param, "results.s3.bucket");
  EXPECT_EQ(open_store({.backend = "s3", .bucket = "photos", .prefix = "a b"}, nullptr).error().param,
            "results.s3.prefix");
  EXPECT_FALSE(open_store({.backend = "s3", .bucket = "photos"}, nullptr).ok());
  EXPECT_EQ(open_store({.backend = "file"}, nullptr).error().param, "results.dir");
  EXPECT_FALSE(open_store({.backend = "redis"}, nullptr).ok());
  EXPECT_EQ(open_store({.backend = "file", .dir = "/proc/none"}, nullptr).error().code, Code::kUnavailable);
}

class FileStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::temp_directory_path() / ("ditfleet-results-" + new_nonce());
    store_ = open({.backend = "file", .dir = dir_});
  }
  void TearDown() override {
    store_.reset();
    fs::remove_all(dir_);
  }

  std::shared_ptr<Store> open(const StoreOptions& options) {
    auto opened = open_store(options, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.error().message;
    return *opened;
  }

  template <class T>
  Result<T> run(asio::awaitable<Result<T>> task) {
    asio::io_context io;
    std::optional<Result<T>> result;
    const auto keep = [&]() -> asio::awaitable<void> { result = co_await std::move(task); };
    auto done = asio::co_spawn(io, keep, asio::use_future);
    io.run();
    done.get();
    return std::move(*result);
  }

  Manifest stored(const ResultKey& a, const std::string& bytes) {
    auto manifest = run(store_->put(a, bytes, "image/png", soon()));
    EXPECT_TRUE(manifest.ok()) << manifest.error().message;
    return *manifest;
  }

  std::size_t files() const {
    std::size_t count = 0;
    for (const auto& entry : fs::recursive_directory_iterator(dir_)) count += entry.is_regular_file();
    return count;
  }

  fs::path dir_;
  std::shared_ptr<Store> store_;
};

TEST_F(FileStoreTest, GivesBackWhatWasPut) {
  const std::string bytes = std::string("\x89PNG\0", 5) + std::string(3'000'000, 'x');
  const auto a = result_key();
  const Manifest manifest = stored(a, bytes);
  EXPECT_EQ(manifest.backend, "file");
  EXPECT_EQ(manifest.nonce, a.nonce);
  EXPECT_EQ(manifest.sha256, sha256_hex(bytes));
  EXPECT_EQ(manifest.bytes, 3'000'005);
  const auto read = run(store_->get(manifest, soon()));
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(*read, bytes);
  EXPECT_EQ(*run(store_->get_piece(manifest, 2'999'000, 100'000, soon())), std::string(1005, 'x'));
  EXPECT_EQ(*run(store_->get_piece(manifest, 1, 3, soon())), "PNG");
  Manifest longer = manifest;
  ++longer.bytes;
  EXPECT_EQ(run(store_->get_piece(longer, 2'999'000, 100'000, soon())).error().code, Code::kDataCorrupt);
  longer.key = "results/../x";
  EXPECT_EQ(run(store_->get_piece(longer, 0, 1, soon())).error().code, Code::kDataCorrupt);
  EXPECT_EQ(files(), 1u) << "a temporary file was left behind";
}

TEST_F(FileStoreTest, KeepsAttemptsApartAndRemovesOnlyTheOneNamed) {
  const Manifest first = stored(result_key(), "one"), second = stored(result_key(), "two");
  EXPECT_NE(first.key, second.key);
  ASSERT_TRUE(run(store_->remove(first, soon())).ok());
  ASSERT_TRUE(run(store_->remove(first, soon())).ok()) << "removing what is absent is not an error";
  EXPECT_EQ(run(store_->get(first, soon())).error().code, Code::kNotFound);
  EXPECT_EQ(*run(store_->get(second, soon())), "two");
}

TEST_F(FileStoreTest, TellsDamageFromLoss) {
  const Manifest manifest = stored(result_key(), "a picture");
  for (const std::string& damaged : {std::string("a Picture"), std::string("a pictur"), std::string("a picture!")}) {
    std::ofstream(dir_ / manifest.key, std::ios::trunc) << damaged;
    EXPECT_EQ(run(store_->get(manifest, soon())).error().code, Code::kDataCorrupt) << damaged;
  }
  // Whatever stands there, the thread of the disk goes on.
  fs::remove(dir_ / manifest.key);
  ASSERT_EQ(::mkfifo((dir_ / manifest.key).c_str(), 0600), 0);
  EXPECT_EQ(run(store_->get(manifest, soon())).error().code, Code::kDataCorrupt);
}

TEST_F(FileStoreTest, NeverLeavesItsFolder) {
  const std::string secret = "secret";
  std::ofstream(dir_.string() + "-outside") << secret;
  fs::create_directories(dir_ / "results" / "ab");
  fs::create_symlink(dir_.string() + "-outside", dir_ / "results" / "ab" / "link");
  Manifest manifest = stored(result_key(), secret);
  for (const std::string& key :
       {"results/../../" + dir_.filename().string() + "-outside", dir_.string() + "-outside",
        std::string("results/ab/.."), std::string("results/ab/link"), std::string("results"), std::string(),
        std::string("previews/ab/x"), "results/ab/../../../" + dir_.filename().string() + "-outside"}) {
    manifest.key = key;
    EXPECT_FALSE(run(store_->get(manifest, soon())).ok()) << key;
    EXPECT_FALSE(run(store_->get_preview(key, soon())).ok()) << key;
    if (key != "results/ab/link") {
      EXPECT_FALSE(run(store_->remove(manifest, soon())).ok()) << key;
    }
  }
  EXPECT_TRUE(fs::exists(dir_.string() + "-outside"));
  fs::remove(dir_.string() + "-outside");
  // Ids that a client may choose and that mean something to a file system.
  for (const std::string job : {"..", ".", "a..b"}) {
    const Manifest kept = stored(result_key(job), "bytes of " + job);
    EXPECT_TRUE(kept.key.starts_with("results/"));
    EXPECT_EQ(*run(store_->get(kept, soon())), "bytes of " + job);
  }
  EXPECT_EQ(run(store_->put(result_key("a/b"), "x", "image/png", soon())).error().code, Code::kInvalidArgument);
}

TEST_F(FileStoreTest, KeepsPreviews) {
  const auto a = result_key();
  const auto key = run(store_->put_preview(a, 1, "small", soon()));
  ASSERT_TRUE(key.ok());
  EXPECT_EQ(*run(store_->get_preview(*key, soon())), "small");
  EXPECT_EQ(run(store_->get_preview("previews/00/none", soon())).error().code, Code::kNotFound);
}

TEST_F(FileStoreTest, KeepsInputsByTheirDigest) {
  const std::string bytes(2'000'000, 'x'), sha256 = sha256_hex(bytes);
  EXPECT_EQ(run(store_->touch_input(sha256, soon())).error().code, Code::kNotFound);
  EXPECT_EQ(run(store_->get_input(sha256, soon())).error().code, Code::kNotFound);
  EXPECT_EQ(run(store_->get_input("../" + sha256, soon())).error().code, Code::kNotFound);
  ASSERT_TRUE(run(store_->put_input(sha256, bytes, soon())).ok());
  EXPECT_EQ(*run(store_->get_input(sha256, soon())), bytes);
  const fs::path path = dir_ / "inputs" / sha256.substr(0, 2) / sha256;
  fs::last_write_time(path, fs::file_time_type::clock::now() - 2h);
  ASSERT_TRUE(run(store_->touch_input(sha256, soon())).ok());
  EXPECT_GT(fs::last_write_time(path), fs::file_time_type::clock::now() - 1h);
  std::ofstream(path) << "other";
  EXPECT_EQ(run(store_->get_input(sha256, soon())).error().code, Code::kDataCorrupt);
}

TEST_F(FileStoreTest, RemovesInputs) {
  const std::string bytes = "an image", sha256 = sha256_hex(bytes);
  ASSERT_TRUE(run(store_->put_input(sha256, bytes, soon())).ok());
  ASSERT_TRUE(run(store_->remove_input(sha256, soon())).ok());
  EXPECT_EQ(run(store_->get_input(sha256, soon())).error().code, Code::kNotFound);
  EXPECT_TRUE(run(store_->remove_input(sha256, soon())).ok()) << "absent is not an error";
}

TEST_F(FileStoreTest, SweepsWhatIsOlderThanItsAgeAndNothingElse) {
  const Manifest old = stored(result_key(), "old"), fresh = stored(result_key(), "fresh");
  fs::last_write_time(dir_ / old.key, fs::file_time_type::clock::now() - 2h);
  EXPECT_EQ(*sweep(dir_ / "results", 1h), 1);
  EXPECT_EQ(run(store_->get(old, soon())).error().code, Code::kNotFound);
  EXPECT_EQ(*run(store_->get(fresh, soon())), "fresh");
  EXPECT_FALSE(sweep(dir_ / "nowhere", 1h).ok());
}

TEST_F(FileStoreTest, AHostWithAWrongClockSweepsNothing) {
  const Manifest fresh = stored(result_key(), "fresh");
  for (const auto wrong : {2h, -2h}) {
    const auto swept = sweep(dir_ / "results", 1h, fs::file_time_type::clock::now() + wrong);
    EXPECT_EQ(*run(store_->get(fresh, soon())), "fresh");
    ASSERT_FALSE(swept.ok());
    EXPECT_NE(swept.error().message.find("clock differs"), std::string::npos) << swept.error().message;
  }
}

TEST_F(FileStoreTest, AStoreOpenedOverAnOldFolderSweepsByItself) {
  const Manifest old = stored(result_key(), "old"), recent = stored(result_key(), "recent");
  fs::last_write_time(dir_ / old.key, fs::file_time_type::clock::now() - 24h);
  fs::last_write_time(dir_ / recent.key, fs::file_time_type::clock::now() - 5min);
  auto other = open({.backend = "file", .dir = dir_, .retention_ms = 1000});
  // Its sweep was queued before this read, on the same thread.
  EXPECT_EQ(run(other->get(old, soon())).error().code, Code::kNotFound);
  EXPECT_TRUE(run(other->get(recent, soon())).ok()) << "its job may have ended later, and is still there";
}

// A power failure could remove the file, although its manifest names it.
TEST_F(FileStoreTest, AResultWhoseFolderCannotBeSyncedIsNotStored) {
  folders_can_sync = false;
  const auto put = run(store_->put(result_key(), "x", "image/png", soon()));
  folders_can_sync = true;
  ASSERT_FALSE(put.ok());
  EXPECT_EQ(put.error().code, Code::kUnavailable);
  EXPECT_NE(put.error().message.find("cannot sync the folder"), std::string::npos) << put.error().message;
}

TEST_F(FileStoreTest, AFailedWriteIsToldAndLeavesNothing) {
  if (::geteuid() == 0) {
    // Root writes anywhere: stand a file where the folder should be.
    fs::remove_all(dir_ / "results");
    std::ofstream(dir_ / "results") << "in the way";
  } else {
    fs::permissions(dir_ / "results", fs::perms::owner_read | fs::perms::owner_exec);
  }
  const auto put = run(store_->put(result_key(), "x", "image/png", soon()));
  ASSERT_FALSE(put.ok());
  EXPECT_EQ(put.error().code, Code::kUnavailable);
  if (::geteuid() != 0) fs::permissions(dir_ / "results", fs::perms::owner_all);
}

}  // namespace
}  // namespace ditfleet::results
