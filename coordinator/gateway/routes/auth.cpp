#include "coordinator/gateway/routes/auth.h"

#include <sodium.h>

#include <algorithm>

#include "shared/core/bytes.h"

namespace ditfleet::gateway {
namespace {

bool same_bytes(std::string_view a, std::string_view b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool is_bearer(std::string_view scheme) {
  constexpr std::string_view kBearer = "bearer ";
  if (scheme.size() < kBearer.size()) return false;
  for (std::size_t i = 0; i < kBearer.size(); ++i) {
    const char c = scheme[i] >= 'A' && scheme[i] <= 'Z' ? static_cast<char>(scheme[i] + 32) : scheme[i];
    if (c != kBearer[i]) return false;
  }
  return true;
}

}  // namespace

KeyRing::KeyRing(const std::vector<config::ApiKey>& configured) : configured_(configured.size()) {
  for (const auto& key : configured) {
    keys_.push_back({"keys." + std::to_string(keys_.size()), key.tenant, key.sha256, key.admin});
    tenants_.insert(key.tenant);
  }
}

void KeyRing::set_added(const std::vector<Key>& added) {
  keys_.resize(configured_);
  keys_.insert(keys_.end(), added.begin(), added.end());
  tenants_.clear();
  for (const Key& key : keys_) tenants_.insert(key.tenant);
  awaits_added_ = false;
}

Result<Caller> KeyRing::authenticate(std::string_view authorization) const {
  if (keys_.empty() && awaits_added_) return unavailable("the keys were not read from Redis yet; try again shortly");
  if (keys_.empty()) return Caller{"default", true};
  if (authorization.empty()) {
    return Error{Code::kUnauthenticated, "an API key is required; send the header 'Authorization: Bearer KEY'", {}};
  }
  if (!is_bearer(authorization)) {
    return Error{Code::kUnauthenticated, "the Authorization header must be 'Bearer KEY'", {}};
  }
  std::string_view key = authorization.substr(7);
  while (!key.empty() && key.front() == ' ') key.remove_prefix(1);
  while (!key.empty() && key.back() == ' ') key.remove_suffix(1);
  const std::string hash = sha256_hex(key);
  const Key* found = nullptr;
  for (const auto& candidate : keys_) {
    if (same_bytes(hash, candidate.sha256)) found = &candidate;
  }
  if (found == nullptr || key.empty()) {
    return Error{Code::kUnauthenticated, "unknown API key", {}};
  }
  return Caller{found->tenant, found->admin, found->id};
}

}  // namespace ditfleet::gateway
