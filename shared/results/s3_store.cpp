#include "shared/results/s3_store.h"

#include <fmt/chrono.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>

#include "shared/core/excerpt.h"
#include "shared/core/log_throttle.h"
#include "shared/core/named_thread.h"
#include "shared/core/sha256.h"
#include "shared/core/wall_clock.h"
#include "shared/results/redis_store.h"
#include "shared/results/verification.h"
#include "shared/s3/client.h"

namespace ditfleet::results {
namespace {

constexpr std::int64_t kMaxInputBytes = 256 << 20;
constexpr int kPage = 250;  // objects that one call of maintain() looks at

bool consists_of(std::string_view text, std::string_view more) {
  return std::ranges::all_of(text, [&](unsigned char c) {
    return (c < 0x80 && std::isalnum(c)) || more.find(static_cast<char>(c)) != more.npos;
  });
}

}  // namespace

struct S3Store::Impl {
  Impl(const StoreOptions& options, std::shared_ptr<redis::Connection> connection)
      : client(options.s3), previews(options, std::move(connection)), bucket(options.bucket) {}

  std::string input_key(const std::string& sha256) const { return prefix + "inputs/" + sha256; }

  Result<void> check_own(const Manifest& manifest) const {
    if (manifest.backend == "s3" && manifest.key.starts_with(prefix + "results/")) return {};
    return data_corrupt("the result '" + manifest.key + "' of backend '" + manifest.backend +
                        "' is not in this store (s3, " + prefix + "results/…)");
  }

  // `read` if check() finds nothing wrong with it.
  asio::awaitable<Result<std::string>> checked(Result<std::string> read,
                                               std::function<Result<void>(const std::string&)> check,
                                               Deadline deadline) {
    if (!read) co_return read;
    const auto shared = std::make_shared<std::string>(std::move(*read));
    const std::function<Result<std::string>()> work = [shared, check]() -> Result<std::string> {
      if (auto good = check(*shared); !good) return good.error();
      return std::move(*shared);
    };
    co_return co_await hash.run<std::string>(work, deadline);
  }

