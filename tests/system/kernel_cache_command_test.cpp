// `ditfleet cache …` on folders and a Redis that a cache has filled, and the secret that `ditfleet up` makes. Long
// because every case needs that cache, which one fixture fills.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/kernel_cache/open.h"
#include "tests/paths.h"
#include "tests/system/kernel_cache_fixture.h"
#include "tests/system/program.h"

namespace ditfleet::kernel_cache::testing {
namespace {

using ditfleet::testing::Program;
using ditfleet::testing::RedisServer;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;
using Words = std::vector<std::string>;

struct KernelCacheCommand : ::testing::Test {
  // Fills the folder with programs 0 … 4.
  void fill(const RedisServer* redis = nullptr, int programs = 5) {
    const auto cache = KernelCache::create(options_of(dir, redis));
    for (int i = 0; i < programs; ++i) ASSERT_TRUE(compiler.get(*cache, i).ok());
  }
  struct Answer {
    int exit = -1;
    std::string out, err;
    json::value json;
  };
  Answer ask(Words words, const RedisServer* redis = nullptr, const std::string& secret = kSecretText) {
    words.insert(words.begin(), "cache");
    for (const std::string& set : {"cache.dir=" + dir, "redis.url=" + (redis ? redis->url() : "")}) {
      words.push_back("--set");
      words.push_back(set);
    }
    Program program("ditfleet", words,
                    {.environment = {"DITFLEET_CACHE__SECRET=" + secret}, .input = {}, .stdout_path = {}});
    Answer answer;
    answer.exit = program.wait();
    answer.out = program.out();
    answer.err = program.err();
    EXPECT_THAT(answer.out + answer.err, Not(HasSubstr(secret)));
    if (auto parsed = parse_json(answer.out)) answer.json = *parsed;
    return answer;
  }
  std::string path_of(int number) const {
    const std::string hex = key_of(number).hex();
    return dir + "/1/" + hex.substr(0, 2) + "/" + hex;
  }
  void damage(int number) const {
    auto bytes = *read_file(path_of(number));
    bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
    ASSERT_TRUE(write_file_atomically(path_of(number), bytes).ok());
  }

  Folder folder;
  std::string dir = folder.path() + "/kernels";
  Compiler compiler{folder.path() + "/compiled"};
};

TEST_F(KernelCacheCommand, StatsOfAllTiers) {
  const RedisServer redis({.appendfsync = "no"});
  fill(&redis);
  const auto answer = ask({"stats", "--json"}, &redis);
  EXPECT_EQ(answer.exit, 0) << answer.err;
  EXPECT_EQ(answer.json.at("secret_id").as_string(), secret_of(kSecretText)->id_text());
  EXPECT_EQ(answer.json.at("disk").at("entries").as_int64(), 5);
  EXPECT_EQ(answer.json.at("disk").at("dir").as_string(), dir);
  EXPECT_EQ(answer.json.at("redis").at("entries").as_int64(), 5);
  EXPECT_EQ(answer.json.at("redis").at("bytes"), answer.json.at("disk").at("bytes"));
  EXPECT_THAT(ask({"stats"}, &redis).out, AllOf(HasSubstr("5 program(s)"), HasSubstr(redis.url())));
  EXPECT_TRUE(ask({"stats", "--json"}).json.at("redis").is_null());
}

TEST_F(KernelCacheCommand, ListShowsEachProgram) {
  fill();
  const auto answer = ask({"list", "--json"});
  EXPECT_EQ(answer.exit, 0) << answer.err;
  const auto& entries = answer.json.at("entries").as_array();
  ASSERT_EQ(entries.size(), 5u);
  std::set<std::string> regions;
  for (const auto& entry : entries) {
    regions.insert(std::string(entry.at("region").as_string()));
    EXPECT_EQ(entry.at("arch").as_string(), "sm_90a");
    EXPECT_EQ(entry.at("code_bytes").as_int64(), 2000);
    EXPECT_EQ(entry.at("kernels").at(0).at("registers").as_int64(), 32);
  }
  EXPECT_EQ(regions.size(), 5u);
  EXPECT_THAT(ask({"list"}).out, AllOf(HasSubstr("region-3"), HasSubstr(key_of(3).hex().substr(0, 16))));
  EXPECT_EQ(ask({"list", "--json", "--key", key_of(2).hex()}).json.at("entries").as_array().size(), 1u);
  EXPECT_EQ(ask({"list", "--json", "--arch", "sm_80"}).json.at("entries").as_array().size(), 0u);
}

TEST_F(KernelCacheCommand, VerifyFindsWhatIsBad) {
  const RedisServer redis({.appendfsync = "no"});
  fill(&redis);
  EXPECT_EQ(ask({"verify"}, &redis).exit, 0);
  damage(1);
  ASSERT_TRUE(write_file_atomically(path_of(2), *read_file(path_of(3))).ok());
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"SET", redis_name(4), "junk"}), "OK");
  const auto answer = ask({"verify", "--json"}, &redis);
  EXPECT_EQ(answer.exit, 1);
  EXPECT_FALSE(answer.json.at("ok").as_bool());
  EXPECT_EQ(answer.json.at("checked").as_int64(), 10);
  std::map<std::string, std::string> bad;
  for (const auto& entry : answer.json.at("bad").as_array())
    bad[std::string(entry.at("tier").as_string()) + " " + std::string(entry.at("key").as_string())] =
        std::string(entry.at("problem").as_string());
  const std::map<std::string, std::string> expected = {{"disk " + key_of(1).hex(), "corrupt"},
                                                       {"disk " + key_of(2).hex(), "wrong_key"},
                                                       {"redis " + key_of(4).hex(), "corrupt"}};
  EXPECT_EQ(bad, expected);
  EXPECT_THAT(ask({"verify"}, &redis).out, HasSubstr("3 bad"));

  EXPECT_EQ(ask({"purge", "--bad"}, &redis).exit, 0);
  const auto after = ask({"verify", "--json"}, &redis);
  EXPECT_EQ(after.exit, 0);
  EXPECT_EQ(after.json.at("checked").as_int64(), 7);
}

