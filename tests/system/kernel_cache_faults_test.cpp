// The kernel cache when something is wrong: whatever lies in a tier and whatever happens to it, the program comes,
// the event is counted, and nothing is used that this cluster has not signed. Long because it is the table of faults,
// tier by tier, on one fixture.
#include <gmock/gmock.h>
#include <sodium.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>

#include "shared/core/bytes.h"
#include "tests/system/kernel_cache_fixture.h"

namespace ditfleet::kernel_cache::testing {
namespace {

using ditfleet::testing::RedisServer;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

std::string value_of(int number, const std::string& secret = kSecretText, const Entry* entry = nullptr) {
  const Entry program = program_of(number);
  return *encode(entry ? *entry : program, key_of(number), *secret_of(secret));
}

std::string with_checksum(std::string bytes) {
  unsigned char digest[32];
  crypto_hash_sha256(digest, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size() - 64);
  return bytes.replace(bytes.size() - 64, 32, reinterpret_cast<const char*>(digest), 32);
}

// What may lie where the value of program 1 belongs, and the name it is counted under.
struct Damage {
  const char* name;
  const char* result;
  std::function<std::string()> bytes;
};

Entry with_evil_code(const char* arch) {
  Entry entry = program_of(1);
  entry.arch = arch;
  entry.code = "evil";
  return entry;
}

const Damage kDamages[] = {
    {"OneBitChanged", "corrupt",
     [] {
       auto b = value_of(1);
       b[b.size() / 2] = static_cast<char>(b[b.size() / 2] ^ 1);
       return b;
     }},
    {"Truncated", "corrupt", [] { return value_of(1).substr(0, 1000); }},
    {"OneByte", "corrupt", [] { return std::string("x"); }},
    {"Junk", "corrupt", [] { return std::string(5000, '\xa5'); }},
    {"OldVersion", "corrupt",
     [] {
       auto b = value_of(1);
       b[8] = 0;
       return b;
     }},
    {"Unsigned", "unsigned",
     [] {
       const Entry evil = with_evil_code("sm_90a");
       auto b = value_of(1, kSecretText, &evil);
       b.replace(24, 8, 8, '\0');
       return with_checksum(b);
     }},
    {"WronglySigned", "wrong_signature",
     [] {
       const Entry evil = with_evil_code("sm_90a");
       auto b = value_of(1, "the secret of someone else", &evil);
       b.replace(24, 8, value_of(1).substr(24, 8));  // says that it is ours
       return with_checksum(b);
     }},
    {"OfAnotherSecret", "foreign_secret",
     [] {
       const Entry evil = with_evil_code("sm_90a");
       return value_of(1, "the secret of someone else", &evil);
     }},
    {"Replayed", "wrong_key", [] { return value_of(2); }},
    {"WrongArchitecture", "wrong_arch",
     [] {
       const Entry other = with_evil_code("sm_80");
       return value_of(1, kSecretText, &other);
     }},
    {"Bomb", "corrupt", [] { return "DFKERNEL" + std::string("\1\0\0\0\0\0\0\0", 8) + std::string(200, '\xff'); }},
    {"ChunksThatAreNot", "corrupt", [] { return std::string("DFCHUNKS 0123456789abcdef 3000000"); }},
    {"ChunksWithoutEnd", "corrupt", [] { return std::string("DFCHUNKS 0123456789abcdef 18446744073709551615"); }},
};

std::string damage_name(const ::testing::TestParamInfo<Damage>& info) { return info.param.name; }

struct KernelCacheDamage : ::testing::TestWithParam<Damage> {
  void expect_served(KernelCache& cache, const std::string& tier) {
    const double before = lookups(tier, GetParam().result), set_aside = quarantined(tier);
    const auto program = compiler.get(cache, 1);
    ASSERT_TRUE(program.ok()) << program.error().message;
    EXPECT_EQ(**program, program_of(1)) << "what lay there was used";
    EXPECT_EQ(cache.counts().compiles, 1u);
    EXPECT_EQ(cache.counts().refused, 1u);
    EXPECT_EQ(lookups(tier, GetParam().result), before + 1);
    cache.flush();
    EXPECT_EQ(quarantined(tier), set_aside + 1);
  }
  static double quarantined(const std::string& tier) {
    return counter("ditfleet_kernel_cache_quarantined_total",
                   "tier=\"" + tier + "\",reason=\"" + GetParam().result + "\"");
  }
  Folder folder, nodes;
  Compiler compiler{nodes.path() + "/compiled"};
};

TEST_P(KernelCacheDamage, OnDiskItIsQuarantinedAndReplaced) {
  const auto options = options_of(folder.path(), nullptr);
  const std::string hex = key_of(1).hex(), path = folder.path() + "/1/" + hex.substr(0, 2) + "/" + hex;
  fs::create_directories(fs::path(path).parent_path());
  ASSERT_TRUE(write_file_atomically(path, GetParam().bytes()).ok());
  {
    const auto cache = KernelCache::create(options);
    expect_served(*cache, "disk");
  }
  EXPECT_EQ(*read_file(folder.path() + "/quarantine/" + hex + ".disk." + GetParam().result), GetParam().bytes());
  const auto next = KernelCache::create(options);
  ASSERT_TRUE(compiler.get(*next, 1).ok());
  EXPECT_EQ(next->counts().disk_hits, 1u) << "the good one has not taken its place";
}

TEST_P(KernelCacheDamage, InRedisItIsReplaced) {
  const RedisServer redis({.appendfsync = "no"});
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"SET", redis_name(1), GetParam().bytes()}), "OK");
  {
    const auto cache = KernelCache::create(options_of(folder.path(), &redis));
    expect_served(*cache, "redis");
  }
  // Another node finds a good one in its place.
  const auto next = KernelCache::create(options_of("", &redis));
  ASSERT_TRUE(compiler.get(*next, 1).ok());
  EXPECT_EQ(next->counts().redis_hits, 1u);
  EXPECT_EQ(next->counts().compiles, 0u);
  EXPECT_NE(view({"GET", redis_name(1)}), GetParam().bytes());
  EXPECT_TRUE(fs::exists(folder.path() + "/quarantine/" + key_of(1).hex() + ".redis." + GetParam().result));
}

