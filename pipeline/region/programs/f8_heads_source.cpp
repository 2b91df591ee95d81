#include "pipeline/region/programs/f8_heads_source.h"

#include <sstream>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {
namespace {

constexpr int kThreads = 256;

// A thread has 8 values of a head, 16 bytes, at a time. Without their sign bits, bf16 numbers are in the order of
// unsigned integers, and a NaN is the largest.
constexpr const char* kText = R"(struct Args {
  i64 v, codes, largest, scales, tokens, heads, size, sample_stride, token_stride, head_stride, parts;
};
struct __align__(16) Word { unsigned w[4]; };
struct Place {
  const bf16* v;
  unsigned char* codes;
  i64 head;
  unsigned part, in_row, vectors;
  __device__ __forceinline__ Place(const Args& a)
      : head(blockIdx.x / (unsigned)a.parts), part(blockIdx.x % (unsigned)a.parts), in_row((unsigned)a.size / 8),
        vectors((unsigned)a.tokens * in_row) {
    const i64 sample = head / a.heads, of_sample = head % a.heads;
    v = (const bf16*)a.v + sample * a.sample_stride + of_sample * a.head_stride;
    codes = (unsigned char*)a.codes + (sample * a.tokens * a.heads + of_sample) * a.size;
  }
};
extern "C" __global__ void __launch_bounds__(kThreads) f8_heads_largest(const Args a) {
  const Place p(a);
  unsigned most = 0;
  for (unsigned i = p.part * kThreads + threadIdx.x; i < p.vectors; i += (unsigned)a.parts * kThreads) {
    const unsigned token = i / p.in_row;
    const Word word = *(const Word*)(p.v + token * a.token_stride + (i - token * p.in_row) * 8);
#pragma unroll
    for (int w = 0; w < 4; ++w) most = max(most, max(word.w[w] & 0x7fffu, word.w[w] >> 16 & 0x7fffu));
  }
  most = __reduce_max_sync(0xffffffffu, most);
  __shared__ unsigned warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) most = max(most, warps[w]);
  atomicMax((unsigned*)a.largest + p.head, most << 16);
}
extern "C" __global__ void __launch_bounds__(kThreads) f8_heads_codes(const Args a) {
  const Place p(a);
  float scale = __uint_as_float(((const unsigned*)a.largest)[p.head]) * (1.0f / kLargest);
  scale = scale < kLeastScale ? kLeastScale : scale;
  if (p.part == 0 && threadIdx.x == 0) ((float*)a.scales)[p.head] = scale;
  const float factor = __frcp_rn(scale);
  for (unsigned i = p.part * kThreads + threadIdx.x; i < p.vectors; i += (unsigned)a.parts * kThreads) {
    const unsigned token = i / p.in_row, column = (i - token * p.in_row) * 8;
    const Word word = *(const Word*)(p.v + token * a.token_stride + column);
    unsigned out[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      unsigned short half[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float low = __uint_as_float(word.w[2 * w + h] << 16) * factor,
                    high = __uint_as_float(word.w[2 * w + h] & 0xffff0000u) * factor;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(half[h]) : "f"(high), "f"(low));
      }
      out[w] = half[0] | (unsigned)half[1] << 16;
    }
    *(uint2*)(p.codes + (i64)token * a.heads * a.size + column) = make_uint2(out[0], out[1]);
  }
}
)";

}  // namespace

FixedProgram f8_heads_program() {
  FixedProgram program{"f8_heads", {}};
  std::ostringstream constants;
  constants << "const int kThreads = " << kThreads << ";\nconst float kLargest = " << kLargestF8
            << ", kLeastScale = " << kLeastRowScale << "f;\n";
  program.source.text = kElementText + constants.str() + kText;
  for (const char* name : {"f8_heads_largest", "f8_heads_codes"})
    program.source.kernels.push_back(
        {.name = name, .variants = false, .threads = kThreads, .rows_per_block = 1, .argument_words = 11});
  return program;
}

}  // namespace ditfleet::region