TEST_F(KernelCacheCommand, VerifyWithAnotherSecretFindsNothingGood) {
  fill();
  const auto answer = ask({"verify", "--json"}, nullptr, "the secret of someone else");
  EXPECT_EQ(answer.exit, 1);
  EXPECT_EQ(answer.json.at("bad").as_array().size(), 0u);
  ASSERT_EQ(answer.json.at("of_another_secret").as_array().size(), 5u);
  EXPECT_EQ(answer.json.at("of_another_secret").at(0).at("problem").as_string(), "foreign_secret");
  EXPECT_EQ(
      ask({"purge", "--bad", "--json"}, nullptr, "the secret of someone else").json.at("removed").at("disk").as_int64(),
      0);
  EXPECT_EQ(ask({"verify"}).exit, 0);
}

// Whoever has the wrong secret must not be led to remove what is right for all others.
TEST_F(KernelCacheCommand, AnotherSecretsProgramsInRedisAreToldApartAndLeftAlone) {
  const RedisServer redis({.appendfsync = "no"});
  fill(&redis);
  RedisView view(redis.endpoint());
  ASSERT_EQ(view({"SET", redis_name(4), "junk"}), "OK");
  dir = folder.path() + "/of-the-wrong-node";
  const std::string wrong = "the secret of someone else";
  const auto verified = ask({"verify", "--json"}, &redis, wrong);
  EXPECT_EQ(verified.exit, 1) << "four could not be checked";
  EXPECT_EQ(verified.json.at("checked").as_int64(), 5);
  ASSERT_EQ(verified.json.at("bad").as_array().size(), 1u);
  EXPECT_EQ(verified.json.at("bad").at(0).at("key").as_string(), key_of(4).hex());
  EXPECT_EQ(verified.json.at("of_another_secret").as_array().size(), 4u);
  EXPECT_THAT(
      ask({"verify"}, &redis, wrong).out,
      AllOf(HasSubstr("5 checked, 1 bad;"), HasSubstr("4 signed with another secret, which other nodes may have")));

  const auto purged = ask({"purge", "--bad", "--json"}, &redis, wrong);
  EXPECT_EQ(purged.exit, 0) << purged.err;
  EXPECT_EQ(purged.json.at("removed").at("redis").as_int64(), 1);
  EXPECT_EQ(purged.json.at("of_another_secret").as_int64(), 4);
  const auto cache = KernelCache::create(options_of("", &redis));
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(compiler.get(*cache, i).ok());
  EXPECT_EQ(cache->counts().redis_hits, 4u) << "the fleet's programs went";
  EXPECT_EQ(ask({"purge", "--json"}, &redis, wrong).json.at("removed").at("redis").as_int64(), 4)
      << "without --bad all is meant";
}

// How programs reach a host without a network.
TEST_F(KernelCacheCommand, ACopiedFolderFillsAnotherNode) {
  fill();
  const std::string other = folder.path() + "/other";
  fs::copy(dir, other, fs::copy_options::recursive);
  const auto cache = KernelCache::create(options_of(other, nullptr));
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(compiler.get(*cache, i).ok());
  EXPECT_EQ(cache->counts().compiles, 0u);
}

