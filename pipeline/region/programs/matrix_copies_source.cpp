#include "pipeline/region/programs/matrix_copies_source.h"

namespace ditfleet::region {
namespace {

constexpr int kThreads = 256;

// Moves vectors of 16 bytes if addresses, strides and width allow it.
constexpr const char* kText = R"(struct Copy { i64 to, from, rows, columns, to_stride, from_stride; double scale; };
struct Args { i64 table, count, parts; };
struct __align__(16) Word { unsigned w[4]; };
template <typename T, int kVector>
__device__ __forceinline__ void copy_vectors(const Copy& c, unsigned first, unsigned step) {
  const unsigned in_row = (unsigned)c.columns / kVector, all = (unsigned)c.rows * in_row;
  const float scale = (float)c.scale;
  for (unsigned i = first; i < all; i += step) {
    const unsigned row = i / in_row, column = (i - row * in_row) * kVector;
    T* to = (T*)c.to + row * c.to_stride + column;
    union { Word word; T element[kVector]; } u;
    if (c.from == 0) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) put(&u.element[e], 0.0f);
    } else {
      const T* from = (const T*)c.from + row * c.from_stride + column;
      if (kVector == 1) u.element[0] = *from;
      else u.word = *(const Word*)from;
      if (scale != 1.0f) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) put(&u.element[e], load(u.element[e]) * scale);
      }
    }
    if (kVector == 1) *to = u.element[0];
    else *(Word*)to = u.word;
  }
}
template <typename T>
__device__ __forceinline__ void copy_part(const Args& a) {
  const unsigned parts = (unsigned)a.parts, which = blockIdx.x / parts;
  if (which >= a.count) return;
  const Copy c = ((const Copy*)a.table)[which];
  const int vector = 16 / sizeof(T);
  const i64 odd = (c.to | c.from | c.to_stride * (i64)sizeof(T) | c.from_stride * (i64)sizeof(T) | c.columns *)"
                              R"( (i64)sizeof(T)) & 15;
  const unsigned first = (blockIdx.x - which * parts) * blockDim.x + threadIdx.x, step = parts * blockDim.x;
  if (odd == 0) copy_vectors<T, vector>(c, first, step);
  else copy_vectors<T, 1>(c, first, step);
}
)";

void add_kernel(Source& source, const std::string& name, const std::string& type) {
  source.text += "extern \"C\" __global__ void __launch_bounds__(" + std::to_string(kThreads) + ") " + name +
                 "(const Args a) { copy_part<" + type + ">(a); }\n";
  source.kernels.push_back(
      {.name = name, .variants = false, .threads = kThreads, .rows_per_block = 1, .vector = 1, .argument_words = 3});
}

}  // namespace

FixedProgram matrix_copies_program() {
  FixedProgram program{"matrix_copies", {std::string(kElementText) + kText, {}}};
  add_kernel(program.source, "copies_bf16", "bf16");
  add_kernel(program.source, "copies_f32", "float");
  return program;
}

}  // namespace ditfleet::region
