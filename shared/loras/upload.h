// An adapter's bytes on their way into Redis, 1 MiB at a time. Nothing points to them until Registry::put does; left
// alone, they expire.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/sha256.h"
#include "shared/loras/registry.h"

namespace ditfleet::loras {

// One upload; threads as the registry's. Holds at most one chunk.
class Upload {
 public:
  explicit Upload(Registry& registry);  // which outlives it

  // Takes the next bytes; waits while a full chunk is written.
  asio::awaitable<Result<void>> write(std::string_view bytes, Deadline deadline);
  // Writes what is left. Afterwards bytes() and sha256() are the whole's.
  asio::awaitable<Result<void>> finish(Deadline deadline);
  // Drops what was written, for an upload that is refused. Without it the chunks expire.
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
