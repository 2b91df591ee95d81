#include "pipeline/parallel/exchange.h"

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace ditfleet::pipeline::parallel {
namespace {

constexpr std::chrono::milliseconds kCheckInterval{20};
constexpr std::size_t kAlignment = 256;
// More rounds than a device can have in its queue.
constexpr std::uint32_t kAnyRound = 1 << 20;

// A longer time between two checks means that the whole host slept.
constexpr std::chrono::seconds kPause{1};

constexpr std::uint64_t bit(int rank) { return std::uint64_t{1} << rank; }

// Whether round a is later than b. Rounds wrap around.
bool later(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; }

}  // namespace

Exchange::Exchange(HostGroup& host, std::unique_ptr<CopyDevice> device) : host_(host), device_(std::move(device)) {
  for (auto& round : round_) round = 0;
}

Result<void> Exchange::expect(Phase phase) const {
  if (auto failed = host_.failure()) return *failed;
  if (phase_ != phase) return invalid_argument("[parallel] the calls of an exchange are out of order");
  return {};
}

Result<bool> Exchange::begin(int first, int count, Bytes slots) {
  if (auto idle = expect(Phase::kIdle); !idle) return idle.error();
  if (slots != slots_) {
    const std::size_t back = (slots[0] + kAlignment - 1) / kAlignment * kAlignment;
    auto met = device_->meet(back + slots[1]);
    if (!met) return met.error();
    first_ = first;
    count_ = count;
    slots_ = slots;
    refused_ = !*met;
    back_ = back;
  }
  if (refused_) return false;
  if (auto ordered = device_->copies_follow(); !ordered) return ordered.error();
  phase_ = Phase::kThere;
  return true;
}

Result<void> Exchange::send(int rank, const Rows& rows, std::size_t offset_in_slot, std::size_t pitch) {
  if (auto failed = host_.failure()) return *failed;
  if (rows.width == 0 || rows.count == 0) return {};
  const std::size_t size = slots_[phase_ == Phase::kThere ? 0 : 1];
  if ((phase_ != Phase::kThere && phase_ != Phase::kBack) || rank < first_ || rank >= first_ + count_ ||
      offset_in_slot + (rows.count - 1) * pitch + rows.width > size)
    return invalid_argument("[parallel] rows of an exchange do not fit the slot of rank " + std::to_string(rank));
  return device_->copy(rows, device_->memory(rank) + offset() + offset_in_slot, pitch);
}

Result<void> Exchange::raise(int rank) {
  if (auto failed = host_.failure()) return *failed;
  raised_ |= bit(rank);
  return device_->raise(rank, ++round_[static_cast<std::size_t>(rank)]);
}

Result<std::byte*> Exchange::wait() {
  if (auto sent = expect(phase_ == Phase::kBack ? Phase::kBack : Phase::kThere); !sent) return sent.error();
  if (std::exchange(raised_, 0) != (bit(first_ + count_) - bit(first_)) - bit(host_.rank()))
    return invalid_argument("[parallel] an exchange waits for ranks whose flags it has not raised");
  if (auto ordered = device_->follow_copies(); !ordered) return ordered.error();
  for (int r = first_; r < first_ + count_; ++r) {
    if (r == host_.rank()) continue;
    if (auto waits = device_->wait(r, round_[static_cast<std::size_t>(r)]); !waits) return waits.error();
  }
  std::byte* const slot = device_->memory(host_.rank()) + offset();
  phase_ = phase_ == Phase::kThere ? Phase::kArrived : Phase::kIdle;
  return slot;
}

Result<void> Exchange::turn() {
  if (auto arrived = expect(Phase::kArrived); !arrived) return arrived;
  phase_ = Phase::kBack;
  return device_->copies_follow();
}

void Exchange::check(Clock::time_point now) {
  if (host_.failure()) return release();
  const auto me = static_cast<std::size_t>(host_.rank());
  const auto& at = host_.flags().at;
  const bool paused = now - checked_ > kPause;
  checked_ = now;
  std::uint64_t missing = 0;
  for (std::size_t r = 0; r < static_cast<std::size_t>(host_.size()); ++r) {
    if (r == me) continue;
    const std::uint32_t theirs = at[me][r];
    const bool late = later(at[r][me], theirs);
    Seen& seen = seen_[r];
    if (!late || !seen.late || theirs != seen.round || paused)
      seen = {theirs, late, now};
    else if (now - seen.since >= host_.timeout())
      missing |= bit(static_cast<int>(r));
  }
  if (missing != 0) host_.report_missing(missing);  // the next call releases
}

void Exchange::release() noexcept {
  auto& mine = host_.flags().at[static_cast<std::size_t>(host_.rank())];
  for (std::size_t r = 0; r < round_.size(); ++r) mine[r] = round_[r] + kAnyRound;
}

namespace {

class ExchangeGroup final : public Group {
 public:
  ExchangeGroup(std::unique_ptr<Group> base, std::shared_ptr<HostGroup> host, std::unique_ptr<Exchange> exchange,
                c10::Device device)
      : Group(host->rank(), host->size(), device),
        base_(std::move(base)),
        host_(std::move(host)),
        exchange_(std::move(exchange)),
        watch_([this] { watch(); }) {}
  ~ExchangeGroup() override {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    end_.notify_one();
    watch_.join();
    if (aborting_.joinable()) aborting_.join();
  }

  Result<void> all_to_all(std::span<const at::Tensor> send, std::span<const at::Tensor> receive) override {
    return base_->all_to_all(send, receive);
  }
  Result<void> broadcast(const at::Tensor& tensor, int root) override { return base_->broadcast(tensor, root); }
  Exchange* exchange() override { return exchange_.get(); }
  void abort() noexcept override {
    host_->abort();
    exchange_->release();  // kernels of the base group may be queued behind what the device waits for
    base_->abort();
  }

 private:
  Group& on_host() override { return *host_; }

  // Repeats releases, because ranks that still run lower the flags again.
  void watch() {
    std::unique_lock lock(mutex_);
    while (!end_.wait_for(lock, kCheckInterval, [&] { return ended_; })) {
      exchange_->check(Exchange::Clock::now());
      if (host_->failure() && !aborting_.joinable()) aborting_ = std::thread([this] { base_->abort(); });
    }
  }

  const std::unique_ptr<Group> base_;
  const std::shared_ptr<HostGroup> host_;
  const std::unique_ptr<Exchange> exchange_;
  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread aborting_;  // the base group, which may block
  std::thread watch_;     // last: uses the other members
};

}  // namespace

std::unique_ptr<Group> add_exchange(std::unique_ptr<Group> base, std::shared_ptr<HostGroup> host,
                                    std::unique_ptr<Exchange> exchange, c10::Device device) {
  return std::make_unique<ExchangeGroup>(std::move(base), std::move(host), std::move(exchange), device);
}

}  // namespace ditfleet::pipeline::parallel
