// Authentication with bearer keys. Not thread-safe while set_added() runs.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "shared/config/settings.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct Caller {
  std::string tenant = "default";  // owns the jobs that the caller submits; empty: a signed link instead of a key
  bool sees_all = false;           // an administrator's key, or there are no keys
  std::string key = {};            // the key's id; empty: none
  std::string sha256 = {};         // of the key
  // The tenant whose jobs the caller may see; empty: every tenant.
  std::string view() const { return sees_all ? std::string() : tenant; }
};

struct Key {
  std::string id;  // "keys.0" of the first configured key
  std::string tenant, sha256;
  bool admin = false;
  std::int64_t created_ms = 0;  // 0: configured
  bool configured() const { return created_ms == 0; }
};

class KeyRing {
 public:
  explicit KeyRing(const std::vector<config::ApiKey>& configured);

  // Replaces the keys that were added at run time (key_store.h), then calls on_change.
  void set_added(const std::vector<Key>& added);
  std::function<void()> on_change = {};
  // Until set_added(), callers are refused unless keys are configured: there may be keys that were added.
  void await_added() { awaits_added_ = true; }
  bool awaits_added() const { return awaits_added_; }
  // Refuses every caller while there are no keys, with this message.
  void require_keys(std::string message) { without_keys_ = std::move(message); }

  const std::vector<Key>& keys() const { return keys_; }
  const std::set<std::string>& tenants() const { return tenants_; }  // of the keys
  bool open() const { return keys_.empty() && without_keys_.empty(); }
  // Whether the gateway would be open without the added keys.
  bool would_open() const { return configured_ == 0 && without_keys_.empty(); }
  // `authorization`: the header, "Bearer KEY". Without keys every caller is the tenant `default`.
  // kUnauthenticated: no such key. kUnavailable: the keys are not known yet. Compares with every key in constant time.
  Result<Caller> authenticate(std::string_view authorization) const;
  // Whether a caller that authenticate() returned earlier would still be accepted.
  bool still_accepts(const Caller& caller) const;

 private:
  std::vector<Key> keys_;  // the configured ones first
  std::size_t configured_ = 0;
  std::set<std::string> tenants_;
  bool awaits_added_ = false;
  std::string without_keys_;  // empty: without keys everybody is served
};

}  // namespace ditfleet::gateway
