// The cluster's secret, which signs and verifies entries.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::kernel_cache {

// Immutable, thread-safe. Keeps two values derived from the text, not the text itself.
class Secret {
 public:
  using Signature = std::array<std::uint8_t, 32>;
  static constexpr std::size_t kMinBytes = 16;

  // kInvalidArgument for fewer than kMinBytes; the message never repeats the text.
  static Result<std::shared_ptr<const Secret>> from_text(std::string_view text);
  // Reads the file's text without the newline at its end. Errors are those of read_secret_file(), and kInvalidArgument
  // for a short secret; the message contains the path. Blocks.
  static Result<std::shared_ptr<const Secret>> from_file(const std::string& path);
  // Like from_file(), but first creates a missing file with mode 0600 and 256 random bits as hexadecimal digits. If
  // several processes do so concurrently, all get the same secret. Blocks.
  static Result<std::shared_ptr<const Secret>> from_file_or_new(const std::string& path);

  Secret(const Secret&) = delete;
  Secret& operator=(const Secret&) = delete;
  ~Secret();

  Signature sign(std::string_view bytes) const;                           // HMAC-SHA-256
  bool verify(std::string_view bytes, const Signature& signature) const;  // in constant time
  // Identifies the secret without revealing it. Never 0.
  std::uint64_t id() const { return id_; }
  std::string id_text() const { return id_text(id_); }  // 16 hexadecimal digits, for logs and `ditfleet cache stats`
  static std::string id_text(std::uint64_t id);

 private:
  explicit Secret(std::string_view text);
  std::array<unsigned char, 32> key_{};
  std::uint64_t id_ = 0;
};

}  // namespace ditfleet::kernel_cache
