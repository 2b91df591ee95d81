// Authentication with bearer keys. Thread-safe after construction.
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

 private:
  std::vector<config::ApiKey> keys_;
};

}  // namespace ditfleet::gateway
