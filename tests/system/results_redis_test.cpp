// The Redis backend of the result store.
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