  s3::Client client;
  RedisStore previews;
  std::string bucket, prefix;  // prefix: empty, or with a slash at its end
  // What maintain() looks at: keys with these beginnings, and how long they live.
  struct Kind {
    std::string prefix;
    std::int64_t life_ms;
  };
  std::vector<Kind> kinds;
  std::size_t kind = 0;
  std::string next;  // page of the kind
  std::int64_t due_ms = 0;
  int removed = 0;
  LogThrottle unswept_log;
  NamedThread hash{"results-hash"};
};

Result<std::shared_ptr<Store>> S3Store::open(const StoreOptions& options,
                                             std::shared_ptr<redis::Connection> connection) {
  if (options.bucket.empty())
    return invalid_argument("results.backend is 's3', which needs results.s3.bucket: the bucket's name",
                            "results.s3.bucket");
  if (options.bucket.size() < 3 || options.bucket.size() > 63 || !consists_of(options.bucket, ".-_"))
    return invalid_argument("results.s3.bucket is '" + excerpt(options.bucket, 64) +
                                "'; a bucket's name has 3 to 63 letters, digits, '.', '-' and '_'",
                            "results.s3.bucket");
  if (!consists_of(options.prefix, "._/-") || options.prefix.size() > 512)
    return invalid_argument("results.s3.prefix is '" + excerpt(options.prefix, 64) +
                                "'; it must be at most 512 letters, digits, '.', '_', '-' and '/'",
                            "results.s3.prefix");
  if (!connection)
    return invalid_argument("results.backend is 's3', which needs a Redis connection for previews; set redis.url");
  auto impl = std::make_unique<Impl>(options, std::move(connection));
  impl->prefix = options.prefix;
  while (impl->prefix.ends_with('/')) impl->prefix.pop_back();
  impl->prefix.erase(0, impl->prefix.find_first_not_of('/'));
  if (!impl->prefix.empty()) impl->prefix += '/';
  impl->kinds.push_back({impl->prefix + "inputs/", options.input_ms});
  if (options.delete_expired)
    impl->kinds.push_back({impl->prefix + "results/", options.retention_ms + kExtraRetentionMs});
  return std::shared_ptr<Store>(new S3Store(std::move(impl)));
}

S3Store::S3Store(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
S3Store::~S3Store() = default;

asio::awaitable<Result<Manifest>> S3Store::put(const ResultKey& result, std::string bytes, std::string media_type,
                                               Deadline deadline) {
  if (auto named = check_names(result); !named) co_return named.error();
  const std::string key = impl_->prefix + "results/" + result.tenant + "/" + result.job + "/" +
                          std::to_string(result.unit) + "." + result.nonce + "." + extension_of(media_type);
  const auto shared = std::make_shared<const std::string>(std::move(bytes));
  const std::function<Result<Manifest>()> work = [result, shared, media_type]() -> Result<Manifest> {
    return describe(result, *shared, media_type);
  };
  auto manifest = co_await impl_->hash.run<Manifest>(work, deadline);
  if (!manifest) co_return manifest;
  manifest->backend = "s3";
  manifest->key = key;
  auto stored = co_await impl_->client.put(impl_->bucket, key, shared, manifest->sha256, media_type, false, deadline);
  if (!stored) co_return stored.error();
  co_return manifest;
}

asio::awaitable<Result<std::string>> S3Store::get_piece(const Manifest& manifest, std::int64_t offset,
                                                        std::int64_t size, Deadline deadline) {
  if (auto own = impl_->check_own(manifest); !own) co_return own.error();
  size = std::max<std::int64_t>(0, std::min(size, manifest.bytes - offset));
  auto bytes = co_await impl_->client.get(impl_->bucket, manifest.key, offset, size, deadline);
  if (!bytes && bytes.error().code == Code::kNotFound)
    co_return not_found("the result does not exist in the bucket; it has expired or was removed");
  if (bytes && static_cast<std::int64_t>(bytes->size()) != size)
    co_return data_corrupt("the result '" + manifest.key + "' is shorter than its manifest says");
  co_return bytes;
}

asio::awaitable<Result<std::string>> S3Store::get(const Manifest& manifest, Deadline deadline) {
  auto bytes = co_await get_piece(manifest, 0, manifest.bytes, deadline);
  const std::function<Result<void>(const std::string&)> check = [manifest](const std::string& all) {
    return verify(manifest, all);
  };
  co_return co_await impl_->checked(std::move(bytes), check, deadline);
}

std::string S3Store::link(const Manifest& manifest, std::int64_t life_s) const {
  return impl_->check_own(manifest) ? impl_->client.link(impl_->bucket, manifest.key, life_s) : std::string();
}

std::string S3Store::link_origin() const { return impl_->client.origin(impl_->bucket); }

asio::awaitable<Result<void>> S3Store::touch(const Manifest& manifest, Deadline deadline) {
  if (auto own = impl_->check_own(manifest); !own) co_return own.error();
  auto touched = co_await impl_->client.touch(impl_->bucket, manifest.key, deadline);
  if (!touched && touched.error().code == Code::kNotFound) co_return Result<void>();
  co_return touched;
}

asio::awaitable<Result<void>> S3Store::remove(const Manifest& manifest, Deadline deadline) {
  if (auto own = impl_->check_own(manifest); !own) co_return own.error();
  co_return co_await impl_->client.remove(impl_->bucket, manifest.key, deadline);
}

asio::awaitable<Result<std::string>> S3Store::put_preview(const ResultKey& result, int index, std::string bytes,
                                                          Deadline deadline) {
  return impl_->previews.put_preview(result, index, std::move(bytes), deadline);
}

asio::awaitable<Result<std::string>> S3Store::get_preview(const std::string& key, Deadline deadline) {
  return impl_->previews.get_preview(key, deadline);
}

asio::awaitable<Result<void>> S3Store::put_input(const std::string& sha256, std::string bytes, Deadline deadline) {
  const std::string key = impl_->input_key(sha256);
  auto shared = std::make_shared<const std::string>(std::move(bytes));
  co_return co_await impl_->client.put(impl_->bucket, key, shared, sha256, "application/octet-stream", true, deadline);
}

asio::awaitable<Result<void>> S3Store::touch_input(const std::string& sha256, Deadline deadline) {
  if (!is_sha256_hex(sha256)) co_return input_gone(sha256);
  auto touched = co_await impl_->client.touch(impl_->bucket, impl_->input_key(sha256), deadline);
  if (!touched && touched.error().code == Code::kNotFound) co_return input_gone(sha256);
  co_return touched;
}

asio::awaitable<Result<std::string>> S3Store::get_input(const std::string& sha256, Deadline deadline) {
  if (!is_sha256_hex(sha256)) co_return input_gone(sha256);
  auto bytes = co_await impl_->client.get(impl_->bucket, impl_->input_key(sha256), 0, kMaxInputBytes, deadline);
  if (!bytes && bytes.error().code == Code::kNotFound) co_return input_gone(sha256);
  const std::function<Result<void>(const std::string&)> check = [sha256](const std::string& all) {
    return verify_input(sha256, all);
  };
  co_return co_await impl_->checked(std::move(bytes), check, deadline);
}

asio::awaitable<Result<void>> S3Store::remove_input(const std::string& sha256, Deadline deadline) {
  return impl_->client.remove(impl_->bucket, impl_->input_key(sha256), deadline);
}

asio::awaitable<void> S3Store::maintain(Deadline deadline) {
  Impl& my = *impl_;
  co_await my.client.keep_credentials();
  if (unix_ms() < my.due_ms) co_return;
  const auto& [prefix, life_ms] = my.kinds[my.kind];
  auto page = co_await my.client.list(my.bucket, prefix, my.next, kPage, deadline);
  // Times of this form have the order of their texts.
  const std::time_t oldest_s = page ? page->now_s - life_ms / 1000 : 0;
  const std::string oldest = fmt::format("{:%Y-%m-%dT%H:%M:%S}", fmt::gmtime(oldest_s));
  Result<void> swept = page ? Result<void>() : Result<void>(page.error());
  for (std::size_t i = 0; swept && i < page->objects.size(); ++i) {
    if (page->objects[i].modified >= oldest) continue;
    swept = co_await my.client.remove(my.bucket, page->objects[i].key, deadline);
    if (swept) ++my.removed;
  }
  if (!swept) {
    my.due_ms = unix_ms() + 10'000;
    if (const auto more = my.unswept_log.admit())
      spdlog::warn("not removing expired results: {}{}", swept.error().message, *more);
    co_return;
  }
  my.next = page->next;
  if (!my.next.empty()) co_return;
  my.kind = (my.kind + 1) % my.kinds.size();
  if (my.kind != 0) co_return;
  if (my.removed > 0) spdlog::info("removed {} expired objects from the bucket '{}'", my.removed, my.bucket);
  my.removed = 0;
  std::int64_t shortest = my.kinds[0].life_ms;
  for (const auto& kind : my.kinds) shortest = std::min(shortest, kind.life_ms);
  my.due_ms = unix_ms() + std::clamp<std::int64_t>(shortest / 4, 1000, 600'000);
}

}  // namespace ditfleet::results
