// SHA-256 of bytes that arrive in pieces, and of files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet {

// Not thread-safe; movable.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void update(std::string_view bytes);
  // The end: call one of them, once.
  std::string digest();  // 32 bytes
  std::string hex();     // 64 lower-case digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// 64 lower-case hexadecimal digits.
bool is_sha256_hex(std::string_view text);

struct FileDigest {
  std::string sha256;
  std::int64_t bytes = 0;
};

// Reads a regular file to its end, 1 MiB at a time. kNotFound, kUnavailable (unreadable, not a regular file) name the
// path. Blocks: about a second for 1 GB.
Result<FileDigest> sha256_of_file(const std::string& path);

}  // namespace ditfleet
