// Stores finished images and previews. A worker stores the bytes first, under the nonce of its attempt. The manifest
// that names them makes them the unit's outcome: queue::Client::complete stores it with the unit in Redis, whatever the
// backend of the bytes.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "shared/core/deadline.h"
#include "shared/core/result.h"

namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::results {

namespace asio = boost::asio;

// Names what one attempt at one unit stores. Two attempts never share bytes.
struct ResultKey {
  std::string job;
  int unit = 0;
  std::string nonce;  // of the attempt
};

// Where a result is and what it is (JSON: backend, key, media_type, bytes, sha256, width, height, seed, nonce).
struct Manifest {
  std::string backend;  // "redis" or "file"
  std::string key;      // Redis key, or path relative to the store's folder
  std::string media_type;
  std::int64_t bytes = 0;
  std::string sha256;  // of the bytes, hexadecimal
  int width = 0, height = 0;
  std::int64_t seed = 0;
  std::string nonce;  // of the attempt that stored it

  std::string to_json() const;
  static Result<Manifest> parse(std::string_view json_text);
};

// Threads: from the connection's executor. The file backend uses the disk on a thread of its own.
class Store {
 public:
  virtual ~Store() = default;
  // Fills in the manifest's backend, key, media_type, bytes, sha256 and nonce. kInvalidArgument: the job or the nonce
  // is no valid id.
  virtual asio::awaitable<Result<Manifest>> put(const ResultKey& result, std::string bytes, std::string media_type,
                                                Deadline deadline) = 0;
  // Verifies size and SHA-256. kNotFound: expired or removed. kDataCorrupt: other bytes than were stored.
  virtual asio::awaitable<Result<std::string>> get(const Manifest& manifest, Deadline deadline) = 0;
  // Removes the bytes of an attempt that lost. Ok also if they are gone.
  virtual asio::awaitable<Result<void>> remove(const Manifest& manifest, Deadline deadline) = 0;
  // Stores a preview, which expires after StoreOptions::preview_ms. Returns the key for the `preview` event.
  virtual asio::awaitable<Result<std::string>> put_preview(const ResultKey& result, int index, std::string bytes,
                                                           Deadline deadline) = 0;
  virtual asio::awaitable<Result<std::string>> get_preview(const std::string& key, Deadline deadline) = 0;
};

// Bytes are kept this much longer than the retention: the retention of a job's record counts from the end of its last
// unit, that of bytes from their own storing.
inline constexpr std::int64_t kExtraRetentionMs = 600'000;

struct StoreOptions {
  std::string backend = "redis";  // redis | file
  std::string dir;                // of the file backend; shared by all hosts
  int shard = 0;
  std::int64_t retention_ms = 3'600'000;
  std::int64_t preview_ms = 600'000;
};

Result<std::shared_ptr<Store>> open_store(const StoreOptions& options, std::shared_ptr<redis::Connection> connection);

}  // namespace ditfleet::results
