// Incremental SHA-256, and SHA-256 of files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "shared/core/result.h"

struct evp_md_ctx_st;

namespace ditfleet {

// Not thread-safe; movable.
class Sha256 {
 public:
  Sha256();
  void update(std::string_view bytes);
  // Call only one of these functions, and only once, after the last update().
  std::string digest();  // 32 bytes
  std::string hex();     // 64 lower-case digits

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// Whether `text` is 64 lower-case hexadecimal digits.
bool is_sha256_hex(std::string_view text);

struct FileDigest {
  std::string sha256;
  std::int64_t bytes = 0;
};

// Hashes a regular file. kNotFound, or kUnavailable if the file is unreadable or not regular; the message contains the
// path. Blocks for about a second per GB.
Result<FileDigest> sha256_of_file(const std::string& path);

}  // namespace ditfleet