INSTANTIATE_TEST_SUITE_P(Damages, KernelCacheDamage, ::testing::ValuesIn(kDamages), damage_name);

struct KernelCacheFaults : ::testing::Test {
  // Gets programs first … last − 1 and expects each right; the time it took.
  milliseconds serve(KernelCache& cache, int first, int last) {
    const auto start = steady_clock::now();
    for (int i = first; i < last; ++i) {
      const auto program = compiler.get(cache, i);
      EXPECT_TRUE(program.ok() && **program == program_of(i)) << i;
    }
    return std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
  }
  static CacheOptions quick(CacheOptions options) {
    options.redis_timeout = milliseconds(200);
    return options;
  }
  Folder folder, notes;
  Compiler compiler{notes.path() + "/compiled"};
};

TEST_F(KernelCacheFaults, AValueOfAnotherTypeInRedisIsReplaced) {
  const RedisServer redis({.appendfsync = "no"});
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"LPUSH", redis_name(1), "x"}), "1");
  const auto set_aside = [] {
    return counter("ditfleet_kernel_cache_quarantined_total", "tier=\"redis\",reason=\"corrupt\"");
  };
  const double before = lookups("redis", "corrupt"), quarantined = set_aside();
  {
    const auto cache = KernelCache::create(options_of("", &redis));
    serve(*cache, 1, 2);
  }
  EXPECT_EQ(lookups("redis", "corrupt"), before + 1);
  EXPECT_EQ(set_aside(), quarantined) << "there is no disk to put it aside on";
  const auto next = KernelCache::create(options_of("", &redis));
  serve(*next, 1, 2);
  EXPECT_EQ(next->counts().redis_hits, 1u);
}

TEST_F(KernelCacheFaults, AHugeValueInRedisIsNotFetched) {
  const RedisServer redis({.appendfsync = "no"});
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"SETRANGE", redis_name(1), "200000000", "x"}), "200000001");
  const auto cache = KernelCache::create(options_of("", &redis));
  serve(*cache, 1, 2);
  EXPECT_EQ(cache->counts().refused, 1u);
}

int commands(RedisView& view, const std::string& name) {
  const std::string all = view({"INFO", "commandstats"}), wanted = "cmdstat_" + name + ":calls=";
  const auto at = all.find(wanted);
  return at == std::string::npos ? 0 : std::stoi(all.substr(at + wanted.size()));
}

