// An export file, which copies encoded entries from one fleet or machine to another:
//   "DFARCHIV", version 1 and flags 0 (4 bytes each)
//   for each entry: its size (8 bytes) and its encoding (codec.h)
//   a size of 0, the number of entries (8 bytes), SHA-256 of all bytes before
// Each entry has its own signature. The checksum at the end detects an incomplete archive.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/core/sha256.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::kernel_cache {

// Not thread-safe. Blocks on the disk.
class ArchiveWriter {
 public:
  // Writes to a temporary file next to `path`; finish() renames it to `path`. kUnavailable: cannot create the file.
  static Result<ArchiveWriter> create(const std::string& path);
  ArchiveWriter(ArchiveWriter&&) noexcept = default;
  ~ArchiveWriter();  // removes the temporary file
  Result<void> add(std::string_view value);
  Result<void> finish();
  std::uint64_t values() const { return values_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  explicit ArchiveWriter(const std::string& path);
  Error failed(const char* what) const;
  Result<void> write(std::string_view part);

  std::string path_, temporary_;
  UniqueFd file_;
  std::uint64_t values_ = 0, bytes_ = 0;
  Sha256 checksum_;
};

// Not thread-safe. Blocks on the disk. Keeps at most one entry in memory.
class ArchiveReader {
 public:
  // kNotFound: no such file. kUnavailable: the file cannot be read. kDataCorrupt: the file is not an archive.
  static Result<ArchiveReader> open(const std::string& path);
  // The next encoded entry, unverified; nothing after the last entry. kDataCorrupt: the file is truncated, or its
  // checksum is wrong. The entries before the damage have already been returned.
  Result<std::optional<std::string>> next();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  explicit ArchiveReader(const std::string& path);
  Error corrupt(const std::string& why) const;
  bool read(std::string& out, std::size_t size);

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
  std::uint64_t values_ = 0;
  Sha256 checksum_;
};

}  // namespace ditfleet::kernel_cache
