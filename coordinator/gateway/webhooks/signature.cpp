#include "coordinator/gateway/webhooks/signature.h"

#include <sodium.h>

#include "shared/core/bytes.h"

namespace ditfleet::gateway {
namespace {

constexpr std::string_view kPrefix = "whsec_";
constexpr std::size_t kSecretBytes = 32;

std::string key_of(std::string_view secret) {
  secret.remove_prefix(kPrefix.size());
  std::string key(secret.size(), '\0');
  std::size_t size = 0;
  if (sodium_base642bin(reinterpret_cast<unsigned char*>(key.data()), key.size(), secret.data(), secret.size(), nullptr,
                        &size, nullptr, sodium_base64_VARIANT_ORIGINAL) != 0)
    size = 0;
  key.resize(size);
  return key;
}

}  // namespace

std::string new_webhook_secret() {
  std::string bytes(kSecretBytes, '\0');
  randombytes_buf(bytes.data(), bytes.size());
  return std::string(kPrefix) + base64(bytes);
}

std::string webhook_signature(const std::vector<std::string>& secrets, std::string_view id, std::int64_t seconds,
                              std::string_view body) {
  const std::string head = std::string(id) + "." + std::to_string(seconds) + ".";
  std::string out;
  for (const std::string& secret : secrets) {
    const std::string key = key_of(secret);
    crypto_auth_hmacsha256_state state;
    crypto_auth_hmacsha256_init(&state, reinterpret_cast<const unsigned char*>(key.data()), key.size());
    for (const std::string_view part : {std::string_view(head), body})
      crypto_auth_hmacsha256_update(&state, reinterpret_cast<const unsigned char*>(part.data()), part.size());
    std::string mac(crypto_auth_hmacsha256_BYTES, '\0');
    crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(mac.data()));
    out += (out.empty() ? "v1," : " v1,") + base64(mac);
  }
  return out;
}

}  // namespace ditfleet::gateway
