// The kernel cache among processes: who compiles, who waits, what the second node finds.
#include <gmock/gmock.h>

#include <atomic>

#include "tests/system/kernel_cache_fixture.h"

namespace ditfleet::kernel_cache::testing {
namespace {

using ditfleet::testing::RedisServer;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr int kPrograms = 25, kProcesses = 8;

// What the processes of one test share.
struct Sharing {
  const char* name;
  bool redis, one_folder, folders;
};
constexpr Sharing kSharings[] = {{"RedisAlone", true, false, false},
                                 {"RedisAndFoldersOfTheirOwn", true, false, true},
                                 {"OneFolderAlone", false, true, true},
                                 {"RedisAndOneFolder", true, true, true}};

struct KernelCacheFleet : ::testing::TestWithParam<Sharing> {
  KernelCacheFleet() {
    // Syncs cost the test time and prove nothing here.
    if (GetParam().redis) redis.emplace(RedisServer::Options{.appendfsync = "no"});
  }
  CacheOptions options(int process) const {
    const std::string dir =
        GetParam().one_folder ? folder.path() + "/all" : folder.path() + "/" + std::to_string(process);
    return options_of(GetParam().folders ? dir : "", redis ? &*redis : nullptr);
  }
  std::string log() const { return folder.path() + "/compiled"; }

