#include "coordinator/gateway/routes/auth.h"

#include <sodium.h>

#include <algorithm>

#include "coordinator/gateway/http/http.h"
#include "shared/core/bytes.h"

namespace ditfleet::gateway {
namespace {

bool same_bytes(std::string_view a, std::string_view b) {
  return a.size() == b.size() && sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

KeyRing::KeyRing(const std::vector<config::ApiKey>& configured) : configured_(configured.size()) {
  for (const auto& key : configured)
    keys_.push_back({"keys." + std::to_string(keys_.size()), key.tenant, key.sha256, key.admin});
  set_added({});
}

void KeyRing::set_added(const std::vector<Key>& added) {
  keys_.resize(configured_);
  keys_.insert(keys_.end(), added.begin(), added.end());
  tenants_.clear();
  for (const Key& key : keys_) tenants_.insert(key.tenant);
  awaits_added_ = false;
  if (on_change) on_change();
}

Result<Caller> KeyRing::authenticate(std::string_view authorization) const {
  const auto unread = [] { return unavailable("the keys were not read from Redis yet; try again shortly"); };
  if (keys_.empty() && awaits_added_) return unread();
  if (open()) return Caller{"default", true};
  if (keys_.empty()) return Error{Code::kUnauthenticated, without_keys_, {}};
  if (authorization.empty()) {
    return Error{Code::kUnauthenticated, "an API key is required; send the header 'Authorization: Bearer KEY'", {}};
  }
  if (!same_name(authorization.substr(0, 7), "Bearer ")) {
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
  if (found == nullptr && awaits_added_) return unread();
  if (found == nullptr || key.empty()) {
    return Error{Code::kUnauthenticated, "unknown API key", {}};
  }
  return Caller{found->tenant, found->admin, found->id, found->sha256};
}

bool KeyRing::still_accepts(const Caller& caller) const {
  if (caller.key.empty()) return caller.tenant.empty() || open();
  return std::any_of(keys_.begin(), keys_.end(),
                     [&](const Key& key) { return key.id == caller.key && key.sha256 == caller.sha256; });
}

}  // namespace ditfleet::gateway
