// Where finished pictures and previews live. Bytes are written under the attempt's nonce first; the
// manifest that names them is what makes them the outcome, created if absent by queue::Client::complete
// (Redis backend and file backend alike: a manifest is small, so it lives with the unit in Redis).
#pragma once

#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/queue/types.h"

namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::results {

namespace asio = boost::asio;

// What a manifest says (JSON: backend, key, media_type, bytes, sha256, width, height, seed, nonce).
struct Manifest {
  std::string backend;  // "redis" or "file"
  std::string key;      // Redis key, or path relative to the store's folder
  std::string media_type;
  std::int64_t bytes = 0;
  std::string sha256;  // of the bytes, hexadecimal
  int width = 0, height = 0;
  std::int64_t seed = 0;
  std::string nonce;  // of the attempt that made it

  std::string to_json() const;
  static Result<Manifest> parse(std::string_view json_text);
};

// Threads: from the connection's executor. The file backend does its disk work on a thread of its own.
class Store {
 public:
  virtual ~Store() = default;
  // Stores under (job, unit, nonce); nothing points to it yet. Fills backend, key, bytes, sha256, nonce.
  virtual asio::awaitable<Result<Manifest>> put(const queue::Attempt& attempt, std::string bytes,
                                                std::string media_type, Deadline deadline) = 0;
  // Reads and verifies size and SHA-256. kNotFound: expired or removed; kDataCorrupt: not what was stored.
  virtual asio::awaitable<Result<std::string>> get(const Manifest& manifest, Deadline deadline) = 0;
  // Removes what an attempt that lost has stored. Not an error if absent.
  virtual asio::awaitable<Result<void>> remove(const Manifest& manifest, Deadline deadline) = 0;
  // A preview (small, overwritten never, expires soon); returns the key that an event carries.
  virtual asio::awaitable<Result<std::string>> put_preview(const queue::Attempt& attempt, int index, std::string bytes,
                                                           Deadline deadline) = 0;
  virtual asio::awaitable<Result<std::string>> get_preview(const std::string& key, Deadline deadline) = 0;
};

struct StoreOptions {
  std::string backend = "redis";  // redis | file
  std::string dir;                // file: shared by all hosts
  int shard = 0;
  std::int64_t retention_ms = 3'600'000;
  std::int64_t preview_ms = 600'000;
};

Result<std::shared_ptr<Store>> open_store(const StoreOptions& options, std::shared_ptr<redis::Connection> connection);

}  // namespace ditfleet::results
