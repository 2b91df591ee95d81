#include "worker/units/watchdog.h"

#include <algorithm>

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

constexpr int kFirst = 5, kSlowest = 20;
constexpr int kRanksShare = 24, kSlowestOfRanks = 2;
constexpr auto kLeastOfRanks = 2500ms;
constexpr std::size_t kMostClasses = 1024;

const char* name_of(Watchdog::Work work) {
  switch (work) {
    case Watchdog::Work::kAdapters: return "loading the adapters";
    case Watchdog::Work::kText: return "encoding the text";
    case Watchdog::Work::kFirstStep: return "the first step";
    case Watchdog::Work::kStep: return "a step";
    case Watchdog::Work::kPreview: return "decoding a preview";
    case Watchdog::Work::kDecode: return "decoding the image";
    case Watchdog::Work::kImage: return "encoding the image";
  }
  return "";
}

}  // namespace

std::chrono::milliseconds Watchdog::interval() const {
  return std::clamp<std::chrono::milliseconds>(least_ / 4, 1ms, ranks_ ? 200ms : 1s);
}

Watchdog::Clock::duration Watchdog::limit(const Kind& kind) const {
  const auto slowest = slowest_.find(kind);
  if (slowest == slowest_.end()) return kFirst * Clock::duration(least_);
  const auto usual = std::max<Clock::duration>(least_, kSlowest * slowest->second);
  if (!ranks_ || kind.first != Work::kStep || !slowest_.contains({Work::kDecode, kind.second})) return usual;
  return std::min<Clock::duration>(
      usual, std::max<Clock::duration>(kLeastOfRanks, least_ / kRanksShare) + kSlowestOfRanks * slowest->second);
}

void Watchdog::began(const std::string& nonce, Work work, const std::string& class_key, Clock::time_point now) {
  ended(nonce, now);
  watches_.insert_or_assign(nonce, Watch{{work, class_key}, now});
}

void Watchdog::ended(const std::string& nonce, Clock::time_point now) {
  skip_stop(now);
  const auto watch = watches_.extract(nonce);
  if (!watch || watch.mapped().kind.first == Work::kAdapters) return;
  if (slowest_.size() >= kMostClasses) slowest_.clear();
  auto& slowest = slowest_[watch.mapped().kind];
  slowest = std::max(slowest, now - watch.mapped().since);
}

void Watchdog::adapters_progressed(Clock::time_point now) {
  for (auto& [nonce, watch] : watches_) {
    if (watch.kind.first == Work::kAdapters) watch.since = now;
  }
}

void Watchdog::skip_stop(Clock::time_point now) {
  const auto lost = checked_ ? now - *checked_ - 2 * interval() : Clock::duration::zero();
  checked_ = now;
  if (lost <= Clock::duration::zero()) return;
  for (auto& [nonce, watch] : watches_) watch.since = std::min(now, watch.since + lost);
}

std::optional<Watchdog::Stuck> Watchdog::check(Clock::time_point now) {
  skip_stop(now);
  const std::pair<const std::string, Watch>* stuck = nullptr;  // the longest: others may wait for it
  for (const auto& one : watches_) {
    const Watch& watch = one.second;
    if (now - watch.since > limit(watch.kind) && (!stuck || watch.since < stuck->second.since)) stuck = &one;
  }
  if (!stuck) return std::nullopt;
  const auto& [work, class_key] = stuck->second.kind;
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(now - stuck->second.since);
  return Stuck{stuck->first, std::string("[worker] ") + name_of(work) +
                                 (class_key.empty() ? "" : " of class " + class_key) + " made no progress for " +
                                 std::to_string(took.count()) +
                                 " ms, so this worker ends; if the device is that slow, raise worker.stuck_ms (now " +
                                 std::to_string(least_.count()) + ")"};
}

}  // namespace ditfleet::worker
