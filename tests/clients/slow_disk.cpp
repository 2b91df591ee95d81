// Preloaded into a worker, makes its disk slow: a file that is moved into the folder $SLOW_DISK arrives $SLOW_DISK_MS
// milliseconds later.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" int rename(const char* from, const char* to) noexcept {
  static const auto real = reinterpret_cast<int (*)(const char*, const char*)>(dlsym(RTLD_NEXT, "rename"));
  static const char* const folder = std::getenv("SLOW_DISK");
  static const char* const milliseconds = std::getenv("SLOW_DISK_MS");
  if (folder && milliseconds && std::strncmp(to, folder, std::strlen(folder)) == 0)
    ::usleep(static_cast<unsigned>(std::atoi(milliseconds)) * 1000);
  return real(from, to);
}
