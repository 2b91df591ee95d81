// A copy of all records in memory, for processes that resolve names on every request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "shared/loras/registry.h"

namespace ditfleet::loras {

// Not thread-safe: call every function on the registry's executor.
class RegistryMirror {
 public:
  explicit RegistryMirror(std::shared_ptr<Registry> registry);

  // Reads the registry's version and, if it differs, the changes. Afterwards the mirror includes every change that was
  // acknowledged before the call. Errors: those of the registry; the mirror is then unchanged.
  asio::awaitable<Result<void>> refresh(Deadline deadline);
  // Refreshes every second and sweeps every minute until the coroutine is canceled. While Redis is unavailable, the
  // mirror keeps its records.
  asio::awaitable<void> follow();

  // Returns null if the tenant has no adapter with this name. The pointer is valid until the next refresh.
  const Adapter* find(const std::string& tenant, const std::string& name) const;
  // Returns the digest of the adapter `name` for a request of this tenant and model. `sha256` is the expected digest,
  // or empty. kInvalidArgument (param "name" or "sha256"): there is no such adapter (the message suggests similar
  // names), it has another digest, or it is not registered for the model.
  Result<std::string> resolve(const std::string& tenant, const std::string& name, const std::string& sha256,
                              const std::string& model) const;
  // A tenant's adapters, except for one name; `bytes` counts uploads only.
  struct Use {
    std::int64_t adapters = 0, bytes = 0;
  };
  Use use(const std::string& tenant, const std::string& except = {}) const;
  struct Page {
    std::vector<Adapter> adapters;  // by name
    bool more = false;
  };
  // Returns at most `most` adapters (0: no limit) whose names sort after `after`.
  Page list(const std::string& tenant, const std::string& after = {}, std::size_t most = 0) const;
  // The pinned digests of all tenants. A digest is pinned if any of its records is.
  const std::set<std::string>& pinned() const { return pinned_; }
  // File sizes by digest.
  const std::map<std::string, std::int64_t>& bytes() const { return bytes_; }
  std::int64_t version() const { return version_; }  // -1 before the first refresh
  bool loaded() const { return version_ >= 0; }

 private:
  void summarize(std::int64_t version);  // fills pinned_ and bytes_ from records_

  std::shared_ptr<Registry> registry_;
  std::map<std::string, Adapter> records_;  // by field_of(tenant, name)
  std::set<std::string> pinned_;
  std::map<std::string, std::int64_t> bytes_;
  std::int64_t version_ = -1;
};

}  // namespace ditfleet::loras
