// Many values in one file, to carry from one fleet or machine to another:
//   "DFARCHIV", version 1 and flags 0 (4 bytes each)
//   each value: its size (8 bytes) and the value as it is everywhere (README.md), signature included
//   a size of 0, the number of values (8 bytes), SHA-256 of all before it
// Each value is verified on its own; the checksum at the end tells a whole archive from half of one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::kernel_cache {

// Not thread safe. Blocks on the disk.
class ArchiveWriter {
 public:
  // Writes beside `path`; finish() puts it in place. kUnavailable: cannot be created.
  static Result<ArchiveWriter> create(const std::string& path);
  ArchiveWriter(ArchiveWriter&&) noexcept;
  ArchiveWriter& operator=(ArchiveWriter&&) = delete;
  ~ArchiveWriter();  // without finish() nothing is left
  Result<void> add(std::string_view value);
  Result<void> finish();
  std::uint64_t values() const;
  std::uint64_t bytes() const;

 private:
  struct State;
  explicit ArchiveWriter(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// Not thread safe. Blocks on the disk. Holds one value at a time.
class ArchiveReader {
 public:
  // kNotFound, kUnavailable; kDataCorrupt: no archive.
  static Result<ArchiveReader> open(const std::string& path);
  ArchiveReader(ArchiveReader&&) noexcept;
  ArchiveReader& operator=(ArchiveReader&&) = delete;
  ~ArchiveReader();
  // The next value, unverified; nothing after the last. kDataCorrupt: the file ends too early, or its checksum
  // does not fit; values before it have been handed out already.
  Result<std::optional<std::string>> next();

 private:
  struct State;
  explicit ArchiveReader(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ditfleet::kernel_cache
