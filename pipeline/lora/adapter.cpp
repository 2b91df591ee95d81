#include "pipeline/lora/adapter.h"

#include <sys/stat.h>

#include "pipeline/device/failure.h"
#include "pipeline/lora/file.h"
#include "pipeline/models/parameters.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kKept = 8;

// Empty for a file that is not there.
std::string identity_of(const std::string& path) {
  struct stat s = {};
  if (::stat(path.c_str(), &s) != 0) return {};
  std::string identity = path;
  for (const auto part : {static_cast<std::int64_t>(s.st_dev), static_cast<std::int64_t>(s.st_ino), static_cast<std::int64_t>(s.st_size),
                          static_cast<std::int64_t>(s.st_mtim.tv_sec), static_cast<std::int64_t>(s.st_mtim.tv_nsec)})
    identity += '\0' + std::to_string(part);
  return identity;
}

}  // namespace

std::shared_ptr<const Adapter> AdapterStore::get(const LoraRequest& request) {
  std::lock_guard lock(mutex_);
  // Taken before the file is read: one that changes meanwhile is read again next time.
  std::string identity = request.id.empty() ? identity_of(request.path) : "id:" + request.id;
  for (auto it = kept_.begin(); it != kept_.end(); ++it)
    if (it->identity == identity && !identity.empty()) {
      kept_.splice(kept_.begin(), kept_, it);
      return it->adapter;
    }
  auto adapter = load(request.path);
  kept_.push_front({std::move(identity), request.id, adapter});
  if (kept_.size() > kKept) kept_.pop_back();
  return adapter;
}

void AdapterStore::forget(const std::string& id) {
  std::lock_guard lock(mutex_);
  kept_.remove_if([&](const Kept& kept) { return kept.id == id; });
}

AdapterHoldings AdapterStore::holdings() const {
  std::lock_guard lock(mutex_);
  AdapterHoldings out{.slots = static_cast<int>(kKept)};
  for (const Kept& kept : kept_)
    if (!kept.id.empty()) out.in_slots.push_back(kept.id);
  out.in_host = out.in_slots;
  return out;
}

std::shared_ptr<const Adapter> AdapterStore::load(const std::string& path) {
  const LoraFile file = unwrap(read_lora_file(path, names_, max_rank_));
  auto adapter = std::make_shared<Adapter>(Adapter{next_id_++, {}, 0, false});
  for (const LoraTerm& term : file.terms) {
    const at::Tensor down = copy_to(placement_, term.down), up = copy_to(placement_, term.up);
    adapter->bytes += static_cast<std::int64_t>(down.nbytes() + up.nbytes());
    adapter->changes_text |= term.target->part != LoraPart::kTransformer;
    std::int64_t row = 0;
    for (const LoraPiece& piece : term.target->pieces) {
      adapter->terms.push_back({term.target->part, piece.slot, {down, up.narrow(0, row, piece.rows), piece.first_row, term.scale}});
      row += piece.rows;
    }
  }
  return adapter;
}

}  // namespace ditfleet::pipeline