// A head of 33 bytes that claims 80 MiB: what it costs is not what it claims, neither for who looks nor for who waits.
TEST_F(KernelCacheFaults, AHeadWithoutChunksCostsAFewCommands) {
  const RedisServer redis({.appendfsync = "no"});
  RedisView view(redis.endpoint());
  for (int i = 0; i < 4; ++i) ASSERT_EQ(view({"SET", redis_name(i), "DFCHUNKS 0123456789abcdef 83886080"}), "OK");
  const auto cache = KernelCache::create(options_of("", &redis));
  serve(*cache, 0, 4);
  cache->flush();
  EXPECT_EQ(cache->counts().refused, 4u);
  EXPECT_LE(commands(view, "getrange"), 4 * 4);
  const auto next = KernelCache::create(options_of("", &redis));
  serve(*next, 0, 4);
  EXPECT_EQ(next->counts().redis_hits, 4u);
}

TEST_F(KernelCacheFaults, WhoWaitsDoesNotFetchAgainWhatItRefused) {
  const RedisServer redis({.appendfsync = "no"});
  RedisView view(redis.endpoint());
  // Chunks that are all there and make no value.
  const std::string head = "DFCHUNKS 0123456789abcdef 3145728";
  ASSERT_EQ(view({"SET", redis_name(1), head}), "OK");
  for (int i = 0; i < 3; ++i)
    ASSERT_EQ(view({"SET", redis_name(1) + ":chunk:0123456789abcdef:" + std::to_string(i), std::string(1 << 20, 'x')}),
              "OK");
  // Another process has the lock for all that this one waits.
  ASSERT_EQ(view({"SET", redis_name(1) + ":" + secret_of(kSecretText)->id_text() + ":lock", "of another process"}),
            "OK");
  auto options = options_of("", &redis);
  options.wait = milliseconds(300);
  const auto cache = KernelCache::create(options);
  serve(*cache, 1, 2);
  cache->flush();
  EXPECT_EQ(cache->counts().refused, 1u);
  // One head and its three chunks at first, then one head each time it asks, with the SET of the lock; a last SET is of
  // the good value.
  const int polls = commands(view, "set") - 5 - 1;
  EXPECT_GE(polls, 1);
  EXPECT_LE(commands(view, "getrange"), 4 + polls);
}

// While a secret is changed node by node, each group compiles what the other has stored last. Nothing that another
// secret signed is used.
TEST_F(KernelCacheFaults, ValuesOfAnotherSecretAreIgnoredAndReplaced) {
  const RedisServer redis({.appendfsync = "no"});
  const auto node = [&](const std::string& secret, const std::string& dir) {
    const auto cache = KernelCache::create(options_of(dir, dir.empty() ? &redis : nullptr, secret));
    serve(*cache, 0, 5);
    cache->flush();
    return cache->counts();
  };
  for (const bool disk : {false, true}) {
    const std::string dir = disk ? folder.path() : "";
    EXPECT_EQ(node("the secret of last year", dir).compiles, 5u);
    const double before = lookups(disk ? "disk" : "redis", "foreign_secret");
    const auto rolled = node("the secret of this year", dir);
    EXPECT_EQ(rolled.compiles, 5u);
    EXPECT_EQ(rolled.refused, 5u);
    EXPECT_EQ(lookups(disk ? "disk" : "redis", "foreign_secret"), before + 5);
    EXPECT_EQ(node("the secret of this year", dir).hits(), 5u) << "its own programs have not replaced the others";
    EXPECT_EQ(node("the secret of last year", dir).compiles, 5u);
  }
}

TEST_F(KernelCacheFaults, WithoutASecretNothingLeavesTheProcess) {
  const RedisServer redis({.appendfsync = "no"});
  auto options = options_of(folder.path(), &redis);
  options.secret = nullptr;
  const auto cache = KernelCache::create(options);
  serve(*cache, 0, 3);
  serve(*cache, 0, 3);
  EXPECT_EQ(cache->counts().compiles, 3u);
  EXPECT_EQ(cache->counts().memory_hits, 3u);
  cache->flush();
  EXPECT_TRUE(fs::is_empty(folder.path()));
  RedisView view(redis.endpoint());
  EXPECT_EQ(view({"DBSIZE"}), "0");
}

TEST_F(KernelCacheFaults, RedisThatNeverWasCostsOneTimeoutInAll) {
  auto options = quick(options_of(folder.path(), nullptr));
  options.redis = *redis::Endpoint::parse("unix:///nonexistent/redis.sock");
  const auto cache = KernelCache::create(options);
  EXPECT_LT(serve(*cache, 0, 25), milliseconds(1500));
  EXPECT_EQ(cache->counts().compiles, 25u);
}

