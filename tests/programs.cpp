#include "tests/programs.h"

#include <cstdlib>

#include "shared/kernel_cache/cache.h"
#include "shared/kernel_cache/open.h"

namespace ditfleet::testing {

std::shared_ptr<kernel_cache::KernelCache> shared_programs() {
  static const std::shared_ptr<kernel_cache::KernelCache> cache = [] {
    config::Settings settings;
    const char* folder = std::getenv("DITFLEET_TEST_PROGRAMS");
    settings.cache.dir = folder ? folder : "";
    if (!folder) settings.cache.disk_bytes = 0;
    return *kernel_cache::open_cache(settings);
  }();
  return cache;
}

}  // namespace ditfleet::testing
