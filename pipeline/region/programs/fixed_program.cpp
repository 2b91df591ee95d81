#include "pipeline/region/programs/fixed_program.h"

namespace ditfleet::region {

const char* const kElementText = R"(typedef unsigned short bf16;
typedef long long i64;
__device__ __forceinline__ float load(float v) { return v; }
__device__ __forceinline__ float load(bf16 v) { return __uint_as_float((unsigned)v << 16); }
__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(bf16* p, float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  *p = r;
}
)";

kernel_cache::Key key_of(const FixedProgram& program, const Compiler& compiler, const std::string& arch) {
  kernel_cache::KeyBuilder key;
  key.add("program", program.name)
      .add("schema", 1)
      .add("source", program.source.text)
      .add("compiler", compiler.identity())
      .add("target", compiler.target(arch));
  for (const auto& option : compiler.options(arch)) key.add("option", option);
  return key.finish();
}

}  // namespace ditfleet::region
