// The registry of adapters on a real Redis: records, bytes, what several writers do to each other.
#include "shared/core/bytes.h"
#include "shared/core/sha256.h"
#include "shared/loras/keys.h"
#include "shared/loras/registry.h"
#include "shared/loras/registry_mirror.h"
#include "shared/loras/upload.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using loras::Adapter;
using loras::Condition;

// The names of ada's adapters, sorted.
std::vector<std::string> names(const loras::RegistryMirror& mirror) {
  std::vector<std::string> out;
  for (const Adapter& adapter : mirror.list("ada").adapters) out.push_back(adapter.name);
  return out;
}

class LorasRegistry : public QueueTest {
 protected:
  struct Sent {
    std::string id, sha256;
    std::int64_t bytes = 0;
  };
  Sent send(const std::string& bytes, std::size_t piece = 700'000) {
    loras::Upload upload(*registry_);
    for (std::size_t at = 0; at < bytes.size(); at += piece) {
      EXPECT_TRUE(wait(upload.write(std::string_view(bytes).substr(at, piece), soon())).ok());
    }
    EXPECT_TRUE(wait(upload.finish(soon())).ok());
    return {upload.id(), upload.sha256(), upload.bytes()};
  }
  static Adapter record(const std::string& name, const Sent& sent, const std::string& tenant = "ada") {
    Adapter a;
    a.tenant = tenant, a.name = name, a.sha256 = sent.sha256, a.bytes = sent.bytes;
    return a;
  }
  bool put(const std::string& name, const std::string& bytes, const std::string& tenant = "ada") {
    const Sent sent = send(bytes);
    auto done = wait(registry_->put(record(name, sent, tenant), sent.id, Condition::kAny, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return done.ok() && *done;
  }
  // What a worker does with a digest.
  Result<std::string> fetch(const std::string& sha256) {
    auto location = wait(registry_->lookup(sha256, soon()));
    if (!location) return location.error();
    std::string bytes;
    for (int i = 0; i < location->chunks; ++i) {
      auto chunk = wait(registry_->read_chunk(*location, i, soon()));
      if (!chunk) return chunk.error();
      bytes += *chunk;
    }
    return bytes;
  }
  std::size_t chunk_keys() { return redis({"KEYS", "df:{lora}:chunk:*"}).elements.size(); }

  std::shared_ptr<loras::Registry> registry_ = std::make_shared<loras::Registry>(connection_);
};

std::string bytes_of(char c, std::size_t size = 2 * loras::kChunkBytes + 17) { return std::string(size, c); }

TEST_F(LorasRegistry, GivesBackWhatWasUploadedInChunks) {
  for (const std::size_t size : {std::size_t{1}, loras::kChunkBytes, 3 * loras::kChunkBytes + 5}) {
    const std::string bytes = bytes_of('x', size);
    put("style", bytes);
    const auto read = fetch(sha256_hex(bytes));
    ASSERT_TRUE(read.ok()) << read.error().message;
    EXPECT_EQ(*read, bytes);
  }
  for (const auto& key : redis({"KEYS", "df:{lora}:chunk:*"}).elements)
    EXPECT_LE(redis({"STRLEN", key.text}).integer, 1 << 20) << key.text;
}

TEST_F(LorasRegistry, AnUploadThatIsNotFinishedExpiresAndPointsNowhere) {
  const Sent sent = send(bytes_of('x'));
  for (const auto& key : redis({"KEYS", "df:{lora}:*"}).elements)
    EXPECT_GT(redis({"PTTL", key.text}).integer, 0) << key.text;
  EXPECT_EQ(wait(registry_->lookup(sent.sha256, soon())).error().code, Code::kNotFound);
  redis({"DEL", loras::chunk_key(sent.id, 0)});
  const auto put = wait(registry_->put(record("late", sent), sent.id, Condition::kAny, soon()));
  ASSERT_FALSE(put.ok());
  EXPECT_NE(put.error().message.find("expired"), std::string::npos) << put.error().message;
  EXPECT_FALSE(*wait(registry_->find("ada", "late", soon())));
}

TEST_F(LorasRegistry, OneDigestIsKeptOnceUntilItsLastNameGoes) {
  const std::string bytes = bytes_of('x');
  put("a", bytes);
  put("b", bytes, "bob");
  EXPECT_EQ(chunk_keys(), 3u);
  ASSERT_TRUE(wait(registry_->remove("ada", "a", soon())).ok());
  EXPECT_TRUE(fetch(sha256_hex(bytes)).ok());
  EXPECT_EQ(wait(registry_->remove("ada", "b", soon())).error().code, Code::kNotFound) << "bob's";
  ASSERT_TRUE(wait(registry_->remove("bob", "b", soon())).ok());
  EXPECT_EQ(fetch(sha256_hex(bytes)).error().code, Code::kNotFound);
  // Nothing is left but the version and what changed.
  EXPECT_EQ(redis({"KEYS", "df:{lora}:*"}).elements.size(), 2u);
}

TEST_F(LorasRegistry, ReplacedBytesAreFoundForAWhile) {
  const std::string first = bytes_of('1'), second = bytes_of('2');
  put("style", first);
  EXPECT_FALSE(put("style", second)) << "the name was there";
  EXPECT_EQ(*fetch(sha256_hex(first)), first) << "for jobs that were admitted with it";
  EXPECT_EQ(wait(registry_->find("ada", "style", soon()))->value().sha256, sha256_hex(second));
  redis({"ZADD", std::string(loras::kGarbageKey), "1", sha256_hex(first)});
  EXPECT_EQ(*wait(registry_->sweep(soon())), 1);
  EXPECT_EQ(fetch(sha256_hex(first)).error().code, Code::kNotFound);
  EXPECT_EQ(chunk_keys(), 3u);
  // What comes back before it went is not collected.
  put("style", first);
  put("style", second);
  redis({"ZADD", std::string(loras::kGarbageKey), "1", sha256_hex(second)});
  EXPECT_EQ(*wait(registry_->sweep(soon())), 0);
  EXPECT_EQ(*fetch(sha256_hex(second)), second);
}

TEST_F(LorasRegistry, OfWritersAtOnceTheLastWinsWhole) {
  constexpr int kWriters = 8;
  std::vector<Sent> sent;
  for (int i = 0; i < kWriters; ++i) sent.push_back(send(bytes_of(static_cast<char>('a' + i))));
  int done = 0, created = 0;
  for (int i = 0; i < kWriters; ++i) {
    asio::co_spawn(
        io_,
        [&, i]() -> asio::awaitable<void> {
          Adapter adapter = record("style", sent[static_cast<std::size_t>(i)]);
          adapter.rank = i + 1;
          auto put = co_await registry_->put(adapter, sent[static_cast<std::size_t>(i)].id, Condition::kAny, soon());
          EXPECT_TRUE(put.ok()) << (put ? "" : put.error().message);
          created += put && *put ? 1 : 0;
          ++done;
        },
        asio::detached);
  }
  io_.restart();
  while (done < kWriters && io_.run_one() > 0) {
  }
  EXPECT_EQ(created, 1) << "the others replaced it";
  const auto winner = *wait(registry_->find("ada", "style", soon()));
  ASSERT_TRUE(winner);
  const auto index = static_cast<std::size_t>(winner->rank - 1);
  EXPECT_EQ(winner->sha256, sent[index].sha256);
  EXPECT_EQ(*fetch(winner->sha256), bytes_of(static_cast<char>('a' + index)));
}

// What a lost reply looks like to who asks again: the change it wants has been made.
TEST_F(LorasRegistry, WhoFindsItsChangeMadeIsToldWhetherItReplaced) {
  put("style", "1");
  Adapter adapter = record("style", {"", sha256_hex("22"), 2});
  adapter.path = "/models/style.safetensors";
  for (const bool created : {false, true}) {
    if (created) adapter.name = "new";
    std::vector<bool> told;
    for (int i = 0; i < 2; ++i) {
      asio::co_spawn(
          io_,
          [&]() -> asio::awaitable<void> {
            const std::string none;
            auto put = co_await registry_->put(adapter, none, Condition::kAny, soon());
            EXPECT_TRUE(put.ok());
            told.push_back(put.ok() && *put);
          },
          asio::detached);
    }
    io_.restart();
    while (told.size() < 2 && io_.run_one() > 0) {
    }
    EXPECT_EQ(told, std::vector<bool>(2, created));
  }
}

TEST_F(LorasRegistry, OfTwoUploadsOfTheSameAtOnceOneIsKept) {
  const std::string bytes = bytes_of('x');
  const Sent sent[] = {send(bytes), send(bytes)};
  const Adapter adapter = record("style", sent[0]);  // also of the same millisecond
  int done = 0;
  for (const Sent& one : sent) {
    asio::co_spawn(
        io_,
        [&]() -> asio::awaitable<void> {
          auto put = co_await registry_->put(adapter, one.id, Condition::kAbsent, soon());
          EXPECT_TRUE(put.ok() && *put);
          ++done;
        },
        asio::detached);
  }
  io_.restart();
  while (done < 2 && io_.run_one() > 0) {
  }
  EXPECT_EQ(chunk_keys(), 3u);
  EXPECT_EQ(*fetch(sha256_hex(bytes)), bytes);
}

TEST_F(LorasRegistry, PutsOnACondition) {
  const Sent sent = send(bytes_of('x'));
  const Adapter first = record("s", sent), other = record("s", send("other"));
  EXPECT_EQ(wait(registry_->put(first, sent.id, Condition::kPresent, soon())).error().code, Code::kConflict);
  EXPECT_TRUE(*wait(registry_->put(first, sent.id, Condition::kAbsent, soon())));
  EXPECT_EQ(wait(registry_->put(first, sent.id, Condition::kAbsent, soon())).error().code, Code::kConflict);
  const Condition is_other(Condition::kPresent, &other), is_first(Condition::kPresent, &first);
  EXPECT_EQ(wait(registry_->put(first, sent.id, is_other, soon())).error().code, Code::kConflict);
  EXPECT_EQ(wait(registry_->set_pinned("ada", "s", true, soon(), is_other)).error().code, Code::kConflict);
  EXPECT_EQ(wait(registry_->remove("ada", "s", soon(), is_other)).error().code, Code::kConflict);
  EXPECT_FALSE(*wait(registry_->put(first, sent.id, is_first, soon())));
  EXPECT_TRUE(wait(registry_->remove("ada", "s", soon(), is_first)).ok());
}

TEST_F(LorasRegistry, AnUploadBringsBackChunksThatWereLost) {
  const std::string bytes = bytes_of('x');
  put("a", bytes);
  const auto lose = [&](const std::vector<std::string>& command) {
    const std::string key = redis({"KEYS", "df:{lora}:chunk:*:1"}).elements.at(0).text;
    std::vector<std::string> words = command;
    words.insert(words.begin() + 1, key);
    redis(words);
    EXPECT_FALSE(fetch(sha256_hex(bytes)).ok());
  };
  for (const auto& [damage, name] :
       {std::pair(std::vector<std::string>{"DEL"}, "a"), std::pair(std::vector<std::string>{"SET", "short"}, "b")}) {
    lose(damage);
    put(name, bytes);
    const auto read = fetch(sha256_hex(bytes));
    ASSERT_TRUE(read.ok()) << name << ": " << read.error().message;
    EXPECT_EQ(*read, bytes);
    EXPECT_EQ(chunk_keys(), 3u);
    for (const auto& key : redis({"KEYS", "df:{lora}:chunk:*"}).elements)
      EXPECT_EQ(redis({"PTTL", key.text}).integer, -1);
  }
}

TEST_F(LorasRegistry, FilesAreFoundByDigestUnderEveryPath) {
  Adapter a = record("a", {"", sha256_hex("x"), 1}), b = record("b", {"", sha256_hex("x"), 1});
  a.path = "/models/a.safetensors", b.path = "/models/b.safetensors";
  for (const Adapter& adapter : {a, b}) ASSERT_TRUE(wait(registry_->put(adapter, "", Condition::kAny, soon())).ok());
  auto found = wait(registry_->lookup(a.sha256, soon()));
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->paths, (std::vector<std::string>{a.path, b.path}));
  EXPECT_FALSE(found->one_place);
  EXPECT_TRUE(found->upload.empty());
  EXPECT_EQ(wait(registry_->read_chunk(*found, 0, soon())).error().code, Code::kInvalidArgument);
  // Replaced by another file: the old one is where it was.
  ASSERT_TRUE(wait(registry_->remove("ada", "b", soon())).ok());
  EXPECT_TRUE(wait(registry_->lookup(a.sha256, soon()))->one_place);
  Adapter other = record("a", {"", sha256_hex("y"), 1});
  other.path = "/models/c.safetensors";
  ASSERT_TRUE(wait(registry_->put(other, "", Condition::kAny, soon())).ok());
  found = wait(registry_->lookup(a.sha256, soon()));
  ASSERT_TRUE(found.ok()) << found.error().message;
  EXPECT_EQ(found->paths, std::vector<std::string>{a.path});
}

TEST_F(LorasRegistry, TellsWorkersWhatIsPinned) {
  const auto pinned = [&](const std::string& bytes) {
    return wait(registry_->lookup(sha256_hex(bytes), soon()))->pinned;
  };
  put("a", "1");
  put("b", "1", "bob");
  EXPECT_FALSE(pinned("1"));
  ASSERT_TRUE(wait(registry_->set_pinned("ada", "a", true, soon())).ok());
  EXPECT_TRUE(pinned("1")) << "one of its names is";
  ASSERT_TRUE(wait(registry_->set_pinned("bob", "b", true, soon())).ok());
  ASSERT_TRUE(wait(registry_->set_pinned("ada", "a", false, soon())).ok());
  EXPECT_TRUE(pinned("1"));
  put("b", "2", "bob");  // without a pin
  EXPECT_FALSE(pinned("1"));
  EXPECT_FALSE(pinned("2"));
  const Sent sent = send("3");
  Adapter adapter = record("c", sent);
  adapter.pinned = true;
  ASSERT_TRUE(wait(registry_->put(adapter, sent.id, Condition::kAny, soon())).ok());
  put("d", "3");
  EXPECT_TRUE(pinned("3"));
  ASSERT_TRUE(wait(registry_->remove("ada", "c", soon())).ok());
  EXPECT_FALSE(pinned("3"));
}

TEST_F(LorasRegistry, ADirectoryFollows) {
  loras::RegistryMirror directory(registry_);
  EXPECT_FALSE(directory.loaded());
  ASSERT_TRUE(wait(directory.refresh(soon())).ok());
  EXPECT_TRUE(directory.loaded());
  EXPECT_EQ(directory.find("ada", "style"), nullptr);
  put("style", "1");
  put("other", "22");
  put("style", "333", "bob");
  ASSERT_TRUE(wait(directory.refresh(soon())).ok());
  ASSERT_NE(directory.find("ada", "style"), nullptr);
  EXPECT_EQ(directory.find("ada", "style")->sha256, sha256_hex("1"));
  EXPECT_EQ(directory.find("bob", "style")->sha256, sha256_hex("333"));
  EXPECT_EQ(directory.find("bob", "other"), nullptr);
  EXPECT_EQ(names(directory), (std::vector<std::string>{"other", "style"}));
  EXPECT_EQ(directory.bytes().at(sha256_hex("22")), 2);
  EXPECT_TRUE(directory.pinned().empty());

  EXPECT_TRUE(wait(registry_->set_pinned("ada", "other", true, soon()))->pinned);
  EXPECT_EQ(wait(registry_->set_pinned("ada", "none", true, soon())).error().code, Code::kNotFound);
  ASSERT_TRUE(wait(directory.refresh(soon())).ok());
  EXPECT_EQ(directory.pinned(), std::set<std::string>{sha256_hex("22")});
  ASSERT_TRUE(wait(registry_->remove("ada", "other", soon())).ok());
  ASSERT_TRUE(wait(directory.refresh(soon())).ok());
  EXPECT_TRUE(directory.pinned().empty());
  EXPECT_EQ(directory.find("ada", "other"), nullptr);

  // Another Redis has another registry, also if as much has happened there.
  redis({"FLUSHALL"});
  for (int i = 0; i < 5; ++i) put("new", std::string(1, static_cast<char>('a' + i)));
  ASSERT_TRUE(wait(directory.refresh(soon())).ok());
  EXPECT_EQ(names(directory), std::vector<std::string>{"new"});
  redis({"FLUSHALL"});
  ASSERT_TRUE(wait(directory.refresh(soon())).ok());
  EXPECT_TRUE(names(directory).empty());
}

TEST_F(LorasRegistry, ADirectoryReadsWhatChangedAloneUnlessItIsFarBehind) {
  loras::RegistryMirror near(registry_), far(registry_);
  put("a", "1");
  put("b", "2");
  for (loras::RegistryMirror* directory : {&near, &far}) ASSERT_TRUE(wait(directory->refresh(soon())).ok());
  // A record that no change is noted of is not looked at again …
  redis({"HDEL", std::string(loras::kNamesKey), "ada/a"});
  put("b", "3");
  put("c", "4");
  ASSERT_TRUE(wait(registry_->remove("ada", "c", soon())).ok());
  ASSERT_TRUE(wait(near.refresh(soon())).ok());
  EXPECT_EQ(names(near), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(near.find("ada", "b")->sha256, sha256_hex("3"));
  EXPECT_EQ(near.version(), *wait(registry_->version(soon())));
  // … but by who missed more than is kept.
  redis({"ZREMRANGEBYRANK", std::string(loras::kChangesKey), "0", "-2"});
  ASSERT_TRUE(wait(far.refresh(soon())).ok());
  EXPECT_EQ(names(far), std::vector<std::string>{"b"});
  // As many names as ever change, so much is kept.
  Adapter adapter = record("x", {"", sha256_hex("x"), 1});
  adapter.path = "/x";
  for (int i = 0; i < 1100; ++i) {
    adapter.name = "x" + std::to_string(i);
    ASSERT_TRUE(wait(registry_->put(adapter, "", Condition::kAny, soon())).ok());
  }
  EXPECT_EQ(redis({"ZCARD", std::string(loras::kChangesKey)}).integer, 1000);
  for (loras::RegistryMirror* directory : {&near, &far}) {
    ASSERT_TRUE(wait(directory->refresh(soon())).ok());
    EXPECT_EQ(names(*directory).size(), 1101u);
  }
  // A wrong name is compared with its neighbors only.
  const auto hint = [&](const std::string& name) { return near.resolve("ada", name, "", "m").error().message; };
  EXPECT_NE(hint("x777x").find("did you mean 'x777'?"), std::string::npos) << hint("x777x");
  EXPECT_NE(hint("nothing-like-it").find("see GET /v1/loras"), std::string::npos);
  EXPECT_NE(hint("9x999").find("see GET /v1/loras"), std::string::npos) << "one edit away, but not a neighbor";
  EXPECT_EQ(near.use("ada").adapters, 1101);
  EXPECT_EQ(near.use("ada", "x7").adapters, 1100);
}

TEST_F(LorasRegistry, ADamagedRecordHidesNoOther) {
  put("good", "1");
  redis({"HSET", std::string(loras::kNamesKey), "ada/bad", "{"});
  redis({"HSET", std::string(loras::kNamesKey), "ada/alias",
         redis({"HGET", std::string(loras::kNamesKey), "ada/good"}).text});
  const auto all = wait(registry_->all(soon()));
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->size(), 1u);
  EXPECT_EQ(wait(registry_->find("ada", "bad", soon())).error().code, Code::kDataCorrupt);
  put("bad", "2");
  EXPECT_TRUE(*wait(registry_->find("ada", "bad", soon()))) << "and can be replaced";
}

TEST_F(LorasRegistry, RefusesWhatIsTooMuchForRedisAndCanStillDelete) {
  put("kept", bytes_of('k'));
  const Sent sent = send(bytes_of('x'));
  const std::string used = "1mb";
  redis({"CONFIG", "SET", "maxmemory", used});
  EXPECT_EQ(wait(registry_->put(record("more", sent), sent.id, Condition::kAny, soon())).error().code,
            Code::kResourceExhausted);
  EXPECT_TRUE(wait(registry_->remove("ada", "kept", soon())).ok());
  EXPECT_EQ(fetch(sha256_hex(bytes_of('k'))).error().code, Code::kNotFound);
  redis({"CONFIG", "SET", "maxmemory", "0"});
}

TEST(Sha256OfPieces, IsThatOfTheWhole) {
  const std::string bytes(100'001, 'q');
  Sha256 hash;
  for (std::size_t at = 0; at < bytes.size(); at += 777) hash.update(std::string_view(bytes).substr(at, 777));
  EXPECT_EQ(hash.hex(), sha256_hex(bytes));
  EXPECT_EQ(sha256_of_file("/dev/null").error().code, Code::kUnavailable);
  EXPECT_EQ(sha256_of_file("/no/such").error().code, Code::kNotFound);
  EXPECT_TRUE(is_sha256_hex(sha256_hex("")));
  EXPECT_FALSE(is_sha256_hex("ABC"));
}

}  // namespace
}  // namespace ditfleet::testing
