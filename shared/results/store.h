// Stores finished images, previews and the images that clients send. A worker first stores an image under the nonce of
// its attempt. It then passes the image's manifest to queue::Client::complete, which makes the image the unit's result.
// With any backend, the manifest is in the job's record in Redis.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/s3/options.h"

namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::config {
struct Settings;
}

namespace ditfleet::results {

namespace asio = boost::asio;

// Identifies the result of an attempt. Two attempts never share a result.
struct ResultKey {
  std::string job;
  int unit = 0;
  std::string nonce;  // of the attempt
  std::string tenant;
};

// Describes a stored result. The JSON form has the same field names.
struct Manifest {
  std::string backend;  // "redis", "file" or "s3"
  std::string key;      // Redis key, path relative to the store's folder, or the key in the bucket
  std::string media_type;
  std::int64_t bytes = 0;
  std::string sha256;  // of the bytes, hexadecimal
  int width = 0, height = 0;
  std::int64_t seed = 0;
  std::string nonce;      // of the attempt that stored the result
  int skipped_steps = 0;  // that ran only their first block; the JSON form has it only above 0
  // The JSON form has these only above 0.
  std::int64_t gpu_us = 0;         // that GPUs, or the CPU, took for it
  std::int64_t first_step_us = 0;  // of denoising
  std::int64_t compiled = 0;       // programs that the worker compiled meanwhile, for any unit
  std::string receipt;             // what made it (worker/units/receipt.h), as JSON; empty: not recorded

  std::string to_json() const;
  static Result<Manifest> parse(std::string_view json_text);
};

// Not thread-safe: call every function on the connection's executor. The calls do not block.
class Store {
 public:
  virtual ~Store() = default;
  // Stores an image. Sets the manifest's backend, key, media_type, bytes, sha256 and nonce. kInvalidArgument: the job
  // or the nonce is not a valid id. kPayloadTooLarge: larger than StoreOptions::redis_max_bytes.
  virtual asio::awaitable<Result<Manifest>> put(const ResultKey& result, std::string bytes, std::string media_type,
                                                Deadline deadline) = 0;
  // Reads an image and verifies its size and SHA-256. kNotFound: expired or removed. kDataCorrupt: verification failed.
  virtual asio::awaitable<Result<std::string>> get(const Manifest& manifest, Deadline deadline) = 0;
  // Reads a part of an image, without verifying it: `size` bytes from `offset` on, fewer at its end. kNotFound: expired
  // or removed. kDataCorrupt: the image is too short.
  virtual asio::awaitable<Result<std::string>> get_piece(const Manifest& manifest, std::int64_t offset,
                                                         std::int64_t size, Deadline deadline) = 0;
  // A URL from which everybody who has it may fetch the image for `life_s` seconds; empty: the backend has none.
  virtual std::string link(const Manifest&, std::int64_t /*life_s*/) const { return {}; }
  // "https://host", from where all links are; empty: there are none.
  virtual std::string link_origin() const { return {}; }
  // Extends the life of an image, as if it had been stored now. Succeeds if the image does not exist.
  virtual asio::awaitable<Result<void>> touch(const Manifest&, Deadline) { co_return Result<void>(); }
  // Removes the image of an outdated attempt. Succeeds if the image does not exist.
  virtual asio::awaitable<Result<void>> remove(const Manifest& manifest, Deadline deadline) = 0;
  // Stores a preview, which expires after StoreOptions::preview_ms. Returns the key for the `preview` event.
  virtual asio::awaitable<Result<std::string>> put_preview(const ResultKey& result, int index, std::string bytes,
                                                           Deadline deadline) = 0;
  virtual asio::awaitable<Result<std::string>> get_preview(const std::string& key, Deadline deadline) = 0;
  // Inputs are images that clients send. They are identified by the SHA-256 of their bytes, in 64 lower-case
  // hexadecimal digits, and expire StoreOptions::input_ms after the last put_input() or touch_input(). The queue
  // decides who may use them and removes them earlier (queue::Client::keep_input). Precondition: `sha256` is that of
  // `bytes`.
  virtual asio::awaitable<Result<void>> put_input(const std::string& sha256, std::string bytes, Deadline deadline) = 0;
  // Extends the life of an input. kNotFound: the store does not have it.
  virtual asio::awaitable<Result<void>> touch_input(const std::string& sha256, Deadline deadline) = 0;
  // Reads an input and verifies it. kNotFound: expired, or not a SHA-256. kDataCorrupt: damaged.
  virtual asio::awaitable<Result<std::string>> get_input(const std::string& sha256, Deadline deadline) = 0;
  // Succeeds if the store does not have it.
  virtual asio::awaitable<Result<void>> remove_input(const std::string& sha256, Deadline deadline) = 0;
  // Removes what has expired, as far as the backend does not do so by itself. A coordinator calls it every second.
  virtual asio::awaitable<void> maintain(Deadline) { co_return; }
};

// Results are kept this much longer than the retention, unless the queue forgets their job first. The retention of a
// job's record starts at the end of its last unit, that of a result when the result is stored.
inline constexpr std::int64_t kExtraRetentionMs = 600'000;

struct StoreOptions {
  std::string backend = "redis";  // redis | file | s3
  std::string dir;                // folder of the file backend, shared by all hosts
  int shard = 0;
  std::int64_t retention_ms = 3'600'000;
  std::int64_t preview_ms = 600'000;
  std::int64_t input_ms = 86'400'000;
  std::int64_t redis_max_bytes = 32 << 20;  // of one result in the Redis backend
  s3::Options s3 = {};
  std::string bucket, prefix;  // of the s3 backend
  bool delete_expired = true;  // results in the bucket
};

// The options of section `results`, and the retention of section `queue`.
StoreOptions store_options(const config::Settings& settings);

Result<std::shared_ptr<Store>> open_store(const StoreOptions& options, std::shared_ptr<redis::Connection> connection);

}  // namespace ditfleet::results
