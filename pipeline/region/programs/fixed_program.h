// Hand-written CUDA programs, compiled, cached and shared like generated ones. Their source is the same for all models.
#pragma once

#include <string>

#include "pipeline/region/compile/compiler.h"
#include "shared/kernel_cache/key.h"

namespace ditfleet::region {

// The beginning of such a source: the types bf16 and i64; load() and put() convert between an element and a float.
extern const char* const kElementText;

struct FixedProgram {
  std::string name;  // used where a block's name would be
  Source source;
};

kernel_cache::Key key_of(const FixedProgram& program, const Compiler& compiler, const std::string& arch);

}  // namespace ditfleet::region
