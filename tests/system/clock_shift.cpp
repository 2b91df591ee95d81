// Preloaded into redis-server: its wall clock differs from the host's by the number of seconds in the first eight bytes
// of the file CLOCK_SHIFT_FILE, which a test may change at any time.
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

std::int64_t shift_s() {
  static const auto* file = []() -> const std::atomic<std::int64_t>* {
    const char* path = std::getenv("CLOCK_SHIFT_FILE");
    const int fd = path ? ::open(path, O_RDONLY | O_CLOEXEC) : -1;
    void* at = fd < 0 ? MAP_FAILED : ::mmap(nullptr, sizeof(std::int64_t), PROT_READ, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? nullptr : static_cast<const std::atomic<std::int64_t>*>(at);
  }();
  return file ? file->load() : 0;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, struct timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) time->tv_sec += shift_s();
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
