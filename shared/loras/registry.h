// The registry of LoRA adapters in Redis: names of tenants → digests, digests → where the bytes are.
//
// A change is one script and so happens whole or not at all; every change makes `version()` another number. Of several
// writers of one name the last to finish wins, with all of its record and bytes.
//
// Threads: all calls from the connection's executor. Nothing blocks it. Give it a connection of its own: bytes go over
// it in pieces of 1 MiB, which commands of the queue would wait for.
// Errors of every call: kUnavailable (Redis is away; changes are safe to repeat), kDeadlineExceeded,
// kResourceExhausted (Redis is over its memory limit), and what is said below.
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

// Where the bytes of a digest are. They may be in files and in Redis both; whoever reads them compares the digest.
struct Location {
  std::string sha256;
  std::int64_t bytes = 0;
  std::vector<std::string> paths;  // files said to hold them, each once
  bool one_place = false;          // all who registered them named the same path: to tell it tells nobody another's
  std::string upload;  // not empty: Redis holds them in `chunks` pieces of kChunkBytes, the last what is left
  int chunks = 0;
  bool pinned = false;  // a record that has this digest is
};

// What has changed since a version.
struct Changes {
  std::int64_t version = 0;
  std::map<std::string, std::optional<Adapter>> records;  // by "<tenant>/<name>", as they are now; nothing: gone
};

struct RegistryOptions {
  // Bytes whose last name was given to another file: jobs that were admitted before find them for this long.
  // (Bytes whose name was deleted go at once.)
  std::int64_t keep_replaced_ms = 600'000;
  std::int64_t upload_ms = 3'600'000;  // pieces of an upload that was not finished vanish after this
};

// What must be so of a name for it to be changed: HTTP's If-None-Match: * and If-Match.
struct Condition {
  enum Kind { kAny, kAbsent, kPresent };
  Condition(Kind kind = kAny, const Adapter* is = nullptr) : kind(kind), is(is) {}

  Kind kind;
  const Adapter* is;  // kPresent: the record that the name must have, alive until the call has ended; null: any
  // kConflict, for a name that has this record, or none.
  Result<void> check(const std::string& name, const Adapter* record) const;
};

class Registry {
 public:
  explicit Registry(std::shared_ptr<redis::Connection> connection, RegistryOptions options = {});

  // --- by name -----------------------------------------------------------------------------------
  asio::awaitable<Result<std::optional<Adapter>>> find(const std::string& tenant, const std::string& name,
                                                       Deadline deadline);
  // Every record of every tenant, by "<tenant>/<name>". Records that cannot be read are left out, with a line in the
  // log.
  asio::awaitable<Result<std::map<std::string, Adapter>>> all(Deadline deadline);
  // Registers or replaces. `upload` (Upload::finish has one) is empty for a file; true: the name was new.
  // The upload's bytes are kept if Redis lacks any that the digest has, else dropped.
  // kConflict: the condition does not hold. kNotFound: the upload has expired.
  asio::awaitable<Result<bool>> put(const Adapter& adapter, const std::string& upload, Condition condition,
                                    Deadline deadline);
  // The record as it is then. kNotFound: no such name. kConflict: the condition does not hold.
  asio::awaitable<Result<Adapter>> set_pinned(const std::string& tenant, const std::string& name, bool pinned,
                                              Deadline deadline, Condition condition = {});
  // The name goes, and bytes that no other record has go with it. The record that was. kNotFound: no such name.
  // kConflict: the condition does not hold.
  asio::awaitable<Result<Adapter>> remove(const std::string& tenant, const std::string& name, Deadline deadline,
                                          Condition condition = {});
  // 0 of a registry where nothing ever happened.
  asio::awaitable<Result<std::int64_t>> version(Deadline deadline);
  // Nothing: too much has happened since (1,000 names have changed), or in another registry; read all().
  asio::awaitable<Result<std::optional<Changes>>> changes_since(std::int64_t version, Deadline deadline);

  // --- by digest ---------------------------------------------------------------------------------
  // kNotFound: no record has this digest (any more). kInvalidArgument: not a digest.
  asio::awaitable<Result<Location>> lookup(const std::string& sha256, Deadline deadline);
  // Piece 0 … location.chunks - 1 of an upload. kNotFound: deleted meanwhile. kDataCorrupt: not of the size it must
  // have.
  asio::awaitable<Result<std::string>> read_chunk(const Location& location, int index, Deadline deadline);

  // --- upkeep ------------------------------------------------------------------------------------
  // Drops bytes that are due; every change does it, too. How many digests went.
  asio::awaitable<Result<int>> sweep(Deadline deadline);

  const std::shared_ptr<redis::Connection>& connection() const { return connection_; }
  const RegistryOptions& options() const { return options_; }

 private:
  struct Registered {
    std::string text;  // as it is kept: what a change names as the record that it means
    Adapter adapter;
  };
  struct Stored {
    std::string upload;  // empty: Redis has no bytes
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
