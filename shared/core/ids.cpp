#include "shared/core/ids.h"

#include <sodium.h>

#include <array>
#include <chrono>
#include <cstdint>

namespace ditfleet {

std::string new_id() {
  static constexpr char kAlphabet[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
                      std::chrono::system_clock::now().time_since_epoch())
                      .count();
  std::string id(26, '0');
  auto time = static_cast<std::uint64_t>(ms);
  for (int i = 9; i >= 0; --i, time >>= 5) id[static_cast<std::size_t>(i)] = kAlphabet[time & 31];
  std::array<unsigned char, 16> random{};
  randombytes_buf(random.data(), random.size());
  for (std::size_t i = 0; i < 16; ++i) id[10 + i] = kAlphabet[random[i] & 31];
  return id;
}

std::string new_nonce() {
  std::array<unsigned char, 16> random{};
  randombytes_buf(random.data(), random.size());
  std::string hex(33, '\0');
  sodium_bin2hex(hex.data(), hex.size(), random.data(), random.size());
  hex.resize(32);
  return hex;
}

bool is_valid_id(std::string_view id) {
  if (id.empty() || id.size() > 64) return false;
  for (char c : id) {
    const bool ok = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
                    c == '_' || c == '-';
    if (!ok) return false;
  }
  return true;
}

}  // namespace ditfleet
