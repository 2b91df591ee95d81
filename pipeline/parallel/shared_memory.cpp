#include "pipeline/parallel/shared_memory.h"

#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstring>
#include <vector>

#include "shared/core/missing_peer.h"

namespace ditfleet::pipeline::parallel {
namespace {

using Clock = std::chrono::steady_clock;
constexpr Clock::duration kSlice = std::chrono::milliseconds(100);  // of a wait
constexpr std::uint64_t kAborted = std::uint64_t{1} << 63;

// Shared by processes that may be killed at any instruction, so there are no locks.
struct Control {
  std::int32_t size;
  std::int64_t timeout_ms;
  std::uint64_t staging_bytes;
  std::atomic<std::uint64_t> failure;  // 0: none; kAborted; else a bit for each rank that did not arrive
  std::atomic<std::uint32_t> event;    // futex: changes when the last rank arrives and when the group fails
  std::array<std::atomic<std::uint32_t>, kMostRanks> arrived;  // the last round at whose end each rank arrived
  ArrivalFlags flags;
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

// What a rank sends in one round; its bytes follow.
struct Staging {
  struct Part {
    std::uint64_t offset, bytes;
    std::uint64_t left;  // of the message, including `bytes`
  };
  std::array<Part, kMostRanks> to;
  bool more;  // another round is needed
};

constexpr std::uint64_t aligned(std::uint64_t bytes) { return (bytes + 63) / 64 * 64; }
constexpr std::uint64_t bit(int rank) { return std::uint64_t{1} << rank; }

// Bytes of one buffer, and of the whole memory.
std::uint64_t buffer_bytes(std::uint64_t staging_bytes) { return aligned(sizeof(Staging)) + aligned(staging_bytes); }
std::uint64_t memory_bytes(int size, std::uint64_t staging_bytes) {
  return aligned(sizeof(Control)) + 2 * size * buffer_bytes(staging_bytes);
}

void copy(std::byte* to, std::span<const std::byte> from) {
  if (!from.empty() && to != from.data()) std::memcpy(to, from.data(), from.size());
}

std::string names_of(std::uint64_t ranks) {
  std::string names;
  for (int r = 0; r < kMostRanks; ++r)
    if (ranks & bit(r)) names += (names.empty() ? "" : ", ") + std::to_string(r);
  return (names.find(',') == names.npos ? "rank " : "ranks ") + names;
}

Error cannot(const std::string& what) { return unavailable("[parallel] cannot " + what + ": " + std::strerror(errno)); }

class SharedMemoryGroup final : public HostGroup {
 public:
  SharedMemoryGroup(void* memory, std::size_t bytes, int rank)
      : HostGroup(rank, static_cast<Control*>(memory)->size, c10::Device(c10::DeviceType::CPU)),
        control_(static_cast<Control*>(memory)),
        bytes_(bytes) {}
  ~SharedMemoryGroup() override { ::munmap(control_, bytes_); }

  Result<void> all_to_all(std::span<const at::Tensor> send, std::span<const at::Tensor> receive) override {
    if (auto checked = check(send, receive); !checked) return checked;
    std::vector<std::span<std::byte>> sent, expected;  // what is left of each
    for (int r = 0; r < size(); ++r) {
      sent.push_back(bytes_of(send[send.size() == 1 ? 0 : r]));
      expected.push_back(bytes_of(receive[r]));
    }
    copy(expected[rank()].data(), sent[rank()]);
    sent[rank()] = {};
    for (bool more = true; more;) {
      more = write_round(sent);
      if (auto ended = end_round(); !ended) return ended;
      for (int r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        Staging& theirs = staging(r, round_);
        const Staging::Part& part = theirs.to[rank()];
        if (part.left != expected[r].size()) {
          abort();
          return invalid_argument("[parallel] rank " + std::to_string(r) + " sends " + std::to_string(part.left) +
                                  " bytes but rank " + std::to_string(rank()) + " expects " +
                                  std::to_string(expected[r].size()));
        }
        copy(expected[r].data(), {content(theirs) + part.offset, part.bytes});
        expected[r] = expected[r].subspan(part.bytes);
        more |= theirs.more;
      }
    }
    return {};
  }

  Result<void> broadcast(const at::Tensor& tensor, int root) override {
    std::vector<at::Tensor> send(size()), receive(size());
    if (root == rank()) send.assign(size(), tensor);
    receive[root] = tensor;
    return all_to_all(send, receive);
  }

  void abort() noexcept override { fail(kAborted); }

  ArrivalFlags& flags() override { return control_->flags; }
  std::chrono::milliseconds timeout() const override { return std::chrono::milliseconds(control_->timeout_ms); }
  void report_missing(std::uint64_t ranks) noexcept override { fail(ranks); }
  std::optional<Error> failure() const override {
    const std::uint64_t why = control_->failure;
    if (why == 0) return {};
    if (why == kAborted) return missing_peer("[parallel] the group was aborted");
    return missing_peer("[parallel] " + names_of(why) + " of " + std::to_string(size()) + " did not arrive within " +
                        std::to_string(control_->timeout_ms) + " ms");
  }

