// Writes an adapter's file to Redis in chunks of 1 MiB. The chunks expire unless they are passed to Registry::put.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/sha256.h"
#include "shared/loras/registry.h"

namespace ditfleet::loras {

// One upload. Not thread-safe: call every function on the registry's executor. Keeps at most one chunk in memory.
class Upload {
 public:
  explicit Upload(Registry& registry);  // `registry` must outlive the upload

  // Appends bytes. Waits until full chunks have been written.
  asio::awaitable<Result<void>> write(std::string_view bytes, Deadline deadline);
  // Writes the last chunk. Afterwards bytes() and sha256() describe the whole file.
  asio::awaitable<Result<void>> finish(Deadline deadline);
  // Deletes the chunks immediately instead of letting them expire.
  asio::awaitable<void> discard(Deadline deadline);

  const std::string& id() const { return id_; }
  std::int64_t bytes() const { return bytes_; }
  const std::string& sha256() const { return sha256_; }

 private:
  asio::awaitable<Result<void>> store(Deadline deadline);

  Registry& registry_;
  std::string id_, chunk_, sha256_;
  std::size_t chunks_ = 0;
  std::int64_t bytes_ = 0;
  Sha256 hash_;
};

}  // namespace ditfleet::loras
