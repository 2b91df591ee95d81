// The Redis backend of the result store.
#include <set>

#include "shared/core/bytes.h"
#include "shared/results/redis_store.h"
#include "shared/results/store.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using results::Manifest;

class ResultsRedis : public QueueTest {
 protected:
  std::shared_ptr<results::Store> open(std::int64_t retention_ms = 3'600'000, std::int64_t preview_ms = 600'000) {
    return *results::open_store({.retention_ms = retention_ms, .preview_ms = preview_ms}, connection_);
  }
  Manifest stored(const std::string& bytes) {
    auto manifest = wait(store_->put(result_, bytes, "image/png", soon()));
    EXPECT_TRUE(manifest.ok()) << (manifest ? "" : manifest.error().message);
    return *manifest;
  }
  std::shared_ptr<results::Store> store_ = open();
  results::ResultKey result_{"01JOB", 3, "n0nce"};
};

TEST_F(ResultsRedis, GivesBackWhatWasPutInChunks) {
  const std::size_t chunk = results::kChunkBytes;
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, chunk - 1, chunk, chunk + 1, 3 * chunk, 3 * chunk + 5}) {
    std::string bytes(size, 'x');
    for (std::size_t i = 0; i < size; i += 1000) bytes[i] = static_cast<char>(i / 1000);
    const Manifest manifest = stored(bytes);
    EXPECT_EQ(manifest.key, "df:{0}:blob:01JOB:3:n0nce");
    EXPECT_EQ(manifest.bytes, static_cast<std::int64_t>(size));
    EXPECT_EQ(redis({"KEYS", "df:{0}:blob:*"}).elements.size(), std::max<std::size_t>(1, (size + chunk - 1) / chunk));
    EXPECT_LE(redis({"STRLEN", manifest.key}).integer, static_cast<std::int64_t>(chunk));
    const auto read = wait(store_->get(manifest, soon()));
    ASSERT_TRUE(read.ok()) << size << ": " << read.error().message;
    EXPECT_EQ(*read, bytes) << size;
    std::string pieces;
    constexpr std::int64_t kPiece = 300'000;
    for (std::int64_t at = 0; at < manifest.bytes; at += kPiece)
      pieces += *wait(store_->get_piece(manifest, at, kPiece, soon()));
    EXPECT_EQ(pieces, bytes) << size;
    ASSERT_TRUE(wait(store_->remove(manifest, soon())).ok());
    EXPECT_EQ(redis({"KEYS", "df:{0}:blob:*"}).elements.size(), 0u);
    EXPECT_EQ(wait(store_->get(manifest, soon())).error().code, Code::kNotFound);
    EXPECT_EQ(wait(store_->get_piece(manifest, 0, 1, soon())).ok(), size == 0);
    EXPECT_TRUE(wait(store_->remove(manifest, soon())).ok()) << "absent is not an error";
  }
}

// A reader that finds the first chunk of a preview or an image must find the others, too.
TEST_F(ResultsRedis, WritesTheFirstChunkLast) {
  redis({"CONFIG", "SET", "slowlog-log-slower-than", "0"});
  const std::string key = stored(std::string(2 * results::kChunkBytes + 1, 'x')).key;
  std::vector<std::string> latest_first;
  for (const auto& entry : redis({"SLOWLOG", "GET", "-1"}).elements) {
    const auto& words = entry.elements.at(3).elements;
    if (words.at(0).text == "SET") latest_first.push_back(words.at(1).text);
  }
  EXPECT_EQ(latest_first, (std::vector<std::string>{key, key + ":1", key + ":2"}));
}

