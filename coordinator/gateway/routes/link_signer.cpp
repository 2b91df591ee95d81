#include "coordinator/gateway/routes/link_signer.h"

#include <sodium.h>

#include <charconv>
#include <optional>

namespace ditfleet::gateway {
namespace {

std::string mac(std::string_view secret, std::string_view path, std::string_view expires) {
  const std::string text = std::string(path) + "\n" + std::string(expires);
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(secret.data()), secret.size());
  crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(text.data()), text.size());
  unsigned char digest[crypto_auth_hmacsha256_BYTES];
  crypto_auth_hmacsha256_final(&state, digest);
  std::string hex(sizeof digest * 2 + 1, '\0');
  sodium_bin2hex(hex.data(), hex.size(), digest, sizeof digest);
  hex.pop_back();
  return hex;
}

std::optional<std::int64_t> number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (ec != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

void LinkSigner::learn(std::int64_t id, std::string secret) {
  if (secret.empty())
    secrets_.erase(id);
  else
    secrets_[id] = std::move(secret);
}

std::string LinkSigner::sign(std::string_view path, std::int64_t expires_s) const {
  if (secrets_.empty()) return {};
  const auto& [id, secret] = *secrets_.rbegin();
  const std::string expires = std::to_string(expires_s);
  return "expires=" + expires + "&kid=" + std::to_string(id) + "&sig=" + mac(secret, path, expires);
}

bool LinkSigner::verify(std::string_view path, std::string_view expires, std::string_view id,
                        std::string_view signature, std::int64_t now_s) const {
  const auto until = number(expires), key = number(id);
  const auto found = key ? secrets_.find(*key) : secrets_.end();
  if (!until || *until < now_s || found == secrets_.end()) return false;
  const std::string right = mac(found->second, path, expires);
  return right.size() == signature.size() && sodium_memcmp(right.data(), signature.data(), right.size()) == 0;
}

}  // namespace ditfleet::gateway
