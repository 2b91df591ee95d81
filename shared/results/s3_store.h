// Results as objects in a bucket:
//   <prefix>/results/<tenant>/<job>/<unit>.<nonce>.<png|jpg|webp|mp4|bin>
//   <prefix>/inputs/<sha256>
// An object is there whole or not at all, and is never overwritten. Previews are in Redis, because they live for
// minutes.
#pragma once

#include <memory>

#include "shared/results/store.h"

namespace ditfleet::results {

class S3Store final : public Store {
 public:
  // kInvalidArgument: the bucket or the prefix is not a name. Sends nothing.
  static Result<std::shared_ptr<Store>> open(const StoreOptions& options,
                                             std::shared_ptr<redis::Connection> connection);
  ~S3Store() override;

  asio::awaitable<Result<Manifest>> put(const ResultKey& result, std::string bytes, std::string media_type,
                                        Deadline deadline) override;
  asio::awaitable<Result<std::string>> get(const Manifest& manifest, Deadline deadline) override;
  asio::awaitable<Result<std::string>> get_piece(const Manifest& manifest, std::int64_t offset, std::int64_t size,
                                                 Deadline deadline) override;
  std::string link(const Manifest& manifest, std::int64_t life_s) const override;
  std::string link_origin() const override;
  asio::awaitable<Result<void>> touch(const Manifest& manifest, Deadline deadline) override;
  asio::awaitable<Result<void>> remove(const Manifest& manifest, Deadline deadline) override;
  asio::awaitable<Result<std::string>> put_preview(const ResultKey& result, int index, std::string bytes,
                                                   Deadline deadline) override;
  asio::awaitable<Result<std::string>> get_preview(const std::string& key, Deadline deadline) override;
  asio::awaitable<Result<void>> put_input(const std::string& sha256, std::string bytes, Deadline deadline) override;
  asio::awaitable<Result<void>> touch_input(const std::string& sha256, Deadline deadline) override;
  asio::awaitable<Result<std::string>> get_input(const std::string& sha256, Deadline deadline) override;
  asio::awaitable<Result<void>> remove_input(const std::string& sha256, Deadline deadline) override;
  // Looks at some hundred objects at a time, all of them four times in the shortest life.
  asio::awaitable<void> maintain(Deadline deadline) override;

 private:
  struct Impl;
  explicit S3Store(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::results
