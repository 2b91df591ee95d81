// The kernel cache of the tests.
#pragma once

#include <memory>

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::testing {

// In memory and, if DITFLEET_TEST_PROGRAMS names a folder, there: shared with other tests and later runs. A program
// that is no longer right is not found there: its key covers its whole source, the compiler's version and options, and
// the architecture or the processor, and tests/run.sh takes another folder for other code in pipeline/region/compile.
// Tests of compiling itself, as most region_* tests, use another cache.
std::shared_ptr<kernel_cache::KernelCache> shared_programs();

}  // namespace ditfleet::testing
