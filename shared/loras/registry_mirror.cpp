#include "shared/loras/registry_mirror.h"

#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <utility>

#include "shared/core/excerpt.h"
#include "shared/core/nearest_name.h"
#include "shared/loras/keys.h"

namespace ditfleet::loras {
namespace {

constexpr std::chrono::seconds kPollEvery{1}, kPatience{5};
constexpr int kSweepEvery = 60;  // polls

}  // namespace

RegistryMirror::RegistryMirror(std::shared_ptr<Registry> registry) : registry_(std::move(registry)) {}

asio::awaitable<Result<void>> RegistryMirror::refresh(Deadline deadline) {
  // The version is read before the records, so that the next refresh reads changes made in between.
  const auto version = co_await registry_->version(deadline);
  if (!version) co_return version.error();
  if (*version == version_) co_return Result<void>();
  if (loaded()) {
    auto changes = co_await registry_->changes_since(version_, deadline);
    if (!changes) co_return changes.error();
    if (*changes) {
      for (auto& [field, adapter] : (*changes)->records) {
        if (adapter)
          records_.insert_or_assign(field, std::move(*adapter));
        else
          records_.erase(field);
      }
      summarize((*changes)->version);
      co_return Result<void>();
    }
  }
  auto records = co_await registry_->all(deadline);
  if (!records) co_return records.error();
  records_ = std::move(*records);
  summarize(*version);
  co_return Result<void>();
}

asio::awaitable<void> RegistryMirror::follow() {
  asio::steady_timer timer(co_await asio::this_coro::executor);
  for (int poll = 1;; ++poll) {
    (void)co_await refresh(Deadline::after(kPatience));
    if (poll % kSweepEvery == 0) (void)co_await registry_->sweep(Deadline::after(kPatience));
    timer.expires_after(kPollEvery);
    co_await timer.async_wait(asio::use_awaitable);
  }
}

void RegistryMirror::summarize(std::int64_t version) {
  version_ = version;
  pinned_.clear();
  bytes_.clear();
  for (const auto& [field, adapter] : records_) {
    if (adapter.pinned) pinned_.insert(adapter.sha256);
    bytes_[adapter.sha256] = adapter.bytes;
  }
}

const Adapter* RegistryMirror::find(const std::string& tenant, const std::string& name) const {
  const auto found = records_.find(field_of(tenant, name));
  return found == records_.end() ? nullptr : &found->second;
}

Result<std::string> RegistryMirror::resolve(const std::string& tenant, const std::string& name,
                                            const std::string& sha256, const std::string& model) const {
  constexpr std::size_t kMostShown = 16, kMostCompared = 200;
  const Adapter* adapter = find(tenant, name);
  if (adapter == nullptr) {
    // Comparing with all names would take seconds: the first ones, and those that begin with the name's first half.
    std::set<std::string> compared;
    for (const auto& after : {std::string(), name.substr(0, name.size() / 2)}) {
      for (const Adapter& near : list(tenant, after, kMostCompared / 2).adapters) compared.insert(near.name);
    }
    const std::vector<std::string> known(compared.begin(), compared.end());
    std::string hint;
    if (known.empty()) {
      hint = "; none is registered (PUT /v1/loras/{name}, or ditfleet loras add)";
    } else if (const std::string near = nearest_name(name, known); !near.empty() || known.size() <= kMostShown) {
      hint = suggestion(name, known);
    } else {
      hint = "; see GET /v1/loras for the registered adapters";
    }
    return invalid_argument("LoRA adapter '" + excerpt(name, 128) + "' not found" + hint, "name");
  }
  if (!sha256.empty() && sha256 != adapter->sha256) {
    return invalid_argument("LoRA adapter '" + name + "' has the SHA-256 " + adapter->sha256 + ", not " + sha256 +
                                "; omit sha256 to use the current version",
                            "sha256");
  }
  if (!adapter->serves(model)) {
    std::string list;
    for (const std::string& one : adapter->models) list += (list.empty() ? "'" : ", '") + one + "'";
    return invalid_argument("LoRA adapter '" + name + "' is registered for model " + list + ", not for '" + model + "'",
                            "name");
  }
  return adapter->sha256;
}

RegistryMirror::Page RegistryMirror::list(const std::string& tenant, const std::string& after, std::size_t most) const {
  Page page;
  const std::string prefix = field_of(tenant, "");
  for (auto it = records_.upper_bound(prefix + after); it != records_.end() && it->first.starts_with(prefix); ++it) {
    page.more = most > 0 && page.adapters.size() == most;
    if (page.more) break;
    page.adapters.push_back(it->second);
  }
  return page;
}

RegistryMirror::Use RegistryMirror::use(const std::string& tenant, const std::string& except) const {
  Use out;
  for (const Adapter& adapter : list(tenant).adapters) {
    if (adapter.name == except) continue;
    ++out.adapters;
    if (adapter.path.empty()) out.bytes += adapter.bytes;
  }
  return out;
}

}  // namespace ditfleet::loras
