// Writes an adapter's bytes to Redis in chunks of 1 MiB. They expire unless Registry::put refers to them.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/sha256.h"
#include "shared/loras/registry.h"

namespace ditfleet::loras {

// One upload. Threads: the registry's. Keeps at most one chunk in memory.
class Upload {
 public:
  explicit Upload(Registry& registry);  // outlives this

  // Appends bytes; waits while a full chunk is written.
  asio::awaitable<Result<void>> write(std::string_view bytes, Deadline deadline);
  // Writes the last chunk. Afterwards bytes() and sha256() describe the whole file.
  asio::awaitable<Result<void>> finish(Deadline deadline);
  // Deletes the chunks at once instead of letting them expire.
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
