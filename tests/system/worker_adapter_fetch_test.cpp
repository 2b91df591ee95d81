// Fetching an adapter's bytes from a source that fails now and then.
#include <gmock/gmock.h>

#include <filesystem>
#include <functional>
#include <utility>

#include "shared/core/sha256.h"
#include "tests/system/temporary_folder.h"
#include "tests/system/worker_fixture.h"
#include "worker/adapters/fetcher.h"

namespace ditfleet::testing {
namespace {

namespace fs = std::filesystem;

// A registry of one adapter that fails as often as it is told to.
class FlakySource final : public worker::AdapterSource {
 public:
  explicit FlakySource(std::string bytes) : bytes_(std::move(bytes)) {}
  asio::awaitable<Result<loras::Location>> lookup(const std::string& sha256, Deadline) override {
    ++lookups;
    if (deleted) co_return Error{Code::kNotFound, "no such digest", {}};
    if (failing_lookups-- > 0) co_return unavailable("Redis is away");
    loras::Location location;
    location.sha256 = sha256;
    location.bytes = static_cast<std::int64_t>(bytes_.size());
    location.upload = upload;
    location.chunks = static_cast<int>((bytes_.size() + loras::kChunkBytes - 1) / loras::kChunkBytes);
    co_return location;
  }
  asio::awaitable<Result<std::string>> read_chunk(const loras::Location&, int index, Deadline) override {
    ++reads;
    if (const auto call = std::exchange(on_read, nullptr)) call();
    if (failing_reads-- > 0) co_return Error{failure, "Redis is away", {}};
    co_return bytes_.substr(static_cast<std::size_t>(index) * loras::kChunkBytes, loras::kChunkBytes);
  }
  asio::awaitable<Result<std::int64_t>> version(Deadline) override { co_return std::int64_t{1}; }

  int lookups = 0, reads = 0, failing_lookups = 0, failing_reads = 0;
  Code failure = Code::kUnavailable;
  std::string upload = "u";
  bool deleted = false;
  std::function<void()> on_read;  // once

 private:
  std::string bytes_;
};

class AdapterFetch : public QueueTest {
 protected:
  Result<worker::FetchedAdapter> fetch(bool wanted = true) {
    return wait(fetcher_.fetch(sha256_, "style", [wanted] { return wanted; }));
  }

  const std::string bytes_ = std::string(2 * loras::kChunkBytes + 5, 'x'), sha256_ = sha256_hex(bytes_);
  TemporaryFolder folder_;
  FlakySource source_{bytes_};
  worker::AdapterCopies copies_{folder_.path(), 64 << 20};
  worker::AdapterFetcher fetcher_{io_.get_executor(), &source_, copies_, {}};
};

TEST_F(AdapterFetch, GoesOnWhereItWasWhenRedisComesBack) {
  source_.failing_lookups = 1;
  source_.failing_reads = 2;
  const auto fetched = fetch();
  ASSERT_TRUE(fetched.ok()) << fetched.error().message;
  EXPECT_EQ(source_.reads, 3 + 2) << "no chunk is read twice";
  EXPECT_EQ(*read_file(fetched->copy->path()), bytes_);
  EXPECT_FALSE(fetched->was_on_disk);
  EXPECT_TRUE(fetch()->was_on_disk);
  EXPECT_EQ(source_.reads, 5);
  EXPECT_EQ(source_.lookups, 3) << "asked each time whether it still is registered";
}

TEST_F(AdapterFetch, EndsWhenNobodyWantsItAnyMore) {
  source_.failing_lookups = 1000;
  EXPECT_EQ(fetch(false).error().code, Code::kCanceled);
  source_.failing_lookups = 0;
  EXPECT_EQ(fetch(false).error().code, Code::kCanceled);
  EXPECT_EQ(source_.reads, 0);
  EXPECT_TRUE(fs::is_empty(folder_.path())) << "a part is left";
  EXPECT_TRUE(fetch().ok()) << "the next one begins anew";
}

TEST_F(AdapterFetch, OneWhoseBytesAreLostIsNotCalledDeleted) {
  source_.failing_reads = 1;
  source_.failure = Code::kNotFound;
  const auto fetched = fetch();
  ASSERT_FALSE(fetched.ok());
  EXPECT_EQ(fetched.error().code, Code::kDataCorrupt);
  EXPECT_THAT(fetched.error().message,
              ::testing::HasSubstr("'style': it is registered, but Redis has lost some of its bytes"));
}

TEST_F(AdapterFetch, OneThatIsDeletedWhileItIsReadIsNotFound) {
  source_.failing_reads = 1;
  source_.failure = Code::kNotFound;
  source_.on_read = [&] { source_.deleted = true; };
  const auto fetched = fetch();
  ASSERT_FALSE(fetched.ok());
  EXPECT_EQ(fetched.error().code, Code::kNotFound);
  EXPECT_EQ(fetched.error().param, "loras");
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

// It waits for the fetch of one that was admitted before, which fails for that one alone.
TEST_F(AdapterFetch, OneThatIsUploadedAgainWhileItIsReadIsThereForWhoCameSince) {
  std::optional<Result<worker::FetchedAdapter>> second;
  source_.failing_reads = 1;
  source_.failure = Code::kNotFound;
  source_.on_read = [&] {
    source_.upload = "again";
    asio::co_spawn(
        io_, [&]() -> asio::awaitable<void> { second = co_await fetcher_.fetch(sha256_, "anew", [] { return true; }); },
        asio::detached);
  };
  const auto first = fetch();
  ASSERT_FALSE(first.ok());
  EXPECT_THAT(first.error().message, ::testing::HasSubstr("'style': it was deleted"));
  io_.restart();
  while (!second && io_.run_one() > 0) {
  }
  ASSERT_TRUE(second && second->ok());
  EXPECT_EQ(*read_file((*second)->copy->path()), bytes_);
}

}  // namespace
}  // namespace ditfleet::testing