TEST_F(ResultsRedis, KeepsInputsByTheirDigestAndExtendsTheirLife) {
  for (const std::size_t size : {std::size_t{5}, results::kChunkBytes, results::kChunkBytes + 1}) {
    const std::string bytes(size, 'x'), sha256 = sha256_hex(bytes);
    EXPECT_EQ(wait(store_->touch_input(sha256, soon())).error().code, Code::kNotFound);
    EXPECT_EQ(wait(store_->get_input(sha256, soon())).error().code, Code::kNotFound);
    ASSERT_TRUE(wait(store_->put_input(sha256, bytes, soon())).ok());
    EXPECT_EQ(*wait(store_->get_input(sha256, soon())), bytes);
    const auto keys = redis({"KEYS", "df:{0}:input:*"}).elements;
    EXPECT_EQ(keys.size(), (size + results::kChunkBytes - 1) / results::kChunkBytes);
    for (const auto& key : keys) redis({"PEXPIRE", key.text, "5000"});
    ASSERT_TRUE(wait(store_->touch_input(sha256, soon())).ok());
    for (const auto& key : keys) EXPECT_GT(redis({"PTTL", key.text}).integer, 80'000'000);
    redis({"SET", "df:{0}:input:" + sha256, "other"});
    EXPECT_EQ(wait(store_->get_input(sha256, soon())).error().code, Code::kDataCorrupt);
    redis({"FLUSHALL"});
  }
}

TEST_F(ResultsRedis, RemovesInputsThatWerePartlyStored) {
  const std::string bytes(3 * results::kChunkBytes, 'x'), sha256 = sha256_hex(bytes);
  for (const bool whole : {true, false}) {
    ASSERT_TRUE(wait(store_->put_input(sha256, bytes, soon())).ok());
    if (!whole) redis({"DEL", "df:{0}:input:" + sha256});
    ASSERT_TRUE(wait(store_->remove_input(sha256, soon())).ok());
    EXPECT_EQ(redis({"KEYS", "df:{0}:input:*"}).elements.size(), 0u);
    EXPECT_TRUE(wait(store_->remove_input(sha256, soon())).ok()) << "absent is not an error";
  }
}

// Images as the queue counts them: whose they are, and until when.
class Inputs : public QueueTest {
 protected:
  static constexpr queue::InputQuota kMuch{1000, 1 << 30};
  static std::string sha256(int image = 0) { return sha256_hex("image " + std::to_string(image)); }

