// A program's key: SHA-256 of everything that determines the program's bytes, and nothing else.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/core/sha256.h"

namespace ditfleet::kernel_cache {

struct Key {
  std::array<std::uint8_t, 32> bytes{};

  std::string hex() const;  // 64 lower-case digits
  // kInvalidArgument unless `text` is 64 hexadecimal digits.
  static Result<Key> from_hex(std::string_view text);
  auto operator<=>(const Key&) const = default;
};

// Hashes (name, value) pairs in the order added, then their number. Each name, value and number is hashed as a type
// byte, its length (8 bytes) and its bytes. The types are 'n' for a name, 's' for a text, 'i' for an 8-byte integer and
// 'e' for the number of pairs. Integers are little-endian. Different lists of pairs therefore never hash the same
// bytes. Not thread-safe.
class KeyBuilder {
 public:
  KeyBuilder& add(std::string_view name, std::string_view value);
  KeyBuilder& add(std::string_view name, std::int64_t value);
  // Without these overloads a literal would convert to another type or be ambiguous.
  KeyBuilder& add(std::string_view name, const char* value) { return add(name, std::string_view(value)); }
  KeyBuilder& add(std::string_view name, int value) { return add(name, static_cast<std::int64_t>(value)); }
  KeyBuilder& add(std::string_view name, bool value) = delete;  // pass 0 or 1 instead
  // Returns the key of the added pairs and empties the builder.
  Key finish();

 private:
  void part(char type, std::string_view bytes);

  Sha256 hash_;
  std::int64_t pairs_ = 0;
};

}  // namespace ditfleet::kernel_cache

template <>
struct std::hash<ditfleet::kernel_cache::Key> {
  std::size_t operator()(const ditfleet::kernel_cache::Key& key) const noexcept {
    std::size_t out = 0;
    std::memcpy(&out, key.bytes.data(), sizeof out);
    return out;
  }
};