TEST_F(KernelCacheFaults, RedisThatGoesAndComesBack) {
  RedisServer redis({.appendfsync = "no"});
  const auto cache = KernelCache::create(quick(options_of("", &redis)));
  serve(*cache, 0, 3);
  cache->flush();
  redis.kill();
  EXPECT_LT(serve(*cache, 3, 28), milliseconds(2500));
  redis.restart();
  // The breaker's pause is a second at first; then a probe finds Redis again.
  const auto until = steady_clock::now() + std::chrono::seconds(20);
  int number = 100;
  const double before = stores("redis", "stored");
  while (stores("redis", "stored") == before && steady_clock::now() < until) {
    serve(*cache, number, number + 1);
    cache->flush();
    ++number;
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_GT(stores("redis", "stored"), before) << "it never recovered";
}

TEST_F(KernelCacheFaults, RedisThatHangsIsLeftOutAndFoundAgain) {
  const RedisServer redis({.appendfsync = "no"});
  const auto cache = KernelCache::create(quick(options_of(folder.path(), &redis)));
  serve(*cache, 0, 3);
  cache->flush();
  ::kill(redis.pid(), SIGSTOP);
  const double left_out = lookups("redis", "left_out");
  // Three timeouts of 200 ms open the breaker; its probes cost one each after 1, 3, 7 … s.
  EXPECT_LT(serve(*cache, 3, 53), milliseconds(2500));
  EXPECT_GT(lookups("redis", "left_out"), left_out + 30);
  ::kill(redis.pid(), SIGCONT);
  const auto until = steady_clock::now() + std::chrono::seconds(30);
  const double before = stores("redis", "stored");
  for (int number = 100; stores("redis", "stored") == before && steady_clock::now() < until; ++number) {
    serve(*cache, number, number + 1);
    cache->flush();
    std::this_thread::sleep_for(milliseconds(50));
  }
  EXPECT_GT(stores("redis", "stored"), before) << "it never recovered";
}

TEST_F(KernelCacheFaults, RedisThatIsSlowIsLeftOut) {
  const RedisServer redis({.appendfsync = "no"});
  RedisTier tier({.redis = redis.endpoint(), .redis_timeout = milliseconds(2000)});
  ASSERT_TRUE(tier.fetch(key_of(1)));
  RedisView view(redis.endpoint());
  // It answers each call after 1.1 s, more than half the timeout.
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(tier.breaker_state(), Breaker::State::kClosed);
    ASSERT_EQ(view({"CLIENT", "PAUSE", "1100", "ALL"}), "OK");
    EXPECT_TRUE(tier.fetch(key_of(1))) << "an answer took longer than meant";
  }
  EXPECT_EQ(tier.breaker_state(), Breaker::State::kOpen);
  EXPECT_EQ(tier.fetch(key_of(1)).error().code, Code::kUnavailable);
}

TEST_F(KernelCacheFaults, RedisThatIsFullStillAnswers) {
  const RedisServer redis({.appendfsync = "no"});
  {
    const auto cache = KernelCache::create(options_of("", &redis));
    serve(*cache, 0, 3);
  }
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"CONFIG", "SET", "maxmemory", "1"}), "OK");
  const double full = stores("redis", "full");
  const auto cache = KernelCache::create(options_of("", &redis));
  EXPECT_LT(serve(*cache, 0, 8), milliseconds(2000));
  cache->flush();
  EXPECT_EQ(cache->counts().redis_hits, 3u);
  EXPECT_EQ(cache->counts().compiles, 5u);
  EXPECT_EQ(stores("redis", "full"), full + 5);
}

TEST_F(KernelCacheFaults, RedisThatRefusesUs) {
  const RedisServer redis({.password = "right", .appendfsync = "no"});
  auto options = quick(options_of(folder.path(), &redis));
  options.redis->password = "wrong";
  const auto cache = KernelCache::create(options);
  EXPECT_LT(serve(*cache, 0, 10), milliseconds(2000));
  EXPECT_EQ(cache->counts().compiles, 10u);
}

