// Signed links: browsers and many clients fetch an image without its tenant's key.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace ditfleet::gateway {

class LinkSigner {
 public:
  // All gateways of a fleet share the secrets, which are random and kept in Redis (JobService::link_secret). Each
  // period has a secret of its own, whose id is the period's number.
  static constexpr std::int64_t kPeriodS = 30 * 86'400;
  static constexpr std::size_t kSecretBytes = 32;
  static std::int64_t id_at(std::int64_t now_s) { return now_s / kPeriodS; }

  // Adds or replaces a secret. Links that a replaced one signed are no longer valid.
  void learn(std::int64_t id, std::string secret) { secrets_[id] = std::move(secret); }

  // "expires=…&kid=…&sig=…", an HMAC over path and expiry, or empty while no secret is known.
  std::string sign(std::string_view path, std::int64_t expires_s) const;
  bool verify(std::string_view path, std::string_view expires, std::string_view id, std::string_view signature,
              std::int64_t now_s) const;

 private:
  std::map<std::int64_t, std::string> secrets_;
};

}  // namespace ditfleet::gateway
