#include "pipeline/memory/part_sequence.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <map>
#include <optional>
#include <utility>

#include "pipeline/device/device.h"

namespace ditfleet::pipeline {

namespace {

// The allocator's memory belongs to a stream. Sequences that do not wait for each other share a stream, so that one
// sequence can use memory that another has freed.
enum class Use { kStaying, kEncoding };
c10::Stream shared_stream(Use use, c10::Device device) {
  static std::mutex mutex;
  static std::map<std::pair<Use, c10::DeviceIndex>, c10::Stream> streams;
  const std::lock_guard lock(mutex);
  const auto key = std::pair(use, device.index());
  auto found = streams.find(key);
  if (found == streams.end())
    found = streams.emplace(key, c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)).first;
  return found->second;
}

}  // namespace

struct PartSequence::Streams {
  Streams(c10::Device where, bool repeats)
      : guard(where.type()),
        copies(repeats ? guard.getStreamFromGlobalPool(where) : shared_stream(Use::kEncoding, where)),
        staying(shared_stream(Use::kStaying, where)) {}
  const c10::impl::VirtualGuardImpl guard;
  const c10::Stream copies, staying;
};

struct PartSequence::Entry {
  std::unique_ptr<WeightPart> part;
  bool kept = false;
  bool arriving = false;                    // begin() waits for `arrived`
  std::optional<c10::Event> arrived, used;  // on a GPU
  std::optional<c10::Event> begun, ended;   // of a measured pass, on a GPU
  std::chrono::steady_clock::time_point start;
  std::chrono::duration<double> took{0};
};

PartSequence::PartSequence(const Placement& placement, const std::string& name, bool repeats)
    : device_(placement.device),
      key_(placement.host_key.empty() ? "" : placement.host_key + '/' + name),
      repeats_(repeats),
      on_host_(placement.on_host),
      copies_ahead_(!placement.real_device().is_cpu()),
      streams_(device_.is_cuda() ? std::make_unique<Streams>(device_, repeats) : nullptr) {}

PartSequence::~PartSequence() {
  if (!streams_) return;
  try {  // copies may still read the host's memory
    synchronize(device_);
  } catch (...) {  // the device has failed, so nothing runs there
  }
}

void PartSequence::add(std::unique_ptr<WeightPart> part) {
  bytes_ += part->bytes();
  largest_ = std::max(largest_, part->bytes());
  if (!key_.empty()) part->share(key_ + '/' + std::to_string(parts_.size()));
  if (on_host_) {
    part->leave();
  } else {
    if (streams_) part->pack();
    kept_bytes_ += part->bytes();
  }
  auto entry = std::make_unique<Entry>();
  entry->part = std::move(part);
  entry->kept = !on_host_;
  if (streams_) {
    entry->arrived.emplace(device_.type());
    entry->used.emplace(device_.type());
  }
  parts_.push_back(std::move(entry));
}

// Distributes the bytes that leave evenly over the parts, because parts take about equally long. A part leaves if fewer
// bytes have left so far than its share of the way.
std::vector<std::size_t> PartSequence::spread(std::int64_t bytes) const {
  std::vector<std::size_t> chosen;
  const std::int64_t leaving = bytes_ - std::min(bytes, bytes_), count = static_cast<std::int64_t>(parts_.size());
  std::int64_t left = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const double share = static_cast<double>(leaving) * static_cast<double>(i + 1) / static_cast<double>(count);
    if (static_cast<double>(left) < share)
      left += parts_[i]->part->bytes();
    else
      chosen.push_back(i);
  }
  for (; left < leaving && !chosen.empty(); chosen.pop_back()) left += parts_[chosen.back()]->part->bytes();
  return chosen;
}

