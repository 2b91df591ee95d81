// Results as files in a folder that all hosts share:
//   results/<hh>/<job>.<unit>.<nonce>.<png|jpg|webp|mp4|bin>     <hh> is the first byte of SHA-256(job) in hexadecimal
//   previews/<hh>/<job>.<unit>.<nonce>.<index>
//   inputs/<hh>/<sha256>                                         <hh> is its first byte in hexadecimal
// Files are written atomically (temporary file, fsync, rename, fsync of the folder). Every process deletes files that
// are older than their retention. Several processes may do so concurrently.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>

#include "shared/results/store.h"

namespace ditfleet::results {

class FileStore final : public Store {
 public:
  // Creates the folder. kInvalidArgument or kUnavailable: the folder cannot be used. Blocks on the disk.
  static Result<std::shared_ptr<Store>> open(const StoreOptions& options);
  ~FileStore() override;

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
  struct Impl;
  explicit FileStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Removes regular files in the subfolders of `dir` that were last modified more than `age` ago by the clock of the
// folder's file server, and returns their number. Never follows a symbolic link. Blocks.
// kUnavailable: the folder cannot be used, or `local_time` differs from its clock by more than a minute.
Result<int> sweep(const std::string& dir, std::chrono::milliseconds age,
                  std::filesystem::file_time_type local_time = std::filesystem::file_time_type::clock::now());

}  // namespace ditfleet::results
