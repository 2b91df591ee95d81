// A program that verifies and that whoever asks cannot use all the same, since it does not load: what is compiled
// instead takes its place.
#include <gmock/gmock.h>

#include <atomic>

#include "shared/core/bytes.h"
#include "tests/system/kernel_cache_fixture.h"

namespace ditfleet::kernel_cache::testing {
namespace {

using ditfleet::testing::RedisServer;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

Entry bad_program() {
  Entry entry = program_of(1);
  entry.code = "does not load";
  return entry;
}
const std::string kBad = *encode(bad_program(), key_of(1), *secret_of(kSecretText));

Result<void> loads(const Entry& entry) {
  return entry.code == bad_program().code ? Result<void>(Error{Code::kDataCorrupt, "it does not load", {}})
                                          : Result<void>();
}

std::string disk_path(const std::string& dir) {
  const std::string hex = key_of(1).hex();
  return dir + "/1/" + hex.substr(0, 2) + "/" + hex;
}

double set_aside(const std::string& tier) {
  return counter("ditfleet_kernel_cache_quarantined_total", "tier=\"" + tier + "\",reason=\"unusable\"");
}

struct KernelCacheUnusable : ::testing::Test {
  void put_bad(const std::string& dir) const {
    if (!dir.empty()) {
      fs::create_directories(fs::path(disk_path(dir)).parent_path());
      ASSERT_TRUE(write_file_atomically(disk_path(dir), kBad).ok());
    }
    RedisView view(redis.endpoint());
    ASSERT_EQ(view({"SET", redis_name(1), kBad}), "OK");
  }
  std::string quarantine(const std::string& dir, const std::string& tier) const {
    return dir + "/quarantine/" + key_of(1).hex() + "." + tier + ".unusable";
  }

  const RedisServer redis{{.appendfsync = "no"}};
  Folder folder, notes;
  const Compiler compiler{notes.path() + "/compiled"};
};

TEST_F(KernelCacheUnusable, IsReplacedInEveryTier) {
  const std::string first = folder.path() + "/first", second = folder.path() + "/second",
                    third = folder.path() + "/third";
  put_bad(first);
  put_bad(second);
  const double disk = set_aside("disk"), in_redis = set_aside("redis"),
               looked = lookups("disk", "unusable") + lookups("redis", "unusable");
  {
    const auto node = KernelCache::create(options_of(first, &redis));
    for (const bool again : {false, true}) {
      const auto program = compiler.get(*node, 1, 2000, loads);
      ASSERT_TRUE(program.ok()) << program.error().message;
      EXPECT_EQ(**program, program_of(1));
      EXPECT_EQ(node->counts().compiles, 1u);
      EXPECT_EQ(node->counts().memory_hits, again ? 1u : 0u);
    }
    EXPECT_EQ(node->counts().refused, 2u) << "once in each tier";
  }
  EXPECT_EQ(lookups("disk", "unusable") + lookups("redis", "unusable"), looked + 2);
  EXPECT_EQ(set_aside("disk"), disk + 1);
  EXPECT_EQ(set_aside("redis"), in_redis + 1);
  for (const char* tier : {"disk", "redis"}) EXPECT_EQ(*read_file(quarantine(first, tier)), kBad);
  // Another process of this host; a node that has the bad one on its own disk; one that has none.
  for (const auto& dir : {first, second, third}) {
    const auto node = KernelCache::create(options_of(dir, &redis));
    const auto program = compiler.get(*node, 1, 2000, loads);
    ASSERT_TRUE(program.ok()) << dir;
    EXPECT_EQ(**program, program_of(1));
    EXPECT_EQ(node->counts().compiles, 0u) << dir;
    EXPECT_EQ(node->counts().disk_hits, dir == first ? 1u : 0u);
    EXPECT_EQ(node->counts().refused, dir == second ? 1u : 0u);
  }
  EXPECT_EQ(*read_file(quarantine(second, "disk")), kBad);
  EXPECT_EQ(decode(*read_file(disk_path(second)), key_of(1), "sm_90a", *secret_of(kSecretText))->code,
            program_of(1).code);
  EXPECT_EQ(compiler.total(), 1);
}

// What is in a memory tier may be of someone who did not ask whether it loads.
TEST_F(KernelCacheUnusable, IsReplacedInMemoryByOneThread) {
  const auto cache = KernelCache::create({});
  ASSERT_TRUE(cache->get_or_compile(key_of(1), "r", "sm_90a", [] { return Result<Entry>(bad_program()); }).ok());
  const Compiler slow(notes.path() + "/compiled", milliseconds(50));
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      const auto program = slow.get(*cache, 1, 2000, loads);
      right += program && **program == program_of(1) ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 8);
  EXPECT_EQ(slow.total(), 1);
}

// Where nothing can be used the fault may be this process's: what the others share stays as it is.
TEST_F(KernelCacheUnusable, WhatNothingCanReplaceStays) {
  put_bad(folder.path());
  const double disk = set_aside("disk"), in_redis = set_aside("redis");
  const auto nothing_loads = [](const Entry&) {
    return Result<void>(Error{Code::kDataCorrupt, "nothing loads here", {}});
  };
  {
    const auto node = KernelCache::create(options_of(folder.path(), &redis));
    const auto program = compiler.get(*node, 1, 2000, nothing_loads);
    ASSERT_FALSE(program.ok());
    EXPECT_EQ(program.error().code, Code::kDataCorrupt);
    EXPECT_THAT(program.error().message, HasSubstr("nothing loads here"));
    EXPECT_EQ(compiler.get(*node, 1).value()->code, bad_program().code) << "the tiers have lost it";
  }
  RedisView view(redis.endpoint());
  EXPECT_EQ(*read_file(disk_path(folder.path())), kBad);
  EXPECT_EQ(view({"GET", redis_name(1)}), kBad);
  EXPECT_EQ(set_aside("disk"), disk);
  EXPECT_EQ(set_aside("redis"), in_redis);
  EXPECT_TRUE(fs::is_empty(folder.path() + "/locks")) << "nor is a lock left";
}

// All processes meet it at once, on disks of their own and in Redis, or in one folder.
TEST_F(KernelCacheUnusable, EightProcessesReplaceItOnce) {
  constexpr int kProcesses = 8;
  for (const bool one_folder : {false, true}) {
    const Compiler shared(notes.path() + (one_folder ? "/one" : "/many"), milliseconds(200));
    const auto dir = [&](int p) { return folder.path() + (one_folder ? "/all" : "/" + std::to_string(p)); };
    for (int p = 0; p < kProcesses; ++p) put_bad(dir(p));
    std::vector<std::unique_ptr<Process>> processes;
    for (int p = 0; p < kProcesses; ++p) {
      processes.push_back(std::make_unique<Process>([&, p] {
        const auto cache = KernelCache::create(options_of(dir(p), one_folder ? nullptr : &redis));
        const auto program = shared.get(*cache, 1, 2000, loads);
        return std::string(program && **program == program_of(1) ? "right" : "wrong");
      }));
    }
    for (auto& process : processes) EXPECT_EQ(process->wait(), "right");
    EXPECT_EQ(shared.total(), 1) << (one_folder ? "one folder" : "one Redis");
  }
}

}  // namespace
}  // namespace ditfleet::kernel_cache::testing
