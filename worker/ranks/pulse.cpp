#include "worker/ranks/pulse.h"

#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <utility>

namespace ditfleet::worker {

std::optional<int> SilentRanks::check(std::span<const TickCount> counts) {
  std::optional<int> silent;
  for (int r = 0; r < static_cast<int>(seen_.size()); ++r) {
    if (r == self_) continue;
    const std::uint32_t count = counts[static_cast<std::size_t>(r)];
    Seen& seen = seen_[static_cast<std::size_t>(r)];
    if (count == 0 || count != seen.count)
      seen = {count, 0};
    else if (++seen.ticks >= kSilent / kTick && !silent)
      silent = r;
  }
  return silent;
}

Result<std::shared_ptr<PulseMemory>> PulseMemory::create(int size) {
  const auto count = static_cast<std::size_t>(size);
  void* const memory =
      ::mmap(nullptr, count * sizeof(TickCount), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return unavailable(std::string("[ranks] cannot allocate shared memory: ") + std::strerror(errno));
  return std::shared_ptr<PulseMemory>(new PulseMemory({new (memory) TickCount[count]{}, count}));
}

PulseMemory::~PulseMemory() { ::munmap(counts_.data(), counts_.size_bytes()); }

Pulse::Pulse(std::shared_ptr<PulseMemory> memory, int self, std::function<void(int rank)> silent)
    : thread_([this, memory = std::move(memory), self, silent = std::move(silent)] {
        ::pthread_setname_np(::pthread_self(), "pulse");
        const auto counts = memory->counts();
        SilentRanks others(self, static_cast<int>(counts.size()));
        std::unique_lock lock(mutex_);
        do {
          ++counts[static_cast<std::size_t>(self)];
          if (const auto rank = others.check(counts)) {
            silent(*rank);
            others.forgive(*rank);
          }
        } while (!end_.wait_for(lock, kTick, [this] { return ended_; }));
      }) {}

Pulse::~Pulse() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  end_.notify_one();
  thread_.join();
}

bool is_debugged(pid_t process) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("TracerPid:")) return line.find_first_of("123456789") != line.npos;
  return false;
}

std::string rank_name(int rank, pid_t process) {
  return "[ranks] rank " + std::to_string(rank) + " (process " + std::to_string(process) + ")";
}

}  // namespace ditfleet::worker
