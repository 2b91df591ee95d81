#include "coordinator/gateway/backend/link_signer.h"

#include <sodium.h>

#include "shared/core/bytes.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

std::string mac(const std::string& secret, std::string_view path, std::string_view expires) {
  if (secret.size() != LinkSigner::kSecretBytes) return {};  // not one of ours
  const std::string text = std::string(path) + "\n" + std::string(expires);
  unsigned char digest[crypto_auth_hmacsha256_BYTES];
  crypto_auth_hmacsha256(digest, reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                         reinterpret_cast<const unsigned char*>(secret.data()));
  return to_hex(digest);
}

}  // namespace

std::string LinkSigner::sign(std::string_view path, std::int64_t expires_s) const {
  if (secrets_.empty()) return {};
  const auto& [id, secret] = *secrets_.rbegin();
  const std::string expires = std::to_string(expires_s);
  return "expires=" + expires + "&kid=" + std::to_string(id) + "&sig=" + mac(secret, path, expires);
}

bool LinkSigner::verify(std::string_view path, std::string_view expires, std::string_view id,
                        std::string_view signature, std::int64_t now_s) const {
  const auto until = number_of<std::int64_t>(expires);
  if (!until || *until < now_s) return false;
  for (const auto& [known, secret] : secrets_) {
    if (std::to_string(known) != id) continue;
    const std::string right = mac(secret, path, expires);
    return !right.empty() && right.size() == signature.size() &&
           sodium_memcmp(right.data(), signature.data(), right.size()) == 0;
  }
  return false;
}

}  // namespace ditfleet::gateway