TEST_F(KernelCacheFaults, RedisThatRefusesSomeCommands) {
  const RedisServer redis({.appendfsync = "no"});
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"ACL", "SETUSER", "default", "-eval", "-zadd", "-pexpire"}), "OK");
  const double stored = stores("redis", "stored");
  for (const bool first : {true, false}) {
    const auto cache = KernelCache::create(options_of("", &redis));
    for (int i = 0; i < 5; ++i) {
      serve(*cache, i, i + 1);
      cache->flush();
    }
    EXPECT_EQ(cache->counts().compiles, first ? 5u : 0u);
    EXPECT_EQ(cache->counts().redis_hits, first ? 0u : 5u) << "what the first node has stored the second one finds";
  }
  EXPECT_EQ(stores("redis", "stored"), stored + 5);
}

// As nobody, for whom a folder's mode counts.
std::string as_nobody(const std::function<std::string()>& work) {
  if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return "cannot become nobody";
  return work();
}

TEST_F(KernelCacheFaults, AFolderThatIsReadOnlyIsReadAndNoMore) {
  {
    const auto cache = KernelCache::create(options_of(folder.path(), nullptr));
    serve(*cache, 0, 3);
  }
  // One of them is bad, and cannot be moved away.
  const std::string hex = key_of(2).hex(), bad = folder.path() + "/1/" + hex.substr(0, 2) + "/" + hex;
  ASSERT_TRUE(write_file_atomically(bad, "bad").ok());
  ::chmod(notes.path().c_str(), 0777);
  ::chmod((notes.path() + "/compiled").c_str(), 0666);
  std::vector<fs::path> all = {folder.path()};
  for (const auto& entry : fs::recursive_directory_iterator(folder.path())) all.push_back(entry.path());
  for (const auto& path : all) ::chmod(path.c_str(), fs::is_directory(path) ? 0555 : 0444);
  Process process([&] {
    return as_nobody([&] {
      const auto cache = KernelCache::create(options_of(folder.path(), nullptr));
      const auto took = serve(*cache, 0, 6);
      cache->flush();
      const auto counts = cache->counts();
      std::ostringstream said;
      said << "hits " << counts.disk_hits << " refused " << counts.refused << " and " << lookups("disk", "corrupt")
           << " compiles " << counts.compiles << " errors " << stores("disk", "error")
           << (took < milliseconds(2000) ? " quick" : " slow");
      return said.str();
    });
  });
  EXPECT_EQ(process.wait(), "hits 2 refused 1 and 1 compiles 4 errors 4 quick");
  for (const auto& path : all) ::chmod(path.c_str(), 0777);
}

TEST_F(KernelCacheFaults, ADiskThatIsFullByAFileSizeLimit) {
  Process process([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1024, 1024};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto cache = KernelCache::create(options_of(folder.path(), nullptr));
    serve(*cache, 0, 5);
    cache->flush();
    std::ostringstream said;
    said << "compiles " << cache->counts().compiles << " errors " << stores("disk", "error");
    return said.str();
  });
  EXPECT_EQ(process.wait(), "compiles 5 errors 5");
  EXPECT_TRUE(fs::is_empty(folder.path() + "/locks"));
}

TEST_F(KernelCacheFaults, ADiskThatIsFull) {
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "a small disk cannot be mounted here";
  {
    const auto cache = KernelCache::create(options_of(folder.path(), nullptr));
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(compiler.get(*cache, i, 20'000).ok());
    cache->flush();
    EXPECT_EQ(cache->counts().compiles, 10u);
    EXPECT_GE(stores("disk", "error"), 7);
    const auto next = KernelCache::create(options_of(folder.path(), nullptr));
    for (int i = 0; i < 10; ++i) EXPECT_TRUE(compiler.get(*next, i, 20'000).ok());
    EXPECT_EQ(next->counts().refused, 0u) << "half a file was taken for a value";
    EXPECT_GE(next->counts().disk_hits, 1u);
  }
  EXPECT_EQ(::umount(folder.path().c_str()), 0);
}

TEST_F(KernelCacheFaults, TheFolderIsRemovedUnderIt) {
  const auto cache = KernelCache::create(options_of(folder.path() + "/cache", nullptr));
  serve(*cache, 0, 2);
  cache->flush();
  fs::remove_all(folder.path() + "/cache");
  serve(*cache, 2, 4);
  cache->flush();
  const auto next = KernelCache::create(options_of(folder.path() + "/cache", nullptr));
  serve(*next, 2, 4);
  EXPECT_EQ(next->counts().disk_hits, 2u);
}

}  // namespace
}  // namespace ditfleet::kernel_cache::testing
