// Authentication: bearer keys, and signed links to results. Thread-safe after construction.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct Caller {
  std::string tenant = "default";  // owns the jobs that the caller submits
  bool sees_all = false;           // an admin's key, or no keys are configured
  // The tenant whose jobs the caller may see; empty: every tenant.
  std::string view() const { return sees_all ? std::string() : tenant; }
};

class KeyRing {
 public:
  explicit KeyRing(std::vector<config::ApiKey> keys);

  bool open() const { return keys_.empty(); }
  // `authorization`: the header, "Bearer KEY". Without configured keys every caller is the tenant `default`.
  // kUnauthenticated: no such key. Compares with every key in constant time.
  Result<Caller> authenticate(std::string_view authorization) const;

  // Signs a link to a result, because browsers and many clients fetch it without the key: an HMAC over path and expiry
  // ("expires=…&sig=…", without '?'), or empty if no keys are configured. The secret is derived from the configured
  // hashes, so every coordinator of a fleet accepts the link.
  std::string sign(std::string_view path, std::int64_t expires_s) const;
  bool verify(std::string_view path, std::string_view expires, std::string_view signature, std::int64_t now_s) const;

 private:
  std::string mac(std::string_view path, std::string_view expires) const;
  std::vector<config::ApiKey> keys_;
  std::string secret_;
};

}  // namespace ditfleet::gateway
