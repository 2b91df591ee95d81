// All records of the registry in memory, for processes that resolve names at every request.
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

// Threads: from the registry's executor.
class Directory {
 public:
  explicit Directory(std::shared_ptr<Registry> registry);

  // Asks for the version (one round trip), and for what changed if it is another one than ours. After it the view holds
  // every change that was acknowledged before the call. Errors as the registry's; the view stays as it was.
  asio::awaitable<Result<void>> refresh(Deadline deadline);
  // Refreshes every second, sweeps every minute, until the coroutine is canceled. Redis away: the view stays.
  asio::awaitable<void> follow();

  // Null: the tenant has no adapter of that name. Valid until the next refresh.
  const Adapter* find(const std::string& tenant, const std::string& name) const;
  // The digest that a request of this tenant for this model gets by naming an adapter; `sha256`, if not empty, must be
  // it. kInvalidArgument, with the param "name" or "sha256": no such adapter (near names are told), another digest, not
  // for this model.
  Result<std::string> resolve(const std::string& tenant, const std::string& name, const std::string& sha256,
                              const std::string& model) const;
  std::vector<std::string> names(const std::string& tenant) const;  // sorted
  struct Page {
    std::vector<Adapter> adapters;  // by name
    bool more = false;
  };
  // Those whose names come after this one ("": all), as many as `most` (0: all).
  Page list(const std::string& tenant, const std::string& after = {}, std::size_t most = 0) const;
  // By digest, whoever's: pinned if one record with it is.
  const std::set<std::string>& pinned() const { return pinned_; }
  const std::map<std::string, std::int64_t>& bytes() const { return bytes_; }
  std::int64_t version() const { return version_; }  // of what is held; -1 before the first refresh
  bool loaded() const { return version_ >= 0; }

 private:
  void summarize(std::int64_t version);  // of records_

  std::shared_ptr<Registry> registry_;
  std::map<std::string, Adapter> records_;  // by field_of(tenant, name)
  std::set<std::string> pinned_;
  std::map<std::string, std::int64_t> bytes_;
  std::int64_t version_ = -1;
};

}  // namespace ditfleet::loras
