// The registry of LoRA adapters in Redis. It maps each tenant's names to digests, and digests to locations of files.
//
// Changes are atomic, and every change also changes `version()`. If several writers change one name at once, the last
// one to finish wins, with its whole record and file.
//
// Threads: all calls from the connection's executor; nothing blocks it. If it transfers files, use a connection of its
// own, because chunks of 1 MiB delay other commands.
// Errors of every call: kUnavailable (Redis is unavailable; changes are safe to repeat), kDeadlineExceeded,
// kResourceExhausted (Redis is over its memory limit), and those listed below.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/loras/adapter.h"

namespace ditfleet::redis {
class Connection;
}

namespace ditfleet::loras {

namespace asio = boost::asio;

inline constexpr std::size_t kChunkBytes = 1u << 20;

// Where to read the file with a digest: from paths, from Redis, or both. The reader must verify the digest.
struct Location {
  std::string sha256;
  std::int64_t bytes = 0;
  std::vector<std::string> paths;  // registered for the digest, without duplicates
  bool one_place = false;          // all records name the same path, so an error may mention it to any of their tenants
  std::string upload;              // if not empty, Redis stores the file in `chunks` chunks of kChunkBytes
  int chunks = 0;
  bool pinned = false;  // any record with this digest is pinned
};

// The changes since a version.
struct Changes {
  std::int64_t version = 0;
  std::map<std::string, std::optional<Adapter>> records;  // by "<tenant>/<name>", as they are now; empty: removed
};

struct RegistryOptions {
  // How long a file stays after its last name was given to another file, for jobs that were admitted before. (A file
  // whose name was removed is deleted at once.)
  std::int64_t keep_replaced_ms = 600'000;
  std::int64_t upload_ms = 3'600'000;  // after this the chunks of an unfinished upload expire
};

// A precondition of a change: HTTP's If-None-Match: * and If-Match.
struct Condition {
  enum Kind { kAny, kAbsent, kPresent };
  Condition(Kind kind = kAny, const Adapter* is = nullptr) : kind(kind), is(is) {}

  Kind kind;
  const Adapter* is;  // for kPresent: the required record, which outlives the call; null: any
  // kConflict if the condition does not hold for a name with this record (null: none).
  Result<void> check(const std::string& name, const Adapter* record) const;
};

class Registry {
 public:
  explicit Registry(std::shared_ptr<redis::Connection> connection, RegistryOptions options = {});

  // --- by name -----------------------------------------------------------------------------------
  asio::awaitable<Result<std::optional<Adapter>>> find(const std::string& tenant, const std::string& name,
                                                       Deadline deadline);
  // All tenants' records by "<tenant>/<name>". Logs and skips unreadable records.
  asio::awaitable<Result<std::map<std::string, Adapter>>> all(Deadline deadline);
  // Registers or replaces an adapter; returns whether the name is new. `upload` is Upload::id(), or empty for a file.
  // Deletes the upload's chunks if Redis already has the complete file.
  // kConflict: the condition does not hold. kNotFound: the upload has expired.
  asio::awaitable<Result<bool>> put(const Adapter& adapter, const std::string& upload, Condition condition,
                                    Deadline deadline);
  // Returns the new record. kNotFound: no such name. kConflict: the condition does not hold.
  asio::awaitable<Result<Adapter>> set_pinned(const std::string& tenant, const std::string& name, bool pinned,
                                              Deadline deadline, Condition condition = {});
  // Removes the name, and the file unless another record has it. Returns the removed record.
  // kNotFound: no such name. kConflict: the condition does not hold.
  asio::awaitable<Result<Adapter>> remove(const std::string& tenant, const std::string& name, Deadline deadline,
                                          Condition condition = {});
  // 0 if the registry was never changed.
  asio::awaitable<Result<std::int64_t>> version(Deadline deadline);
  // Empty if more than 1,000 names have changed since or the registry is a new one: read all() instead.
  asio::awaitable<Result<std::optional<Changes>>> changes_since(std::int64_t version, Deadline deadline);

  // --- by digest ---------------------------------------------------------------------------------
  // kNotFound: no record has this digest. kInvalidArgument: not a digest.
  asio::awaitable<Result<Location>> lookup(const std::string& sha256, Deadline deadline);
  // Chunk 0 … location.chunks - 1 of an upload. kNotFound: deleted meanwhile. kDataCorrupt: wrong size.
  asio::awaitable<Result<std::string>> read_chunk(const Location& location, int index, Deadline deadline);

  // --- maintenance -------------------------------------------------------------------------------
  // Deletes files that are due, as every change also does. Returns how many.
  asio::awaitable<Result<int>> sweep(Deadline deadline);

  const std::shared_ptr<redis::Connection>& connection() const { return connection_; }
  const RegistryOptions& options() const { return options_; }

 private:
  struct Registered {
    std::string text;  // as stored; a change compares it to detect concurrent writers
    Adapter adapter;
  };
  struct Stored {
    std::string upload;  // empty: Redis does not store the file
    int chunks = 0;
  };
  asio::awaitable<Result<Stored>> stored(const std::string& sha256, Deadline deadline);
  asio::awaitable<Result<std::optional<std::string>>> record(const std::string& field, Deadline deadline);
  asio::awaitable<Result<Registered>> registered(const std::string& field, const std::string& name,
                                                 Deadline deadline);  // kNotFound: none

  std::shared_ptr<redis::Connection> connection_;
  RegistryOptions options_;
};

}  // namespace ditfleet::loras