  Result<bool> keep(const std::string& tenant, int image = 0, std::int64_t bytes = 100,
                    queue::InputQuota quota = kMuch) {
    return wait(client_->keep_input(tenant, sha256(image), bytes, 60'000, quota, soon()));
  }
  Result<bool> remove(const std::string& tenant, int image = 0) {
    return wait(client_->remove_input(tenant, sha256(image), soon()));
  }
  // What is dropped once a minute has passed.
  std::vector<std::string> expire() {
    for (const auto& image : redis({"ZRANGE", keys_.inputs(), "0", "-1"}).elements)
      redis({"ZADD", keys_.inputs(), "1", image.text});
    return *wait(client_->expire_inputs(soon()));
  }
  std::pair<std::int64_t, std::int64_t> used(const std::string& tenant) {
    const auto use = *wait(client_->use(soon()));
    const auto found = use.find(tenant);
    return found == use.end() ? std::pair<std::int64_t, std::int64_t>()
                              : std::pair(found->second.inputs, found->second.input_bytes);
  }
  void expect_nothing_left() {
    for (const char* key : {"inputs", "input_use", "input_refs", "input_of", "inputs:a", "inputs:b"})
      EXPECT_EQ(redis({"EXISTS", std::string("df:{0}:") + key}).integer, 0) << key;
  }
  queue::Submission naming(int image, const std::string& tenant = "a") {
    auto s = submission();
    s.tenant = tenant;
    s.spec = R"({"model":"demo","image":")" + sha256(image) + R"(","prompt":"x"})";
    return s;
  }
};

TEST_F(Inputs, BelongToOneTenant) {
  EXPECT_TRUE(*keep("a"));
  EXPECT_FALSE(*keep("a")) << "again";
  EXPECT_EQ(used("a"), std::pair(std::int64_t{1}, std::int64_t{100}));
  const auto another = keep("b", 0, 0), unknown = keep("b", 1, 0);
  EXPECT_EQ(another.error().code, Code::kNotFound);
  EXPECT_EQ(unknown.error().code, Code::kNotFound);
  EXPECT_EQ(remove("b").error().code, Code::kNotFound);
  EXPECT_EQ(wait(client_->inputs("b", soon()))->size(), 0u);
  EXPECT_EQ(wait(client_->inputs("a", soon()))->at(sha256()), 100);
  // Both have the bytes now.
  EXPECT_TRUE(*keep("b"));
  EXPECT_FALSE(*remove("a")) << "B needs the bytes";
  EXPECT_EQ(used("b").first, 1);
  EXPECT_TRUE(*remove("b"));
  expect_nothing_left();
}

TEST_F(Inputs, SeveralGatewaysTogetherKeepTheQuota) {
  const auto second = connect();
  queue::Client other(second, options_);
  int created = 0, refused = 0, running = 0;
  const auto upload = [&](queue::Client& client, std::string image) -> asio::awaitable<void> {
    const auto kept = co_await client.keep_input("a", image, 1000, 60'000, {30, 25'000}, soon());
    --running;
    created += kept && *kept;
    refused += !kept && kept.error().code == Code::kResourceExhausted;
  };
  for (int i = 0; i < 40; ++i, ++running)
    asio::co_spawn(io_, upload(i % 2 == 0 ? *client_ : other, sha256(i)), asio::detached);
  io_.restart();
  while (running > 0) io_.run_one();
  EXPECT_EQ(created, 25);
  EXPECT_EQ(refused, 15);
  EXPECT_EQ(used("a"), std::pair(std::int64_t{25}, std::int64_t{25'000}));
  second->stop();
  const auto bytes = keep("a", 99, 1000, {30, 25'000}), images = keep("a", 99, 1000, {25, 1 << 30});
  EXPECT_NE(bytes.error().message.find("tenant 'a' has stored 25 images of 25000 bytes and sends one of 1000; it may "
                                       "have 25000 bytes (quotas.input_bytes"),
            std::string::npos)
      << bytes.error().message;
  EXPECT_NE(images.error().message.find("quotas.inputs is 25; remove images with DELETE"), std::string::npos)
      << images.error().message;
  EXPECT_EQ(expire().size(), 25u);
  EXPECT_TRUE(*keep("a", 99, 1000, {1, 1000})) << "what has expired does not count";
}

// However its job came and however it ends.
TEST_F(Inputs, AreKeptWhileAnOpenJobNamesThem) {
  lead();
  ASSERT_TRUE(keep("a", 1).ok());
  redis({"XADD", keys_.in(), "*", "tenant", "a", "spec", naming(1).spec});
  admit_all();
  for (int image = 2; image < 6; ++image) ASSERT_TRUE(keep("a", image).ok());
  const std::string queued = submit(naming(2)), completed = submit(naming(3)), canceled = submit(naming(4)),
                    twice = submit(naming(3));
  submit(naming(5, "b"));  // not its image
  EXPECT_EQ(expire(), std::vector{sha256(5)});
  EXPECT_EQ(remove("a", 5).error().code, Code::kNotFound);
  EXPECT_EQ(remove("a", 1).error().code, Code::kConflict);
  EXPECT_NE(remove("a", 3).error().message.find("open jobs name the image " + sha256(3) + ": 2;"), std::string::npos);
  ASSERT_EQ(*wait(client_->cancel(queued, "", soon())), queue::CancelOutcome::kCanceled);
  EXPECT_TRUE(*remove("a", 2));
  admit_all();
  EXPECT_EQ(remove("a", 3).error().code, Code::kConflict);
  for (const auto& job : {completed, twice}) {
    const auto attempt = assign(job);
    ASSERT_TRUE(start(attempt).ok());
    EXPECT_TRUE(expire().empty());
    ASSERT_TRUE(complete(attempt).ok());
  }
  ASSERT_EQ(*wait(client_->cancel(canceled, "", soon())), queue::CancelOutcome::kCanceled);
  const auto gone = expire();
  EXPECT_EQ(std::set(gone.begin(), gone.end()), (std::set{sha256(3), sha256(4)}));
  EXPECT_EQ(used("a").first, 1) << "only the job from the intake is open";
}

// Of several images and a mask each is kept, and each counts once for the job that names it twice.
TEST_F(Inputs, AreAllThatAJobNames) {
  lead();
  for (int image = 0; image < 6; ++image) ASSERT_TRUE(keep("a", image).ok());
  const auto quoted = [](int image) { return "\"" + sha256(image) + "\""; };
  const auto submit_with = [&](const std::string& fields) {
    auto s = submission();
    s.tenant = "a";
    s.spec = R"({"model":"demo","prompt":"\"images\":[)" + quoted(5).substr(1, 64) + R"(]",)" + fields + "}";
    return submit(s);
  };
  const std::string several = submit_with(R"("images":[)" + quoted(0) + "," + quoted(1) + "," + quoted(0) + "]," +
                                          R"("n":1)"),
                    edit = submit_with(R"("image":)" + quoted(2) + R"(,"mask":)" + quoted(3) + R"(,"strength":0.5)"),
                    both = submit_with(R"("image":)" + quoted(4) + R"(,"mask":)" + quoted(4) + R"(,"frames":5)");
  admit_all();
  for (int image = 0; image < 5; ++image) EXPECT_EQ(remove("a", image).error().code, Code::kConflict) << image;
  EXPECT_NE(remove("a", 0).error().message.find("open jobs name the image " + sha256(0) + ": 1;"), std::string::npos);
  EXPECT_EQ(expire(), std::vector{sha256(5)}) << "only a prompt names it";
  for (const auto& job : {several, both}) {
    const auto attempt = assign(job);
    ASSERT_TRUE(start(attempt).ok());
    ASSERT_TRUE(complete(attempt).ok());
  }
  EXPECT_EQ(remove("a", 2).error().code, Code::kConflict);
  EXPECT_EQ(remove("a", 3).error().code, Code::kConflict);
  ASSERT_EQ(*wait(client_->cancel(edit, "", soon())), queue::CancelOutcome::kCanceled);
  EXPECT_EQ(expire().size(), 5u);
  expect_nothing_left();
}

TEST_F(Inputs, AreNotWhatAPromptSays) {
  ASSERT_TRUE(keep("a").ok());
  auto s = submission();
  s.tenant = "a";
  s.spec = R"({"prompt":"\"image\":\")" + sha256() + R"(\""})";
  submit(s);
  EXPECT_TRUE(*remove("a"));
}

TEST_F(Inputs, AtMaxmemoryAdmittedJobsRunAndImagesGo) {
  ASSERT_TRUE(keep("a").ok());
  const std::string id = submit();
  admit_all();
  redis({"CONFIG", "SET", "maxmemory", "1"});
  EXPECT_EQ(keep("a", 1).error().code, Code::kResourceExhausted);
  EXPECT_EQ(wait(client_->submit(submission(), soon())).error().code, Code::kResourceExhausted);
  const auto attempt = assign(id);
  EXPECT_TRUE(start(attempt).ok());
  EXPECT_TRUE(complete(attempt).ok());
  EXPECT_TRUE(*remove("a"));
  EXPECT_TRUE(expire().empty());
}

TEST_F(ResultsRedis, RefusesWhatBelongsIntoFiles) {
  store_ = *results::open_store({.redis_max_bytes = 1000}, connection_);
  EXPECT_TRUE(wait(store_->put(result_, std::string(1000, 'x'), "video/mp4", soon())).ok());
  const auto refused = wait(store_->put(result_, std::string(1001, 'x'), "video/mp4", soon()));
  EXPECT_EQ(refused.error().code, Code::kPayloadTooLarge);
  EXPECT_NE(refused.error().message.find("1001 bytes, but results.redis_max_bytes is 1000"), std::string::npos);
  EXPECT_NE(refused.error().message.find("results.backend: file"), std::string::npos);
}

TEST_F(ResultsRedis, EveryChunkExpiresAfterTheRetention) {
  store_ = open(5'000);
  stored(std::string(results::kChunkBytes + 1, 'x'));
  for (const auto& key : redis({"KEYS", "df:{0}:blob:*"}).elements) {
    const auto left = redis({"PTTL", key.text}).integer;
    EXPECT_GT(left, 5'000);
    EXPECT_LE(left, 5'000 + results::kExtraRetentionMs);
  }
}

TEST_F(ResultsRedis, GoesWithItsJobsRecord) {
  options_.retention_ms = 1;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  store_ = open(options_.retention_ms);
  const std::string others = stored("of another job").key;
  const auto first = running(2);
  const auto second = assign(first.ref.job, 1);
  ASSERT_TRUE(start(second).ok());
  for (const auto& [attempt, size] : {std::pair(first, 2 * results::kChunkBytes + 5), {second, std::size_t{10}}}) {
    result_ = {attempt.ref.job, attempt.ref.unit, attempt.nonce};
    ASSERT_TRUE(complete(attempt, stored(std::string(size, 'x')).to_json()).ok());
  }
  // Its manifest names what is not its own.
  const auto forged = running();
  ASSERT_TRUE(complete(forged, R"({"backend":"redis","bytes":5000000,"key":")" + others + "\"}").ok());
  EXPECT_EQ(redis({"KEYS", "df:{0}:blob:*"}).elements.size(), 5u);
  const auto until = Deadline::after(std::chrono::seconds(10));
  while (redis({"ZCARD", keys_.jobs()}).integer > 0 && !until.passed()) reap();
  ASSERT_EQ(redis({"ZCARD", keys_.jobs()}).integer, 0);
  const auto left = redis({"KEYS", "df:{0}:blob:*"});
  ASSERT_EQ(left.elements.size(), 1u);
  EXPECT_EQ(left.elements[0].text, others);
}

TEST_F(ResultsRedis, TellsDamageFromLoss) {
  const Manifest manifest = stored(std::string(results::kChunkBytes + 10, 'x'));
  redis({"SETRANGE", manifest.key + ":1", "3", "y"});
  EXPECT_EQ(wait(store_->get(manifest, soon())).error().code, Code::kDataCorrupt);
  redis({"SET", manifest.key + ":1", "short"});
  EXPECT_EQ(wait(store_->get(manifest, soon())).error().code, Code::kDataCorrupt);
  redis({"DEL", manifest.key + ":1"});
  EXPECT_EQ(wait(store_->get(manifest, soon())).error().code, Code::kNotFound);
  redis({"DEL", manifest.key});
  redis({"LPUSH", manifest.key, "a list"});
  EXPECT_FALSE(wait(store_->get(manifest, soon())).ok());
}

TEST_F(ResultsRedis, ReadsAndRemovesNothingButItsOwnKeys) {
  redis({"SET", "df:{0}:secret", "s"});
  Manifest manifest = stored("s");
  manifest.key = "df:{0}:secret";
  EXPECT_FALSE(wait(store_->get(manifest, soon())).ok());
  EXPECT_FALSE(wait(store_->remove(manifest, soon())).ok());
  EXPECT_FALSE(wait(store_->get_preview("df:{0}:secret", soon())).ok());
  EXPECT_EQ(redis({"GET", "df:{0}:secret"}).text, "s");
  EXPECT_EQ(wait(store_->put({"a b", 0, "n"}, "x", "image/png", soon())).error().code, Code::kInvalidArgument);
}

TEST_F(ResultsRedis, PreviewsOfAnySize) {
  for (const std::size_t size : {std::size_t{7}, results::kChunkBytes, 2 * results::kChunkBytes + 1}) {
    const std::string bytes(size, 'p');
    const auto key = wait(store_->put_preview(result_, static_cast<int>(size % 3), bytes, soon()));
    ASSERT_TRUE(key.ok());
    EXPECT_EQ(*wait(store_->get_preview(*key, soon())), bytes);
    EXPECT_GT(redis({"PTTL", *key}).integer, 0);
  }
  EXPECT_EQ(wait(store_->get_preview("df:{0}:preview:none:0:n:0", soon())).error().code, Code::kNotFound);
}

TEST_F(ResultsRedis, ARedisThatIsAwayIsToldAsThat) {
  const Manifest manifest = stored("x");
  server_.kill();
  const auto put = wait(store_->put(result_, "y", "image/png", Deadline::after(std::chrono::milliseconds(300))));
  ASSERT_FALSE(put.ok());
  EXPECT_TRUE(is_retryable(put.error().code)) << put.error().message;
  server_.restart();
  // The connection may notice only now that the old server is gone: that, too, is told as a Redis that is away.
  auto read = wait(store_->get(manifest, soon()));
  if (!read && read.error().code == Code::kUnavailable) read = wait(store_->get(manifest, soon()));
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(*read, "x");
}

}  // namespace
}  // namespace ditfleet::testing
