// Preloaded into redis-server: its wall clock differs from the host's by the number of seconds in the first eight bytes
// of the file CLOCK_SHIFT_FILE, which a test may change at any time. If the next eight bytes are not 0, it is their
// number of microseconds and stands still.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

// The shift in seconds, then the fixed time in microseconds.
std::int64_t number(int index) {
  static const auto* file = []() -> const std::atomic<std::int64_t>* {
    const char* path = std::getenv("CLOCK_SHIFT_FILE");
    const int fd = path ? ::open(path, O_RDONLY | O_CLOEXEC) : -1;
    void* at = fd < 0 ? MAP_FAILED : ::mmap(nullptr, 2 * sizeof(std::int64_t), PROT_READ, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : static_cast<const std::atomic<std::int64_t>*>(at);
  }();
  return file ? file[index].load() : 0;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE) return result;
  time->tv_sec += number(0);
  if (const std::int64_t fixed_us = number(1)) {
    time->tv_sec = fixed_us / 1'000'000;
    time->tv_nsec = fixed_us % 1'000'000 * 1000;
  }
  return result;
}

int gettimeofday(struct timeval* time, void*) noexcept {
  struct timespec now {};
  clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) noexcept {
  struct timespec now {};
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
