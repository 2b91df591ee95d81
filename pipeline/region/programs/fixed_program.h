// GPU programs of one source, whatever the model: what is no block, but has to be compiled and shared as blocks are.
#pragma once

#include <string>

#include "pipeline/region/compile/cached.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::region {

// What such a source begins with: the types bf16 and i64, load() and put() between an element and a float.
extern const char* const kElementText;

struct FixedProgram {
  std::string name;  // stands where a block's name does
  Source source;
};

kernel_cache::Key key_of(const FixedProgram& program, const Compiler& compiler, const std::string& arch);

// As compile_cached() for a block.
Result<CachedProgram> compile_fixed(kernel_cache::KernelCache& cache, const FixedProgram& program,
                                    const Compiler& compiler, const std::string& arch, const Validator& usable = {});

}  // namespace ditfleet::region
