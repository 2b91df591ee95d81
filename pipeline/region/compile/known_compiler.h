// Which compiler made the programs for this processor, kept in the kernel cache beside them. Their keys name it, so
// that a machine where none is installed must know it to ask for them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "pipeline/region/compile/compiler.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::kernel_cache {
class KernelCache;
}

namespace ditfleet::region {

// Under which the cache keeps it: by model and features of the processor, as the kernel tells them. Nothing where it
// does not.
std::optional<kernel_cache::Key> compiler_key();

// Keeps what `compiler`, cpu_jit's, is, in place of another. Thread safe; blocks as KernelCache::get_or_compile does.
void remember_compiler(kernel_cache::KernelCache& cache, const Compiler& compiler);

// Stands for the compiler that the cache knows: its keys are the same, and it compiles nothing (absent_cpu_jit()).
// `missing` says why the compiler itself cannot be had. kNotFound: the cache knows none.
Result<std::shared_ptr<const Compiler>> remembered_compiler(kernel_cache::KernelCache& cache,
                                                            const std::string& missing);

}  // namespace ditfleet::region
