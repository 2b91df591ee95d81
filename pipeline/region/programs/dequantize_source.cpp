#include "pipeline/region/programs/dequantize_source.h"

#include <iomanip>
#include <sstream>

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

}  // namespace

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
