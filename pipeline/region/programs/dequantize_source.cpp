#include "pipeline/region/programs/dequantize_source.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "pipeline/weights/gguf.h"
#include "pipeline/weights/nf4.h"

namespace ditfleet::region {
namespace {

constexpr int kThreads = 256;

// Codes of fp8 become floats by moving their bits: the difference between the exponents' biases is a factor.
constexpr const char* kText = R"(struct Args { i64 codes, scales, to, count, in; };
struct __align__(16) Word { unsigned w[4]; };
struct Nf4 {
  __device__ static int bytes() { return 8; }
  __device__ static float value(const unsigned char* codes, int e, const float* book) {
    const unsigned byte = codes[e / 2];
    return book[e % 2 == 0 ? byte >> 4 : byte & 15u];
  }
  __device__ static i64 scale(i64 i, i64) { return i / 64; }
};
struct E4m3 {
  __device__ static int bytes() { return 16; }
  __device__ static float value(const unsigned char* codes, int e, const float*) {
    const unsigned c = codes[e];
    const float v = __uint_as_float((c & 0x80u) << 24 | (c & 0x7fu) << 20) * __uint_as_float(247u << 23);
    return (c & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : v;
  }
  __device__ static i64 scale(i64 i, i64 in) { return i / in; }
};
struct E5m2 {
  __device__ static int bytes() { return 16; }
  __device__ static float value(const unsigned char* codes, int e, const float*) {
    const unsigned c = codes[e];
    const float v = __uint_as_float((c & 0x80u) << 24 | (c & 0x7fu) << 21) * __uint_as_float(239u << 23);
    if ((c & 0x7fu) < 0x7cu) return v;
    return (c & 0x7fu) == 0x7cu ? v * __uint_as_float(255u << 23) : __uint_as_float(0x7fffffffu);
  }
  __device__ static i64 scale(i64 i, i64 in) { return i / in; }
};
template <typename Format, typename T>
__device__ __forceinline__ void dequantize(const Args& a, const float* book) {
  const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * kValues;
  if (first >= a.count) return;
  const float* scales = (const float*)a.scales;
  T* to = (T*)a.to + first;
  const bool whole = first + kValues <= a.count && (a.in % kValues == 0 || Format::bytes() == 8) && (a.to & 15) == 0;
  const unsigned char* from = (const unsigned char*)a.codes + first / kValues * Format::bytes();
  if (whole) {
    union { Word word; unsigned char code[16]; } codes;
    codes.word.w[0] = ((const unsigned*)from)[0];
    codes.word.w[1] = ((const unsigned*)from)[1];
    if (Format::bytes() == 16) {
      codes.word.w[2] = ((const unsigned*)from)[2];
      codes.word.w[3] = ((const unsigned*)from)[3];
    }
    const float scale = scales[Format::scale(first, a.in)];
    union { Word word[sizeof(T)]; T value[kValues]; } u;
#pragma unroll
    for (int e = 0; e < kValues; ++e) put(&u.value[e], Format::value(codes.code, e, book) * scale);
#pragma unroll
    for (int w = 0; w < (int)sizeof(T); ++w) ((Word*)to)[w] = u.word[w];
  } else {
    for (int e = 0; e < kValues && first + e < a.count; ++e)
      put(to + e, Format::value(from, e, book) * scales[Format::scale(first + e, a.in)]);
  }
}
)";

// Blocks begin anywhere, so bytes are read one by one. A thread's 16 values share a block.
constexpr const char* kGgufText = R"(struct Args { i64 blocks, to, count; };
struct __align__(16) Word { unsigned w[4]; };
#define FUNCTION __device__ __forceinline__
FUNCTION float half_value(const unsigned char* b) {
  const unsigned short bits = (unsigned short)(b[0] | b[1] << 8);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
FUNCTION float mul(float a, float b) { return __fmul_rn(a, b); }
FUNCTION float add(float a, float b) { return __fadd_rn(a, b); }
FUNCTION float sub(float a, float b) { return __fsub_rn(a, b); }
)";
constexpr const char* kGgufKernel =
    R"(template <int kBlock, int kBytes, float (*kValue)(const unsigned char*, int), typename T>
__device__ __forceinline__ void dequantize(const Args& a) {
  const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * kValues;
  if (first >= a.count) return;
  const unsigned char* block = (const unsigned char*)a.blocks + first / kBlock * kBytes;
  const int begin = (int)(first % kBlock);
  union { Word word[sizeof(T)]; T value[kValues]; } u;
#pragma unroll
  for (int e = 0; e < kValues; ++e) put(&u.value[e], kValue(block, begin + e));
#pragma unroll
  for (int w = 0; w < (int)sizeof(T); ++w) ((Word*)((T*)a.to + first))[w] = u.word[w];
}
)";

}  // namespace

FixedProgram gguf_program() {
  FixedProgram program{"dequantize_gguf", {}};
  Source& source = program.source;
  source.text = std::string(kElementText) + "const int kValues = " + std::to_string(kDequantizedPerThread) + ";\n" +
                kGgufText + std::string(kGgufValues) + kGgufKernel;
  for (std::uint8_t number = 1; number <= pipeline::gguf_block_count(); ++number) {
    const auto& blocks = pipeline::gguf_blocks(number);
    std::string name(blocks.name);
    std::transform(name.begin(), name.end(), name.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    for (const auto& [suffix, type] : {std::pair("_bf16", "bf16"), std::pair("_f32", "float")}) {
      source.kernels.push_back({.name = "gguf_" + name + suffix,
                                .variants = false,
                                .threads = kThreads,
                                .rows_per_block = 1,
                                .argument_words = 3});
      source.text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(kThreads) + ") " +
                     source.kernels.back().name + "(const Args a) { dequantize<" + std::to_string(blocks.values) +
                     ", " + std::to_string(blocks.bytes) + ", " + name + ", " + type + ">(a); }\n";
    }
  }
  return program;
}

FixedProgram dequantize_program() {
  FixedProgram program{"dequantize", {}};
  Source& source = program.source;
  source.text = std::string(kElementText) + "const int kValues = " + std::to_string(kDequantizedPerThread) + ";\n" +
                kText + "__constant__ float kBook[16] = {";
  std::ostringstream book;
  book << std::scientific << std::setprecision(9);
  for (float value : pipeline::kNf4Book) book << value << "f, ";
  source.text += book.str() + "};\n";
  for (const auto& [name, format] : {std::pair("nf4", "Nf4"), std::pair("e4m3", "E4m3"), std::pair("e5m2", "E5m2")})
    for (const auto& [suffix, type] : {std::pair("_bf16", "bf16"), std::pair("_f32", "float")}) {
      source.kernels.push_back({.name = std::string(name) + suffix,
                                .variants = false,
                                .threads = kThreads,
                                .rows_per_block = 1,
                                .vector = 1,
                                .argument_words = 5});
      source.text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(kThreads) + ") " +
                     source.kernels.back().name + "(const Args a) {\n  __shared__ float book[16];\n" +
                     "  if (threadIdx.x < 16) book[threadIdx.x] = kBook[threadIdx.x];\n  __syncthreads();\n" +
                     "  dequantize<" + format + ", " + type + ">(a, book);\n}\n";
    }
  return program;
}

}  // namespace ditfleet::region