void PartSequence::keep(std::int64_t bytes, bool wait) {
  const std::unique_lock lock(mutex_);
  const auto chosen = spread(std::max<std::int64_t>(0, bytes));
  const auto remove = [&](std::size_t i) {
    Entry& entry = *parts_[i];
    if (departs_ && entry.part->on_device() && !entry.part->has_host_copy()) departs_(i);
    entry.part->leave();
    if (std::exchange(entry.kept, false)) {
      kept_bytes_ -= entry.part->bytes();
      ++moves_;
    }
  };
  synchronize(device_);
  for (std::size_t i = 0; i < parts_.size(); ++i)
    if (!std::binary_search(chosen.begin(), chosen.end(), i)) remove(i);
  try {
    for (const std::size_t i : chosen) {
      fetch(i, /*to_stay=*/true);
      if (std::exchange(parts_[i]->kept, true)) continue;
      kept_bytes_ += parts_[i]->part->bytes();
      ++moves_;
    }
  } catch (...) {
    synchronize(device_);
    for (std::size_t i = 0; i < parts_.size(); ++i) remove(i);
    throw;
  }
  if (!wait) return;
  synchronize(device_);
  for (const std::size_t i : chosen) parts_[i]->arriving = false;
}

void PartSequence::fetch(std::size_t i, bool to_stay) {
  Entry& entry = *parts_[i];
  if (entry.part->on_device()) return;
  c10::OptionalStreamGuard stream;
  if (streams_) stream.reset_stream(to_stay ? streams_->staying : streams_->copies);
  entry.part->enter();
  if (arrived_) arrived_(i);
  if (!streams_) return;
  entry.arrived->record(*stream.current_stream());
  entry.arriving = true;
}

void PartSequence::begin(std::size_t i) {
  Entry& entry = *parts_[i];
  fetch(i);
  if (entry.arriving) entry.arrived->block(streams_->guard.getStream(device_));
  if (measuring_ && streams_)
    entry.begun.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT).record(streams_->guard.getStream(device_));
  if (measuring_) entry.start = std::chrono::steady_clock::now();
  if (all_stay() || !streams_) return;
  // Ahead of the next uses, as long as no more than the largest part is on its way.
  std::int64_t ahead = 0;
  for (std::size_t step = 1; step < parts_.size(); ++step) {
    const std::size_t next = i + step;
    if (next >= parts_.size() && !repeats_) break;
    const std::size_t at = next % parts_.size();
    if (parts_[at]->kept) continue;
    ahead += parts_[at]->part->bytes();
    if (ahead > largest_) break;
    fetch(at);
  }
}

void PartSequence::end(std::size_t i) {
  Entry& entry = *parts_[i];
  if (measuring_ && streams_)
    entry.ended.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT).record(streams_->guard.getStream(device_));
  if (measuring_) entry.took = std::chrono::steady_clock::now() - entry.start;
  if (measuring_ && i + 1 == parts_.size()) measuring_ = false;
  if (entry.kept) return;
  if (streams_) {
    // The memory goes back to the copies' stream, which waits until the part has been read.
    entry.used->record(streams_->guard.getStream(device_));
    entry.used->block(streams_->copies);
  }
  entry.part->leave();
}

void PartSequence::measure() {
  const std::unique_lock lock(mutex_);
  measuring_ = true;
}

double PartSequence::measured_s() {
  const std::unique_lock lock(mutex_);
  double seconds = 0;
  for (const auto& entry : parts_) {
    if (!streams_) {
      seconds += entry->took.count();
    } else if (entry->begun && entry->ended) {
      entry->ended->synchronize();
      seconds += entry->begun->elapsedTime(*entry->ended) / 1e3;
    }
    entry->begun.reset();
    entry->ended.reset();
  }
  return seconds;
}

void PartSequence::finish() { Pass(this).finish(); }

void PartSequence::Pass::finish() {
  if (!sequence_) return;
  for (const auto& entry : sequence_->parts_)
    if (!entry->kept) entry->part->leave();
}

PartSequence::Pass::Pass(PartSequence* sequence) : sequence_(sequence), exceptions_(std::uncaught_exceptions()) {
  if (sequence_) lock_ = std::unique_lock(sequence_->mutex_);
}

PartSequence::Pass::~Pass() {
  if (!sequence_) return;
  const bool failed = std::uncaught_exceptions() > exceptions_;
  if (failed) {  // kernels may still read a part that end() was not called for
    try {
      synchronize(sequence_->device_);
    } catch (...) {  // the device has failed, which the exception in flight tells
    }
  }
  if (failed || !sequence_->repeats_) finish();
}

void PartSequence::Pass::begin(std::size_t i) {
  if (sequence_) sequence_->begin(i);
}
void PartSequence::Pass::end(std::size_t i) {
  if (sequence_) sequence_->end(i);
}

}  // namespace ditfleet::pipeline