  Folder folder;
  std::optional<RedisServer> redis;
};

// Gets all programs and returns "" if each is right; adds the longest wait in milliseconds.
std::string get_all(KernelCache& cache, const Compiler& compiler, int programs) {
  milliseconds longest{0};
  for (int i = 0; i < programs; ++i) {
    const auto start = steady_clock::now();
    const auto program = compiler.get(cache, i);
    longest = std::max(longest, std::chrono::duration_cast<milliseconds>(steady_clock::now() - start));
    if (!program) return "error: " + program.error().message;
    if (**program != program_of(i)) return "a wrong program";
  }
  return longest > std::chrono::seconds(10) ? "waited " + std::to_string(longest.count()) + " ms" : "right";
}

TEST_P(KernelCacheFleet, EightProcessesWithTheSameMissesCompileEachOnce) {
  const Compiler compiler(log(), milliseconds(60));
  std::vector<std::unique_ptr<Process>> processes;
  for (int p = 0; p < kProcesses; ++p) {
    processes.push_back(std::make_unique<Process>([&, p] {
      const auto cache = KernelCache::create(options(p));
      return get_all(*cache, compiler, kPrograms);
    }));
  }
  for (auto& process : processes) EXPECT_EQ(process->wait(), "right");
  EXPECT_EQ(compiler.compiled().size(), static_cast<std::size_t>(kPrograms));
  EXPECT_THAT(compiler.compiled(), Each(Pair(::testing::_, 1)));
}

TEST_P(KernelCacheFleet, AKilledCompilerIsReplacedByOneOther) {
  const Compiler endless(log(), std::chrono::seconds(300)), compiler(log(), milliseconds(1000));
  Process first([&] {
    const auto cache = KernelCache::create(options(100));
    return get_all(*cache, endless, 1);
  });
  while (endless.total() == 0) std::this_thread::sleep_for(milliseconds(5));
  std::vector<std::unique_ptr<Process>> others;
  for (int p = 0; p < kProcesses; ++p) {
    others.push_back(std::make_unique<Process>([&, p] {
      const auto cache = KernelCache::create(options(p));
      return get_all(*cache, compiler, 1);
    }));
  }
  std::this_thread::sleep_for(milliseconds(500));  // they wait by now; if not, the less is proved
  first.kill();
  for (auto& process : others) EXPECT_EQ(process->wait(), "right");
  EXPECT_EQ(compiler.total(), 2) << "the killed one and one other";
}

TEST_P(KernelCacheFleet, ACompilerThatHangsIsNotWaitedForForever) {
  const Compiler endless(log(), std::chrono::seconds(300)), compiler(folder.path() + "/others");
  Process first([&] {
    const auto cache = KernelCache::create(options(100));
    return get_all(*cache, endless, 1);
  });
  while (endless.total() == 0) std::this_thread::sleep_for(milliseconds(5));
  auto impatient = options(0);
  impatient.wait = milliseconds(700);
  const auto start = steady_clock::now();
  const auto cache = KernelCache::create(impatient);
  EXPECT_EQ(get_all(*cache, compiler, 1), "right");
  const auto took = steady_clock::now() - start;
  EXPECT_GE(took, milliseconds(650));
  EXPECT_LE(took, milliseconds(5000));
  EXPECT_EQ(compiler.total(), 1);
}

TEST_P(KernelCacheFleet, ASecondNodeCompilesNothing) {
  const Compiler compiler(log());
  {
    const auto first = KernelCache::create(options(1));
    ASSERT_EQ(get_all(*first, compiler, kPrograms), "right");
    EXPECT_EQ(first->counts().compiles, static_cast<std::uint64_t>(kPrograms));
    ASSERT_EQ(get_all(*first, compiler, kPrograms), "right");
    EXPECT_EQ(first->counts().memory_hits, static_cast<std::uint64_t>(kPrograms));
  }
  const auto second = KernelCache::create(options(2));
  ASSERT_EQ(get_all(*second, compiler, kPrograms), "right");
  EXPECT_EQ(second->counts().compiles, 0u);
  EXPECT_EQ(second->counts().hits(), static_cast<std::uint64_t>(kPrograms));
  EXPECT_EQ(second->counts().redis_hits, GetParam().one_folder ? 0u : static_cast<std::uint64_t>(kPrograms));
  second->flush();
  if (!GetParam().folders || !redis) return;
  // What came from Redis is on its disk now.
  redis->kill();
  const auto third = KernelCache::create(options(2));
  ASSERT_EQ(get_all(*third, compiler, kPrograms), "right");
  EXPECT_EQ(third->counts().disk_hits, static_cast<std::uint64_t>(kPrograms));
  EXPECT_EQ(compiler.total(), kPrograms);
}

INSTANTIATE_TEST_SUITE_P(Sharing, KernelCacheFleet, ::testing::ValuesIn(kSharings),
                         [](const auto& info) { return info.param.name; });

TEST(KernelCacheStampede, TwoHundredWorkersMissingAtOnceCompileOnceAndLeaveRedisInPeace) {
  const RedisServer redis({.appendfsync = "no"});
  const Folder folder;
  const Compiler compiler(folder.path() + "/compiled", milliseconds(400));
  constexpr int kWorkersEach = 25, kKeys = 4;
  std::vector<std::unique_ptr<Process>> processes;
  for (int p = 0; p < kProcesses; ++p) {
    processes.push_back(std::make_unique<Process>([&] {
      std::atomic<int> right{0};
      std::vector<std::thread> workers;
      for (int w = 0; w < kWorkersEach; ++w) {
        workers.emplace_back([&] {
          const auto cache = KernelCache::create(options_of("", &redis));
          right += get_all(*cache, compiler, kKeys) == "right" ? 1 : 0;
        });
      }
      for (auto& worker : workers) worker.join();
      return std::to_string(right);
    }));
  }
  for (auto& process : processes) EXPECT_EQ(process->wait(), std::to_string(kWorkersEach));
  EXPECT_THAT(compiler.compiled(), Each(Pair(::testing::_, 1)));
  RedisView view(redis.endpoint());
  const std::string stats = view({"INFO", "stats"});
  const auto at = stats.find("total_commands_processed:");
  ASSERT_NE(at, std::string::npos);
  const double commands = std::stod(stats.substr(at + 25));
  // A look, then two commands at 20, 60, 140, 300 … ms and every quarter of a second.
  EXPECT_LT(commands / (kProcesses * kWorkersEach * kKeys), 25) << "commands for one miss of one worker";
}

TEST(KernelCachePoisoned, ARedisFullOfJunkStillMeansOneCompileEach) {
  const RedisServer redis({.appendfsync = "no"});
  const Folder folder;
  const Compiler compiler(folder.path() + "/compiled", milliseconds(60));
  {
    RedisView view(redis.endpoint());
    for (int i = 0; i < kPrograms; ++i) ASSERT_EQ(view({"SET", redis_name(i), "junk " + std::to_string(i)}), "OK");
  }
  std::vector<std::unique_ptr<Process>> processes;
  for (int p = 0; p < kProcesses; ++p) {
    processes.push_back(std::make_unique<Process>([&, p] {
      const auto cache = KernelCache::create(options_of(folder.path() + "/" + std::to_string(p), &redis));
      return get_all(*cache, compiler, kPrograms);
    }));
  }
  for (auto& process : processes) EXPECT_EQ(process->wait(), "right");
  EXPECT_EQ(compiler.compiled().size(), static_cast<std::size_t>(kPrograms));
  EXPECT_THAT(compiler.compiled(), Each(Pair(::testing::_, 1)));
}

TEST(KernelCacheThreads, OneCompilesTheOthersShare) {
  const auto cache = KernelCache::create({});
  std::atomic<int> compiles{0};
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&] {
      const auto program = cache->get_or_compile(key_of(1), "r", "sm_90a", [&]() -> Result<Entry> {
        ++compiles;
        std::this_thread::sleep_for(milliseconds(100));
        return program_of(1);
      });
      right += program && **program == program_of(1) ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(compiles, 1);
  EXPECT_EQ(right, 16);
}

TEST(KernelCacheThreads, AnErrorIsSharedAndNotRemembered) {
  const Folder folder;
  const auto cache = KernelCache::create(options_of(folder.path(), nullptr));
  const auto fails = [] { return Result<Entry>(Error{Code::kInvalidArgument, "line 3: expected ;", {}}); };
  for (int i = 0; i < 2; ++i) {
    const auto program = cache->get_or_compile(key_of(1), "r", "sm_90a", fails);
    ASSERT_FALSE(program.ok());
    EXPECT_EQ(program.error().code, Code::kInvalidArgument);
    EXPECT_EQ(program.error().message, "line 3: expected ;");
  }
  EXPECT_EQ(cache->counts().failed_compiles, 2u);
  EXPECT_TRUE(cache->get_or_compile(key_of(1), "r", "sm_90a", [] { return Result<Entry>(program_of(1)); }).ok());
}

TEST(KernelCacheThreads, AnExceptionReachesTheCallerAndLeavesNoLock) {
  const Folder folder;
  const auto cache = KernelCache::create(options_of(folder.path(), nullptr));
  EXPECT_THROW((void)cache->get_or_compile(key_of(1), "r", "sm_90a", []() -> Result<Entry> { throw std::bad_alloc(); }),
               std::bad_alloc);
  const auto start = steady_clock::now();
  EXPECT_TRUE(cache->get_or_compile(key_of(1), "r", "sm_90a", [] { return Result<Entry>(program_of(1)); }).ok());
  EXPECT_LT(steady_clock::now() - start, milliseconds(1000));
}

TEST(KernelCacheThreads, AProgramForAnotherArchitectureIsABug) {
  const auto cache = KernelCache::create({});
  const auto program = cache->get_or_compile(key_of(1), "r", "sm_80", [] { return Result<Entry>(program_of(1)); });
  ASSERT_FALSE(program.ok());
  EXPECT_EQ(program.error().code, Code::kInternal);
  EXPECT_THAT(program.error().message, HasSubstr("sm_80"));
}

TEST(KernelCacheThreads, FindCompilesNothing) {
  const auto cache = KernelCache::create({});
  EXPECT_EQ(cache->find(key_of(1), "sm_90a").error().code, Code::kNotFound);
  ASSERT_TRUE(cache->get_or_compile(key_of(1), "r", "sm_90a", [] { return Result<Entry>(program_of(1)); }).ok());
  EXPECT_TRUE(cache->find(key_of(1), "sm_90a").ok());
}

TEST(KernelCacheLarge, AProgramOfManyMebibytesGoesThroughRedisInChunks) {
  const RedisServer redis({.appendfsync = "no"});
  constexpr std::size_t kBytes = 3'500'000;
  const Folder folder;
  const Compiler compiler(folder.path() + "/compiled");
  {
    const auto first = KernelCache::create(options_of("", &redis));
    ASSERT_TRUE(compiler.get(*first, 1, kBytes).ok());
  }
  RedisView view(redis.endpoint());
  for (const std::string& name : {redis_name(1)}) EXPECT_LT(std::stoi(view({"STRLEN", name})), 100);
  const auto second = KernelCache::create(options_of("", &redis));
  const auto program = compiler.get(*second, 1, kBytes);
  ASSERT_TRUE(program.ok());
  EXPECT_EQ(**program, program_of(1, kBytes));
  EXPECT_EQ(second->counts().redis_hits, 1u);

  // A chunk goes: the value is no value any more, and is made anew.
  const std::string keys = view({"KEYS", redis_name(1) + ":chunk:*:2"});
  ASSERT_EQ(view({"DEL", keys}), "1");
  const auto third = KernelCache::create(options_of("", &redis));
  ASSERT_TRUE(compiler.get(*third, 1, kBytes).ok());
  EXPECT_EQ(third->counts().compiles, 1u);
  EXPECT_EQ(third->counts().refused, 1u);
  third->flush();
  const auto fourth = KernelCache::create(options_of("", &redis));
  ASSERT_TRUE(compiler.get(*fourth, 1, kBytes).ok());
  EXPECT_EQ(fourth->counts().redis_hits, 1u);
}

TEST(KernelCacheRedis, ValuesExpireAndTheirUseRenewsThem) {
  const RedisServer redis({.appendfsync = "no"});
  const Folder folder;
  const Compiler compiler(folder.path() + "/compiled");
  auto options = options_of("", &redis);
  options.redis_ttl = std::chrono::hours(1);
  {
    const auto cache = KernelCache::create(options);
    ASSERT_TRUE(compiler.get(*cache, 1).ok());
  }
  RedisView view(redis.endpoint());
  EXPECT_GT(std::stol(view({"PTTL", redis_name(1)})), 3'500'000);
  EXPECT_EQ(view({"ZCARD", "df:{0}:kernels"}), "1");
  EXPECT_EQ(view({"KEYS", "*:lock"}), "") << "a lock was left";
  ASSERT_EQ(view({"PEXPIRE", redis_name(1), "100000"}), "1");
  {
    const auto cache = KernelCache::create(options);
    ASSERT_TRUE(compiler.get(*cache, 1).ok());
  }
  EXPECT_GT(std::stol(view({"PTTL", redis_name(1)})), 3'500'000);
}

}  // namespace
}  // namespace ditfleet::kernel_cache::testing
