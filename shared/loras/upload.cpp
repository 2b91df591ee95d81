#include "shared/loras/upload.h"

#include <algorithm>
#include <utility>

#include "shared/core/ids.h"
#include "shared/loras/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::loras {

Upload::Upload(Registry& registry) : registry_(registry), id_(new_nonce()) {}

asio::awaitable<Result<void>> Upload::store(Deadline deadline) {
  hash_.update(chunk_);
  redis::Command set("SET");
  set << chunk_key(id_, chunks_++) << chunk_ << "PX" << kUploadMs;
  chunk_.clear();
  co_return without_value(co_await registry_.connection()->execute(std::move(set), deadline));
}

asio::awaitable<Result<void>> Upload::write(std::string_view bytes, Deadline deadline) {
  bytes_ += static_cast<std::int64_t>(bytes.size());
  while (!bytes.empty()) {
    if (chunk_.capacity() < kChunkBytes) chunk_.reserve(kChunkBytes);
    const std::size_t take = std::min(bytes.size(), kChunkBytes - chunk_.size());
    chunk_.append(bytes.substr(0, take));
    bytes.remove_prefix(take);
    if (chunk_.size() < kChunkBytes) continue;
    if (auto stored = co_await store(deadline); !stored) co_return stored.error();
  }
  co_return Result<void>();
}

asio::awaitable<Result<void>> Upload::finish(Deadline deadline) {
  if (!chunk_.empty()) {
    if (auto stored = co_await store(deadline); !stored) co_return stored.error();
  }
  sha256_ = hash_.hex();
  co_return Result<void>();
}

asio::awaitable<void> Upload::discard(Deadline deadline) {
  for (std::size_t i = 0; i < chunks_; i += 500) {
    redis::Command unlink("UNLINK");
    for (std::size_t k = i; k < std::min(i + 500, chunks_); ++k) unlink << chunk_key(id_, k);
    (void)co_await registry_.connection()->execute(std::move(unlink), deadline);
  }
  chunks_ = 0;
}

}  // namespace ditfleet::loras
