// The registry of LoRA adapters in Redis. It maps each tenant's names to digests, and digests to locations of files.
//
// Changes are atomic, and every change increments `version()`. If several clients change a name concurrently, the last
// change replaces the whole record and the file.
//
// Not thread-safe: call every function on the connection's executor. The calls do not block. Use a separate connection
// for transferring files, because chunks of 1 MiB delay other commands.
// Every call can return kUnavailable (changes are safe to repeat), kDeadlineExceeded and kResourceExhausted (Redis is
// over its memory limit).
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

// The locations of the file with a digest: paths, Redis, or both. The reader must verify the digest.
struct Location {
  std::string sha256;
  std::int64_t bytes = 0;
  std::vector<std::string> paths;  // paths in the digest's records, without duplicates
  bool one_place = false;          // all records have the same path, so error messages may contain it
  std::string upload;              // if not empty, Redis stores the file as `chunks` chunks of kChunkBytes
  int chunks = 0;
  bool pinned = false;  // any record with this digest is pinned
};

// The changes since a version.
struct Changes {
  std::int64_t version = 0;
  std::map<std::string, std::optional<Adapter>> records;  // current records by "<tenant>/<name>"; empty: removed
};

inline constexpr std::int64_t kUploadMs = 3'600'000;  // when the chunks of an unfinished upload expire

// A precondition of a change, such as HTTP's If-None-Match: * (kAbsent) and If-Match (kPresent).
struct Condition {
  enum Kind { kAny, kAbsent, kPresent };
  Condition(Kind kind = kAny, const Adapter* is = nullptr) : kind(kind), is(is) {}

  Kind kind;
  const Adapter* is;  // for kPresent: the required record, which must outlive the call; null: any record
  // kConflict: the condition does not hold for `record`, the name's current record (null: none).
  Result<void> check(const std::string& name, const Adapter* record) const;
};

class Registry {
 public:
  explicit Registry(std::shared_ptr<redis::Connection> connection);

  // --- by name -----------------------------------------------------------------------------------
  asio::awaitable<Result<std::optional<Adapter>>> find(const std::string& tenant, const std::string& name,
                                                       Deadline deadline);
  // Returns the records of all tenants by "<tenant>/<name>". Logs and skips invalid records.
  asio::awaitable<Result<std::map<std::string, Adapter>>> all(Deadline deadline);
  // Registers or replaces an adapter. Returns whether the name is new. `upload` is Upload::id(), or empty for a file
  // with a path. Deletes the upload's chunks if Redis already has the complete file. kConflict: the condition does not
  // hold. kNotFound: the upload has expired.
  asio::awaitable<Result<bool>> put(const Adapter& adapter, const std::string& upload, Condition condition,
                                    Deadline deadline);
  // Returns the new record. kNotFound: no such name. kConflict: the condition does not hold.
  asio::awaitable<Result<Adapter>> set_pinned(const std::string& tenant, const std::string& name, bool pinned,
                                              Deadline deadline, Condition condition = {});
  // Removes the name, and the file unless another record has it. Returns the removed record.
  // kNotFound: no such name. kConflict: the condition does not hold.
  asio::awaitable<Result<Adapter>> remove(const std::string& tenant, const std::string& name, Deadline deadline,
                                          Condition condition = {});
  // Returns the registry's version; 0 if there was no change yet.
  asio::awaitable<Result<std::int64_t>> version(Deadline deadline);
  // Returns the changes since `version`. Empty if more than 1,000 names have changed or the registry was created again;
  // call all() instead.
  asio::awaitable<Result<std::optional<Changes>>> changes_since(std::int64_t version, Deadline deadline);

  // --- by digest ---------------------------------------------------------------------------------
  // kNotFound: no record has this digest. kInvalidArgument: not a digest.
  asio::awaitable<Result<Location>> lookup(const std::string& sha256, Deadline deadline);
  // Reads chunk `index`, below location.chunks. kNotFound: the file was deleted. kDataCorrupt: wrong size.
  asio::awaitable<Result<std::string>> read_chunk(const Location& location, int index, Deadline deadline);

  // --- maintenance -------------------------------------------------------------------------------
  // Deletes files whose time of deletion has passed, and returns their number. Every change does this, too.
  asio::awaitable<Result<int>> sweep(Deadline deadline);

  const std::shared_ptr<redis::Connection>& connection() const { return connection_; }

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
};

}  // namespace ditfleet::loras