TEST_F(KernelCacheCommand, PurgeRemovesWhatItIsAskedTo) {
  const RedisServer redis({.appendfsync = "no"});
  fill(&redis);
  std::string capitals = key_of(1).hex();
  for (char& digit : capitals) digit = static_cast<char>(std::toupper(static_cast<unsigned char>(digit)));
  EXPECT_EQ(ask({"list", "--json", "--key", capitals, "--tier", "disk"}, &redis).json.at("entries").as_array().size(),
            1u);
  EXPECT_EQ(ask({"purge", "--json", "--key", key_of(1).hex()}, &redis).json.at("removed").at("disk").as_int64(), 1);
  EXPECT_EQ(ask({"purge", "--json", "--arch", "sm_80"}, &redis).json.at("removed").at("redis").as_int64(), 0);
  EXPECT_EQ(ask({"purge", "--json", "--tier", "disk"}, &redis).json.at("removed").at("disk").as_int64(), 4);
  EXPECT_EQ(ask({"stats", "--json"}, &redis).json.at("redis").at("entries").as_int64(), 4);
  EXPECT_EQ(ask({"purge", "--json"}, &redis).json.at("removed").at("redis").as_int64(), 4);
  RedisView view(redis.endpoint());
  EXPECT_EQ(view({"DBSIZE"}), "0");
}

// As nobody, for whom a folder's mode counts; nobody must be able to run the program for that.
TEST_F(KernelCacheCommand, APurgeOfAReadOnlyFolderRemovesNothingAndSaysSo) {
  fill();
  fs::create_directories(dir + "/quarantine");
  std::ofstream(dir + "/quarantine/bad") << "x";
  std::vector<fs::path> all = {folder.path()};
  for (const auto& entry : fs::recursive_directory_iterator(folder.path())) all.push_back(entry.path());
  for (const auto& path : all) ::chmod(path.c_str(), fs::is_directory(path) ? 0555 : 0444);
  Process process([&]() -> std::string {
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return "skip";
    if (::access(program_path("ditfleet").c_str(), X_OK) != 0) return "skip";
    const auto answer = ask({"purge", "--json"});
    return std::to_string(answer.exit) + " " + answer.out + answer.err;
  });
  const std::string said = process.wait();
  for (const auto& path : all) ::chmod(path.c_str(), 0777);
  if (said == "skip") GTEST_SKIP() << "nobody cannot run the program here";
  EXPECT_THAT(said,
              AllOf(::testing::StartsWith("1 "), HasSubstr(R"("removed":{"disk":0,"redis":0,"quarantine":0})"),
                    HasSubstr(R"("stayed":5)"), HasSubstr("5 program(s) could not be removed: cannot remove '" + dir)));
  EXPECT_EQ(ask({"stats", "--json"}).json.at("disk").at("entries").as_int64(), 5);
}

TEST_F(KernelCacheCommand, AFolderThatIsAFileIsNotTakenForEmpty) {
  fs::remove_all(dir);
  std::ofstream(dir) << "x";
  for (const char* command : {"stats", "list", "verify", "purge"}) {
    const auto answer = ask({command});
    EXPECT_EQ(answer.exit, 1) << command;
    EXPECT_THAT(answer.err, HasSubstr("cannot read the folder '" + dir)) << command;
  }
}

TEST_F(KernelCacheCommand, WrongUse) {
  EXPECT_EQ(ask({"list", "--key", "abc"}).exit, 2);
  EXPECT_EQ(ask({"list", "--tier", "tape"}).exit, 2);
  EXPECT_EQ(ask({"list", "--tier", "redis"}).exit, 2);
  const auto both = ask({"list", "--bad", "--arch", "cpu"});
  EXPECT_EQ(both.exit, 2) << "an empty answer would say that nothing is bad";
  EXPECT_THAT(both.err, HasSubstr("--bad and --arch cannot be combined"));
  EXPECT_EQ(ask({"verfy"}).exit, 2);
  EXPECT_EQ(ask({"stats"}, nullptr, "short").exit, 2);
}

TEST_F(KernelCacheCommand, ARedisThatIsGoneIsSaid) {
  RedisServer redis({.appendfsync = "no"});
  fill(&redis);
  redis.stop();
  EXPECT_EQ(ask({"verify"}, &redis).exit, 1);
  const auto stats = ask({"stats", "--json"}, &redis);
  EXPECT_EQ(stats.exit, 0);
  EXPECT_FALSE(stats.json.at("redis").at("reachable").as_bool());
}

