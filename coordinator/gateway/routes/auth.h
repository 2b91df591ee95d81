// Who is calling: bearer keys to tenants, and links to results that need no key. Thread safe once made.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct Caller {
  std::string tenant = "default";  // whose jobs its submissions are
  bool sees_all = false;           // an admin's key, or no keys are configured
  // The tenant to name to the queue's readers: empty sees every job.
  std::string view() const { return sees_all ? std::string() : tenant; }
};

class KeyRing {
 public:
  explicit KeyRing(std::vector<config::ApiKey> keys);

  bool open() const { return keys_.empty(); }
  // `authorization`: the header, "Bearer KEY". Without configured keys everyone is the tenant `default`.
  // kUnauthenticated otherwise. Compares with every key in constant time.
  Result<Caller> authenticate(std::string_view authorization) const;

  // A link to a result is handed to browsers and to clients that fetch it without the key, so where keys are
  // configured it carries its own permission: an HMAC over path and expiry ("expires=…&sig=…", without '?').
  // The secret is derived from the configured hashes, so that every coordinator of a fleet accepts the link.
  // Empty where no keys are configured.
  std::string sign(std::string_view path, std::int64_t expires_s) const;
  bool verify(std::string_view path, std::string_view expires, std::string_view signature, std::int64_t now_s) const;

 private:
  std::string mac(std::string_view path, std::string_view expires) const;
  std::vector<config::ApiKey> keys_;
  std::string secret_;
};

}  // namespace ditfleet::gateway
