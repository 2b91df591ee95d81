// shared/kernel_cache: what memory and disk keep, and what they let go.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "shared/core/bytes.h"
#include "shared/core/file_lock.h"
#include "shared/kernel_cache/cache.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/disk_tier.h"
#include "shared/kernel_cache/memory_tier.h"
#include "shared/kernel_cache/secret.h"
#include "tests/unit/shared/telemetry/process_metrics.h"

namespace ditfleet::kernel_cache {
namespace {

namespace fs = std::filesystem;

Key key_of(int number) { return KeyBuilder().add("number", number).finish(); }

std::shared_ptr<const Entry> program_of(std::size_t bytes) {
  auto entry = std::make_shared<Entry>();
  entry->arch = "cpu";
  entry->code = std::string(bytes, 'c');
  return entry;
}

TEST(KernelCacheMemory, TheLeastRecentlyUsedGoFirst) {
  MemoryTier memory(100'000);
  for (int i = 0; i < 4; ++i) memory.put(key_of(i), program_of(20'000));
  ASSERT_TRUE(memory.find(key_of(0)));  // used: now the youngest
  memory.put(key_of(4), program_of(20'000));
  EXPECT_TRUE(memory.find(key_of(0)));
  EXPECT_FALSE(memory.find(key_of(1)));
  EXPECT_TRUE(memory.find(key_of(4)));
  EXPECT_TRUE(memory.find(key_of(2)));
  EXPECT_TRUE(memory.find(key_of(3)));
}

TEST(KernelCacheMemory, AReplacedEntryTakesNoRoom) {
  MemoryTier memory(100'000);
  memory.put(key_of(0), program_of(50'000));
  for (int i = 0; i < 100; ++i) memory.put(key_of(1), program_of(40'000));
  EXPECT_TRUE(memory.find(key_of(0)));
  memory.erase(key_of(1), program_of(100));
  EXPECT_TRUE(memory.find(key_of(1))) << "another program was stored meanwhile";
  memory.erase(key_of(1), memory.find(key_of(1)));
  EXPECT_FALSE(memory.find(key_of(1)));
  memory.put(key_of(2), program_of(40'000));
  EXPECT_TRUE(memory.find(key_of(0)));
}

TEST(KernelCacheMemory, DoesNotEmptyItselfForOneThatIsTooLarge) {
  MemoryTier memory(100'000);
  memory.put(key_of(1), program_of(50'000));
  memory.put(key_of(2), program_of(200'000));
  EXPECT_TRUE(memory.find(key_of(1)));
  EXPECT_FALSE(memory.find(key_of(2)));
  MemoryTier none(0);
  none.put(key_of(1), program_of(0));
  EXPECT_FALSE(none.find(key_of(1)));
}

struct KernelCacheDisk : ::testing::Test {
  KernelCacheDisk() {
    char folder[] = "/tmp/ditfleet-kernels-XXXXXX";
    EXPECT_NE(::mkdtemp(folder), nullptr);
    dir = folder;
  }
  ~KernelCacheDisk() override { fs::remove_all(dir); }

  static void age(const std::string& path, int seconds) {
    timespec when[2] = {};
    when[0].tv_sec = when[1].tv_sec = ::time(nullptr) - seconds;
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), when, 0), 0);
  }
  static std::uint64_t total(const DiskTier& disk) {
    std::uint64_t bytes = 0;
    for (const auto& file : disk.list()) bytes += file.bytes;
    return bytes;
  }
  std::string dir;
};

TEST_F(KernelCacheDisk, ReadsWhatWasWritten) {
  DiskTier disk(dir, 1 << 20);
  ASSERT_TRUE(disk.read(key_of(1)).ok());
  EXPECT_FALSE(*disk.read(key_of(1)));
  ASSERT_TRUE(disk.write(key_of(1), "value").ok());
  EXPECT_EQ(**disk.read(key_of(1)), "value");
  EXPECT_EQ(**DiskTier(dir, 1 << 20).read(key_of(1)), "value") << "another process does not see it";
  ASSERT_TRUE(disk.write(key_of(1), "another").ok());
  EXPECT_EQ(**disk.read(key_of(1)), "another");
  ASSERT_EQ(disk.list().size(), 1u);
  EXPECT_EQ(disk.list()[0].key, key_of(1));
  EXPECT_TRUE(*disk.remove(key_of(1)));
  EXPECT_FALSE(*disk.read(key_of(1)));
  EXPECT_FALSE(*disk.remove(key_of(1))) << "there was nothing left to remove";
}

// A folder in the value's place stands for a folder that is read-only: that it stays must not be reported as success.
TEST_F(KernelCacheDisk, WhatCannotBeRemovedIsAnError) {
  DiskTier disk(dir, 1 << 20);
  fs::create_directories(disk.path_of(key_of(1)));
  const auto removed = disk.remove(key_of(1));
  ASSERT_FALSE(removed.ok());
  EXPECT_EQ(removed.error().code, Code::kUnavailable);
  EXPECT_NE(removed.error().message.find(disk.path_of(key_of(1))), std::string::npos);
}

TEST_F(KernelCacheDisk, StaysBelowItsBoundAndKeepsWhatIsUsed) {
  DiskTier disk(dir, 100'000);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(disk.write(key_of(i), std::string(9'000, 'v')).ok());
    age(disk.path_of(key_of(i)), 100 - i);
  }
  disk.used(key_of(0));  // the oldest
  for (int i = 10; i < 14; ++i) ASSERT_TRUE(disk.write(key_of(i), std::string(9'000, 'v')).ok());
  EXPECT_LE(total(disk), 100'000u);
  EXPECT_TRUE(*disk.read(key_of(0)));
  EXPECT_FALSE(*disk.read(key_of(1)));
  EXPECT_TRUE(*disk.read(key_of(13)));
}

TEST_F(KernelCacheDisk, AlsoWhenOthersWrite) {
  DiskTier one(dir, 100'000), other(dir, 100'000);
  for (int i = 0; i < 30; ++i) {
    ASSERT_TRUE(one.write(key_of(i), std::string(10'000, 'v')).ok());
    ASSERT_TRUE(other.write(key_of(1000 + i), std::string(10'000, 'v')).ok());
    EXPECT_LE(total(one), 210'000u) << i;
  }
  one.trim();
  EXPECT_LE(total(one), 100'000u);
}

// An entry of a key that says how long it is, so that a half one shows.
std::string whole_entry(int key, std::size_t size) {
  return std::to_string(key) + ' ' + std::to_string(size) + ' ' + std::string(size, static_cast<char>('a' + key % 26));
}

// What one of several processes does to a folder that all of them fill and trim. Returns what is wrong, or nothing.
std::string fill_and_read(const std::string& dir, std::uint64_t bound, unsigned seed) {
  constexpr int kKeys = 40, kRounds = 400;
  DiskTier disk(dir, bound);
  std::minstd_rand random(seed);
  int found = 0;
  for (int round = 0; round < kRounds; ++round) {
    const int key = static_cast<int>(random() % kKeys);
    if (random() % 4 == 0) {
      const auto written = disk.write(key_of(key), whole_entry(key, 2'000 + random() % 10'000));
      if (!written) return written.error().message;
      if (random() % 4 == 0) disk.trim();
      continue;
    }
    const auto read = disk.read(key_of(key));
    if (!read) return read.error().message;
    if (!*read) continue;
    ++found;
    const std::string& entry = **read;
    const auto size = entry.find(' ');
    if (size == std::string::npos || entry != whole_entry(key, std::strtoul(entry.c_str() + size, nullptr, 10)))
      return "entry " + std::to_string(key) + " has " + std::to_string(entry.size()) + " bytes that nobody wrote";
    disk.used(key_of(key));
  }
  disk.trim();
  return found > kRounds / 10 ? "" : "only " + std::to_string(found) + " entries were found";
}

TEST_F(KernelCacheDisk, ReadersFindWholeEntriesWhileFourProcessesTrim) {
  constexpr std::uint64_t kBound = 100'000;
  std::vector<pid_t> children;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string wrong = fill_and_read(dir, kBound, seed);
      if (!wrong.empty()) std::fprintf(stderr, "process %u: %s\n", seed, wrong.c_str());
      ::_exit(wrong.empty() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  const DiskTier disk(dir, kBound);
  EXPECT_LE(total(disk), kBound);
  EXPECT_GT(total(disk), 0u);
  std::size_t files = 0;
  for (const auto& file : fs::recursive_directory_iterator(dir)) files += file.is_regular_file();
  EXPECT_EQ(files, disk.list().size()) << "temporary files are left";
}

TEST_F(KernelCacheDisk, RefusesOneThatIsAboveTheBoundAlone) {
  DiskTier disk(dir, 1000);
  ASSERT_TRUE(disk.write(key_of(1), "small").ok());
  const auto written = disk.write(key_of(2), std::string(1001, 'v'));
  ASSERT_FALSE(written.ok());
  EXPECT_EQ(written.error().code, Code::kPayloadTooLarge);
  EXPECT_TRUE(*disk.read(key_of(1)));
}

TEST_F(KernelCacheDisk, QuarantineKeepsABoundedNumberOfCopies) {
  DiskTier disk(dir, 100 << 20);
  EXPECT_TRUE(disk.quarantine(key_of(1), "disk", "corrupt", "bad"));
  ASSERT_THAT(disk.quarantined(), ::testing::ElementsAre(key_of(1).hex() + ".disk.corrupt"));
  EXPECT_EQ(*read_file(dir + "/quarantine/" + disk.quarantined()[0]), "bad");

  for (int i = 0; i < 200; ++i) disk.quarantine(key_of(i), "redis", "unsigned", "bad");
  EXPECT_EQ(disk.quarantined().size(), DiskTier::kQuarantineFiles);
  Result<void> emptied;
  EXPECT_EQ(disk.empty_quarantine(emptied), DiskTier::kQuarantineFiles);
  EXPECT_TRUE(emptied.ok());
  EXPECT_TRUE(disk.quarantined().empty());
}

TEST_F(KernelCacheDisk, LivesWithWhateverLiesThere) {
  DiskTier disk(dir, 1 << 20);
  ASSERT_TRUE(disk.write(key_of(1), "v").ok());
  const std::string path = disk.path_of(key_of(1));
  const auto put = [&](const std::function<void()>& make) {
    fs::remove_all(path);
    make();
  };
  put([&] { fs::create_directory(path); });
  EXPECT_EQ(**disk.read(key_of(1)), "");
  EXPECT_TRUE(disk.write(key_of(1), "v").ok());
  EXPECT_EQ(**disk.read(key_of(1)), "v");
  put([&] { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); });
  EXPECT_EQ(**disk.read(key_of(1)), "") << "must not wait for a writer";
  EXPECT_TRUE(disk.write(key_of(1), "v").ok());
  EXPECT_EQ(**disk.read(key_of(1)), "v");
  put([&] {
    std::ofstream huge(path);
    huge.close();
    fs::resize_file(path, kMaxValueBytes + 1);  // sparse
  });
  EXPECT_EQ(**disk.read(key_of(1)), "");
  put([&] { fs::create_symlink("/nonexistent", path); });
  EXPECT_FALSE(*disk.read(key_of(1)));
  std::ofstream(dir + "/1/README") << "a file that is no value";
  EXPECT_TRUE(disk.write(key_of(2), "v").ok());
  EXPECT_EQ(disk.list().size(), 1u);
}

TEST_F(KernelCacheDisk, WhatCrashedWritersLeftGoes) {
  DiskTier disk(dir, 1 << 20);
  ASSERT_TRUE(disk.write(key_of(1), "v").ok());
  const std::string left = disk.path_of(key_of(1)) + ".tmp-0123", fresh = disk.path_of(key_of(1)) + ".tmp-4567";
  std::ofstream(left) << "half";
  std::ofstream(fresh) << "half";
  age(left, 7200);
  disk.trim();
  EXPECT_FALSE(fs::exists(left));
  EXPECT_TRUE(fs::exists(fresh)) << "someone may still write it";
}

TEST_F(KernelCacheDisk, AFolderThatCannotBeIsAnErrorNotACrash) {
  std::ofstream(dir + "/file") << "x";
  DiskTier disk(dir + "/file", 1 << 20);  // below a file there is no folder, not even for root
  EXPECT_FALSE(disk.write(key_of(1), "v").ok());
  ASSERT_TRUE(disk.read(key_of(1)).ok());
  EXPECT_FALSE(*disk.read(key_of(1)));
  EXPECT_EQ(disk.try_lock(key_of(1)).error().code, Code::kUnavailable);
  EXPECT_FALSE(disk.quarantine(key_of(1), "disk", "corrupt", "bad"));
  Result<void> unread;
  EXPECT_TRUE(disk.list(&unread).empty());
  ASSERT_FALSE(unread) << "this is no empty folder";
  EXPECT_EQ(unread.error().message, "cannot read the folder '" + dir + "/file/1': Not a directory");
  EXPECT_TRUE(DiskTier(dir + "/nowhere", 1 << 20).list(&(unread = {})).empty());
  EXPECT_TRUE(unread) << "this is one that nobody has made yet";
}

TEST_F(KernelCacheDisk, EachKeyHasALock) {
  DiskTier disk(dir, 1 << 20);
  {
    const auto first = disk.try_lock(key_of(1));
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(disk.try_lock(key_of(1)).error().code, Code::kConflict);
    EXPECT_TRUE(disk.try_lock(key_of(2)).ok());
  }
  EXPECT_TRUE(disk.try_lock(key_of(1)).ok());
  EXPECT_TRUE(fs::is_empty(dir + "/locks"));
}

TEST_F(KernelCacheDisk, ALockHasOneHolderAmongMany) {
  DiskTier disk(dir, 1 << 20);
  std::atomic<int> inside{0}, taken{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        const auto lock = disk.try_lock(key_of(1));
        if (!lock) continue;
        ++taken;
        EXPECT_EQ(++inside, 1);
        std::this_thread::yield();
        --inside;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(taken, 0);
}

TEST_F(KernelCacheDisk, ALockEndsWithItsProcess) {
  DiskTier disk(dir, 1 << 20);
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto lock = disk.try_lock(key_of(1));
    const char taken = lock ? 'y' : 'n';
    (void)!::write(pipe[1], &taken, 1);
    ::pause();
    ::_exit(0);
  }
  char taken = 0;
  ASSERT_EQ(::read(pipe[0], &taken, 1), 1);
  EXPECT_EQ(taken, 'y');
  EXPECT_EQ(disk.try_lock(key_of(1)).error().code, Code::kConflict);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(disk.try_lock(key_of(1)).ok());
  ::close(pipe[0]);
  ::close(pipe[1]);
}

// A file size limit stands for a full disk: the write fails half way.
TEST_F(KernelCacheDisk, AWriteThatFailsHalfWayLeavesNothing) {
  DiskTier disk(dir, 1 << 20);
  ASSERT_TRUE(disk.write(key_of(1), "before").ok());
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const bool failed = !disk.write(key_of(1), std::string(10'000, 'v')).ok();
    ::_exit(failed ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(**disk.read(key_of(1)), "before");
  EXPECT_EQ(std::distance(fs::directory_iterator(fs::path(disk.path_of(key_of(1))).parent_path()), {}), 1);
}

// What is absent cannot be told from what is not scraped.
TEST_F(KernelCacheDisk, ACacheShowsItsCountersFromTheStart) {
  using ditfleet::testing::series;
  CacheOptions options;
  options.dir = dir;
  options.secret = *Secret::from_text("the secret of this cluster");
  const auto cache = KernelCache::create(options);
  for (const char* tier : {"memory", "disk"})
    EXPECT_EQ(series("ditfleet_kernel_cache_lookups_total", {tier, "\"hit\""}), 0) << tier;
  EXPECT_EQ(series("ditfleet_kernel_cache_compiles_total", {"ok"}), 0);
  EXPECT_EQ(series("ditfleet_kernel_cache_stores_total", {"disk", "error"}), 0);
  EXPECT_FALSE(series("ditfleet_kernel_cache_lookups_total", {"redis"})) << "there is no such tier here";
}

}  // namespace
}  // namespace ditfleet::kernel_cache