TEST_F(KernelCacheCommand, WarningsStayOutOfTheAnswer) {
  Program program("ditfleet",
                  {"cache", "stats", "--json", "--set", "cache.dir=" + dir, "--set", "redis.url=unix:///nonexistent"});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_THAT(program.err(), HasSubstr("cache.secret_file"));
  const auto answer = parse_json(program.out());
  ASSERT_TRUE(answer.ok()) << program.out();
  EXPECT_TRUE(answer->at("secret_id").is_null());
  EXPECT_EQ(answer->at("disk").at("entries").as_int64(), 0);
  EXPECT_FALSE(fs::exists(dir)) << "whoever looks must not make what he looks for";
}

TEST_F(KernelCacheCommand, AFolderWhoseSecretIsGoneIsNotTakenForEmpty) {
  fill();
  for (const char* command : {"stats", "verify", "list", "purge"}) {
    Program program("ditfleet", {"cache", command, "--set", "cache.dir=" + dir, "--set", "redis.url="});
    EXPECT_EQ(program.wait(), 1) << command;
    EXPECT_THAT(program.err(), HasSubstr("has programs but no secret to verify them"));
  }
  EXPECT_FALSE(fs::exists(dir + "/secret"));
  EXPECT_EQ(ask({"verify", "--json"}).json.at("checked").as_int64(), 5);
}

// Which secret a configuration means.
TEST_F(KernelCacheCommand, WithoutANamedSecretTheFolderHasItsOwnAndRedisIsOff) {
  const RedisServer redis({.appendfsync = "no"});
  config::Settings settings;
  settings.cache.dir = dir;
  settings.redis.url = redis.url();
  const auto options = cache_options(settings);
  ASSERT_TRUE(options.ok()) << options.error().message;
  EXPECT_FALSE(options->redis);
  ASSERT_TRUE(options->secret);
  struct stat info {};
  ASSERT_EQ(::stat((dir + "/secret").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ((*cache_options(settings)).secret->id(), options->secret->id()) << "another process makes another secret";

  settings.cache.secret_file = dir + "/secret";
  const auto named = cache_options(settings);
  ASSERT_TRUE(named.ok());
  EXPECT_TRUE(named->redis);
  settings.cache.secret_file = dir + "/none";
  EXPECT_EQ(cache_options(settings).error().code, Code::kNotFound);
  settings.cache.secret_file.clear();
  std::ofstream(folder.path() + "/file") << "x";
  settings.cache.dir = folder.path() + "/file/kernels";
  const auto nowhere = cache_options(settings);
  ASSERT_TRUE(nowhere.ok());
  EXPECT_TRUE(nowhere->dir.empty()) << "values that nobody could verify would be written";
}

TEST_F(KernelCacheCommand, UpMakesASecretForItsOwnRedisThatIsShownNowhere) {
  const std::string data = folder.path() + "/data", ready = folder.path() + "/ready";
  Program up("ditfleet", {"up", "--workers", "0", "--listen", "127.0.0.1:0", "--data", data, "--ready-file", ready,
                          "--model", "demo=" + source_path("deploy/demo-model/model")});
  for (int i = 0; i < 1000 && !fs::exists(ready); ++i) std::this_thread::sleep_for(milliseconds(20));
  ASSERT_TRUE(fs::exists(ready)) << up.err();
  std::string secret = *read_file(data + "/kernels/secret");
  ASSERT_EQ(secret.size(), 65u);
  secret.pop_back();
  struct stat info {};
  ASSERT_EQ(::stat((data + "/kernels/secret").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_THAT(*read_file(data + "/effective.yaml"), AllOf(HasSubstr(data + "/kernels/secret"), Not(HasSubstr(secret))));

  // The command finds the Redis and the secret by the file that `up` writes.
  Program stats("ditfleet", {"cache", "stats", "--json", "--data", data});
  EXPECT_EQ(stats.wait(), 0) << stats.err();
  const auto answer = parse_json(stats.out());
  ASSERT_TRUE(answer.ok());
  EXPECT_TRUE(answer->at("redis").at("reachable").as_bool());
  EXPECT_EQ(answer->at("secret_id").as_string(), secret_of(secret)->id_text());
  Program alone("ditfleet", {"cache", "stats", "--json", "--set", "data.dir=" + data});
  EXPECT_EQ(alone.wait(), 0);
  EXPECT_THAT(alone.out(), HasSubstr(secret_of(secret)->id_text()))
      << "the folder alone is verified with another secret";
  up.send(SIGTERM);
  EXPECT_EQ(up.wait(std::chrono::seconds(30)), 0);
  EXPECT_THAT(up.out() + up.err(), Not(HasSubstr(secret)));
}

}  // namespace
}  // namespace ditfleet::kernel_cache::testing