 private:
  // Each rank has two buffers and uses them in turn. When it writes to one again, all ranks have ended the round
  // between, and so have read the older one.
  Staging& staging(int rank, std::uint32_t round) const {
    auto* const first = reinterpret_cast<std::byte*>(control_) + aligned(sizeof(Control));
    return *reinterpret_cast<Staging*>(first + (2 * rank + round % 2) * buffer_bytes(control_->staging_bytes));
  }
  static std::byte* content(Staging& s) { return reinterpret_cast<std::byte*>(&s) + aligned(sizeof(Staging)); }

  // Moves what fits into the buffer of the next round; returns whether bytes are left.
  bool write_round(std::vector<std::span<std::byte>>& sent) {
    Staging& mine = staging(rank(), round_ + 1);
    mine.more = false;
    std::uint64_t used = 0;
    for (int r = 0; r < size(); ++r) {
      const std::uint64_t n = std::min<std::uint64_t>(sent[r].size(), control_->staging_bytes - used);
      mine.to[r] = {used, n, sent[r].size()};
      copy(content(mine) + used, sent[r].first(n));
      sent[r] = sent[r].subspan(n);
      used += n;
      mine.more |= !sent[r].empty();
    }
    return mine.more;
  }

  // Waits until all ranks have ended this round. Time in which this process is stopped does not count: the others may
  // have been stopped too.
  Result<void> end_round() {
    auto seen = Clock::now();
    Clock::duration waited{0};
    control_->arrived[rank()] = ++round_;
    if (missing() == 0) wake();
    for (;;) {
      const std::uint32_t event = control_->event;
      if (auto failed = failure()) return *failed;
      const std::uint64_t late = missing();
      if (late == 0) return {};
      const auto now = Clock::now();
      waited += std::min(now - seen, 2 * kSlice);
      seen = now;
      if (waited >= timeout()) {
        fail(late);
        continue;
      }
      const std::chrono::nanoseconds slice = std::min<Clock::duration>(kSlice, timeout() - waited);
      const timespec wait{0, slice.count()};
      ::syscall(SYS_futex, &control_->event, FUTEX_WAIT, event, &wait, nullptr, 0);
    }
  }

  std::uint64_t missing() const {
    std::uint64_t ranks = 0;
    for (int r = 0; r < size(); ++r)
      if (static_cast<std::int32_t>(control_->arrived[r] - round_) < 0) ranks |= bit(r);
    return ranks;
  }

  void fail(std::uint64_t why) noexcept {
    std::uint64_t none = 0;
    control_->failure.compare_exchange_strong(none, why);
    wake();
  }

  void wake() noexcept {
    ++control_->event;
    ::syscall(SYS_futex, &control_->event, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  Control* const control_;
  const std::size_t bytes_;
  std::uint32_t round_ = 0;  // the last one that this rank ended
};

}  // namespace

Result<UniqueFd> create_group_memory(int size, std::chrono::milliseconds timeout, std::uint64_t staging_bytes) {
  if (size < 1 || size > kMostRanks || staging_bytes == 0)
    return invalid_argument("[parallel] a group in shared memory has 1 to " + std::to_string(kMostRanks) +
                            " ranks and buffers of at least one byte");
  UniqueFd fd(::memfd_create("ditfleet-group", MFD_CLOEXEC));
  if (!fd.valid()) return cannot("create shared memory");
  // Allocated now: a page that cannot be had later would kill the process.
  const std::uint64_t bytes = memory_bytes(size, staging_bytes);
  if ((errno = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes))) != 0)
    return cannot("allocate " + std::to_string(bytes) + " bytes of shared memory");
  void* const memory = ::mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return cannot("map shared memory");
  auto* const control = new (memory) Control{};
  control->size = size;
  control->timeout_ms = timeout.count();
  control->staging_bytes = staging_bytes;
  ::munmap(memory, sizeof(Control));
  return fd;
}

Result<std::unique_ptr<HostGroup>> join_group_memory(int fd, int rank) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return cannot("read the size of shared memory");
  const auto bytes = static_cast<std::size_t>(status.st_size);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return cannot("map shared memory");
  auto group = std::make_unique<SharedMemoryGroup>(memory, bytes, rank);
  if (rank < 0 || rank >= group->size())
    return invalid_argument("[parallel] there is no rank " + std::to_string(rank) + " in a group of " +
                            std::to_string(group->size()));
  return std::unique_ptr<HostGroup>(std::move(group));
}

}  // namespace ditfleet::pipeline::parallel
