// Results as Redis strings, in chunks of 1 MiB, because a longer command would stall the server.
//   df:{0}:blob:<job>:<unit>:<nonce>[:<k>]               chunk 0 has no suffix
//   df:{0}:preview:<job>:<unit>:<nonce>:<index>[:<k>]
//   df:{0}:input:<sha256>[:<k>]
// All keys expire.
#pragma once

#include <memory>
#include <optional>

#include "shared/results/store.h"

namespace ditfleet::results {

inline constexpr std::size_t kChunkBytes = 1u << 20;

class RedisStore final : public Store {
 public:
  RedisStore(const StoreOptions& options, std::shared_ptr<redis::Connection> connection);

  asio::awaitable<Result<Manifest>> put(const ResultKey& result, std::string bytes, std::string media_type,
                                        Deadline deadline) override;
  asio::awaitable<Result<std::string>> get(const Manifest& manifest, Deadline deadline) override;
  asio::awaitable<Result<std::string>> get_piece(const Manifest& manifest, std::int64_t offset, std::int64_t size,
                                                 Deadline deadline) override;
  asio::awaitable<Result<void>> touch(const Manifest& manifest, Deadline deadline) override;
  asio::awaitable<Result<void>> remove(const Manifest& manifest, Deadline deadline) override;
  asio::awaitable<Result<std::string>> put_preview(const ResultKey& result, int index, std::string bytes,
                                                   Deadline deadline) override;
  asio::awaitable<Result<std::string>> get_preview(const std::string& key, Deadline deadline) override;
  asio::awaitable<Result<void>> put_input(const std::string& sha256, std::string bytes, Deadline deadline) override;
  asio::awaitable<Result<void>> touch_input(const std::string& sha256, Deadline deadline) override;
  asio::awaitable<Result<std::string>> get_input(const std::string& sha256, Deadline deadline) override;
  asio::awaitable<Result<void>> remove_input(const std::string& sha256, Deadline deadline) override;

 private:
  asio::awaitable<Result<void>> write(std::string key, std::string_view bytes, std::int64_t expiry_ms,
                                      Deadline deadline);
  Result<void> check_own(const Manifest& manifest) const;
  // One chunk; an empty optional where the key does not exist.
  asio::awaitable<Result<std::optional<std::string>>> read_chunk(const std::string& key, std::size_t index,
                                                                 Deadline deadline);

  // All chunks of a value of unknown size. kNotFound: `what` does not exist.
  asio::awaitable<Result<std::string>> read_all(std::string key, std::string what, Deadline deadline);

  std::string blob_prefix_, preview_prefix_, input_prefix_;  // "df:{0}:blob:" …
  std::int64_t retention_ms_, preview_ms_, input_ms_, max_bytes_;
  std::shared_ptr<redis::Connection> connection_;
};

}  // namespace ditfleet::results
