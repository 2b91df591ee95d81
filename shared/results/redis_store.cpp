#include "shared/results/redis_store.h"

#include <algorithm>
#include <optional>

#include "shared/core/sha256.h"
#include "shared/redis/connection.h"
#include "shared/results/verification.h"

namespace ditfleet::results {
namespace {

std::string chunk_key(const std::string& key, std::size_t index) {
  return index == 0 ? key : key + ":" + std::to_string(index);
}

std::size_t chunk_count(std::int64_t bytes) {
  return std::max<std::size_t>(1, (static_cast<std::size_t>(bytes) + kChunkBytes - 1) / kChunkBytes);
}

std::string key_part(const ResultKey& result) {
  return result.job + ":" + std::to_string(result.unit) + ":" + result.nonce;
}

Error gone(const std::string& what) { return not_found(what + " does not exist; it has expired or was removed"); }

}  // namespace

RedisStore::RedisStore(const StoreOptions& options, std::shared_ptr<redis::Connection> connection)
    : blob_prefix_("df:{" + std::to_string(options.shard) + "}:blob:"),
      preview_prefix_("df:{" + std::to_string(options.shard) + "}:preview:"),
      input_prefix_("df:{" + std::to_string(options.shard) + "}:input:"),
      retention_ms_(options.retention_ms),
      preview_ms_(options.preview_ms),
      input_ms_(options.input_ms),
      max_bytes_(options.redis_max_bytes),
      connection_(std::move(connection)) {}

asio::awaitable<Result<void>> RedisStore::write(std::string key, std::string_view bytes, std::int64_t expiry_ms,
                                                Deadline deadline) {
  const std::size_t chunks = chunk_count(static_cast<std::int64_t>(bytes.size()));
  // Chunk 0 is written last: a reader that finds it finds all of them.
  for (std::size_t i = chunks; i-- > 0;) {
    redis::Command command("SET");
    command << chunk_key(key, i) << bytes.substr(i * kChunkBytes, kChunkBytes) << "PX" << expiry_ms;
    auto reply = co_await connection_->execute(std::move(command), deadline);
    if (!reply) co_return reply.error();
  }
  co_return Result<void>();
}

asio::awaitable<Result<std::optional<std::string>>> RedisStore::read_chunk(const std::string& key, std::size_t index,
                                                                           Deadline deadline) {
  auto reply = co_await connection_->execute(redis::Command("GET") << chunk_key(key, index), deadline);
  if (!reply) co_return reply.error();
  if (reply->is_nil()) co_return std::optional<std::string>();
  if (reply->type != redis::Reply::Type::kString) {
    co_return data_corrupt("the key '" + key + "' is not a string");
  }
  co_return std::optional<std::string>(std::move(reply->text));
}

asio::awaitable<Result<Manifest>> RedisStore::put(const ResultKey& result, std::string bytes, std::string media_type,
                                                  Deadline deadline) {
  if (auto named = check_names(result); !named) co_return named.error();
  if (static_cast<std::int64_t>(bytes.size()) > max_bytes_) {
    co_return Error{Code::kPayloadTooLarge,
                    "the result has " + std::to_string(bytes.size()) + " bytes, but results.redis_max_bytes is " +
                        std::to_string(max_bytes_) +
                        "; store results as files (results.backend: file, with results.dir) or raise the limit",
                    {}};
  }
  Manifest manifest = describe(result, bytes, std::move(media_type));
  manifest.backend = "redis";
  manifest.key = blob_prefix_ + key_part(result);
  auto written = co_await write(manifest.key, bytes, retention_ms_ + kExtraRetentionMs, deadline);
  if (!written) co_return written.error();
  co_return manifest;
}

Result<void> RedisStore::check_own(const Manifest& manifest) const {
  if (manifest.backend == "redis" && manifest.key.starts_with(blob_prefix_)) return {};
  return data_corrupt("the result '" + manifest.key + "' of backend '" + manifest.backend +
                      "' is not in this store (redis, " + blob_prefix_ + "…)");
}

asio::awaitable<Result<std::string>> RedisStore::get(const Manifest& manifest, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  std::string bytes;
  for (std::size_t i = 0; i < chunk_count(manifest.bytes); ++i) {
    auto chunk = co_await read_chunk(manifest.key, i, deadline);
    if (!chunk) co_return chunk.error();
    if (!*chunk) co_return gone("the result '" + manifest.key + "'");
    bytes += **chunk;
  }
  if (auto good = verify(manifest, bytes); !good) co_return good.error();
  co_return bytes;
}

asio::awaitable<Result<std::string>> RedisStore::get_piece(const Manifest& manifest, std::int64_t offset,
                                                           std::int64_t size, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  const std::int64_t end = std::min(offset + size, manifest.bytes);
  constexpr auto kChunk = static_cast<std::int64_t>(kChunkBytes);
  std::string bytes;
  while (offset < end) {
    const std::int64_t stop = std::min(end, (offset / kChunk + 1) * kChunk);
    redis::Command command("GETRANGE");
    command << chunk_key(manifest.key, static_cast<std::size_t>(offset / kChunk)) << offset % kChunk
            << (stop - 1) % kChunk;
    auto reply = co_await connection_->execute(std::move(command), deadline);
    if (!reply) co_return reply.error();
    if (reply->text.empty()) co_return gone("the result '" + manifest.key + "'");
    if (static_cast<std::int64_t>(reply->text.size()) != stop - offset)
      co_return data_corrupt("the result '" + manifest.key + "' is shorter than its manifest says");
    bytes += reply->text;
    offset = stop;
  }
  co_return bytes;
}

asio::awaitable<Result<void>> RedisStore::touch(const Manifest& manifest, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  for (std::size_t i = 0; i < chunk_count(manifest.bytes); ++i) {
    redis::Command command("PEXPIRE");
    command << chunk_key(manifest.key, i) << retention_ms_ + kExtraRetentionMs;
    auto reply = co_await connection_->execute(std::move(command), deadline);
    if (!reply) co_return reply.error();
  }
  co_return Result<void>();
}

asio::awaitable<Result<void>> RedisStore::remove(const Manifest& manifest, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  redis::Command command("UNLINK");
  for (std::size_t i = 0; i < chunk_count(manifest.bytes); ++i) command << chunk_key(manifest.key, i);
  co_return without_value(co_await connection_->execute(std::move(command), deadline));
}

asio::awaitable<Result<std::string>> RedisStore::put_preview(const ResultKey& result, int index, std::string bytes,
                                                             Deadline deadline) {
  if (auto named = check_names(result); !named) co_return named.error();
  const std::string key = preview_prefix_ + key_part(result) + ":" + std::to_string(index);
  auto written = co_await write(key, bytes, preview_ms_, deadline);
  if (!written) co_return written.error();
  co_return key;
}

asio::awaitable<Result<std::string>> RedisStore::get_preview(const std::string& key, Deadline deadline) {
  if (!key.starts_with(preview_prefix_)) {
    co_return invalid_argument("'" + key + "' is not a preview's key (" + preview_prefix_ + "…)");
  }
  co_return co_await read_all(key, "the preview '" + key + "'", deadline);
}

asio::awaitable<Result<void>> RedisStore::put_input(const std::string& sha256, std::string bytes, Deadline deadline) {
  co_return co_await write(input_prefix_ + sha256, bytes, input_ms_, deadline);
}

asio::awaitable<Result<void>> RedisStore::touch_input(const std::string& sha256, Deadline deadline) {
  for (std::size_t i = 0;; ++i) {
    redis::Command command("PEXPIRE");
    command << chunk_key(input_prefix_ + sha256, i) << input_ms_;
    auto reply = co_await connection_->execute(std::move(command), deadline);
    if (!reply) co_return reply.error();
    if (reply->integer != 0) continue;
    if (i == 0) co_return input_gone(sha256);
    co_return Result<void>();
  }
}

asio::awaitable<Result<std::string>> RedisStore::get_input(const std::string& sha256, Deadline deadline) {
  if (!is_sha256_hex(sha256)) co_return input_gone(sha256);
  auto bytes = co_await read_all(input_prefix_ + sha256, "the image '" + sha256 + "'", deadline);
  if (!bytes) co_return bytes;
  if (auto good = verify_input(sha256, *bytes); !good) co_return good.error();
  co_return bytes;
}

asio::awaitable<Result<void>> RedisStore::remove_input(const std::string& sha256, Deadline deadline) {
  constexpr std::size_t kMostChunks = 256;  // of results.input_max_bytes; a put_input() may have failed halfway
  redis::Command command("UNLINK");
  for (std::size_t i = 0; i < kMostChunks; ++i) command << chunk_key(input_prefix_ + sha256, i);
  co_return without_value(co_await connection_->execute(std::move(command), deadline));
}

asio::awaitable<Result<std::string>> RedisStore::read_all(std::string key, std::string what, Deadline deadline) {
  std::string bytes;
  // The size is unknown: the first chunk that is not full is the last.
  for (std::size_t i = 0;; ++i) {
    auto chunk = co_await read_chunk(key, i, deadline);
    if (!chunk) co_return chunk.error();
    if (!*chunk) {
      if (i > 0) break;
      co_return gone(what);
    }
    bytes += **chunk;
    if ((*chunk)->size() < kChunkBytes) break;
  }
  co_return bytes;
}

}  // namespace ditfleet::results
