#include "pipeline/region/programs/channels_last_source.h"

#include <tuple>

namespace ditfleet::region {
namespace {

constexpr int kThreads = 256;

// A thread keeps its channels and walks through pixels. It moves vectors of 16 bytes if the number of channels allows
// it (LibTorch's tensors begin at multiples of 16 bytes), else single elements.
constexpr const char* kText =
    R"(// By the fast division, of 2 ulp: the exact one calls a function, for which registers spill here.
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
template <typename T, int V> struct __align__(sizeof(T) * V) Vector { T e[V]; };

// Which channels and pixels are this thread's.
struct Place { unsigned sample, chunk, channel, lane, lanes, first_channel, channels; i64 begin, end; bool active; };
template <int V>
__device__ __forceinline__ Place place(i64 pixels, i64 channels, i64 samples, i64 chunks) {
  Place p;
  const unsigned vectors = (unsigned)channels / V, slices = (vectors + kThreads - 1) / kThreads;
  const unsigned slice = blockIdx.x % slices, rest = blockIdx.x / slices;
  p.chunk = rest % (unsigned)chunks;
  p.sample = rest / (unsigned)chunks;
  const unsigned left = vectors - slice * kThreads, mine = left < kThreads ? left : kThreads;
  p.lanes = kThreads / mine;
  p.lane = threadIdx.x / mine;
  p.first_channel = slice * kThreads * V;
  p.channels = mine * V;
  p.channel = p.first_channel + (threadIdx.x - p.lane * mine) * V;
  p.begin = pixels * p.chunk / chunks;
  p.end = pixels * (p.chunk + 1) / chunks;
  p.active = p.lane < p.lanes && p.sample < samples;
  return p;
}
template <typename T, int V>
__device__ __forceinline__ void add_bias(float* sum, i64 bias, unsigned channel) {
  if (bias == 0) return;
#pragma unroll
  for (int e = 0; e < V; ++e) sum[e] += load(((const T*)bias)[channel + e]);
}

struct AddSums { i64 x, y, bias, bias_2, out, shifts, sums, pixels, channels, samples, chunks; };
template <typename T, int V, bool kAdds>
__device__ __forceinline__ void sums(const AddSums& a) {
  __shared__ float of_lane[2][kThreads * V];
  const Place p = place<V>(a.pixels, a.channels, a.samples, a.chunks);
  float bias[V] = {}, shift[V], sum[V] = {}, square[V] = {};
  const T* x = (const T*)a.x + p.sample * a.pixels * a.channels + p.channel;
  if (p.active) {
    add_bias<T, V>(bias, a.bias, p.channel);
    if (kAdds) add_bias<T, V>(bias, a.bias_2, p.channel);
    const Vector<T, V> first = *(const Vector<T, V>*)x;
#pragma unroll
    for (int e = 0; e < V; ++e) shift[e] = load(first.e[e]) + bias[e];
    const T* y = (const T*)a.y + (x - (const T*)a.x);
    T* out = (T*)a.out + (x - (const T*)a.x);
#pragma unroll 4
    for (i64 pixel = p.begin + p.lane; pixel < p.end; pixel += p.lanes) {
      const Vector<T, V> v = *(const Vector<T, V>*)(x + pixel * a.channels);
      Vector<T, V> w;
      if (kAdds) w = *(const Vector<T, V>*)(y + pixel * a.channels);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        float value = load(v.e[e]) + bias[e];
        if (kAdds) {
          put(&w.e[e], value + load(w.e[e]));
          value = load(w.e[e]);
        }
        const float d = value - shift[e];
        sum[e] += d;
        square[e] += d * d;
      }
      if (kAdds) *(Vector<T, V>*)(out + pixel * a.channels) = w;
    }
    const unsigned at = p.lane * p.channels + p.channel - p.first_channel;
#pragma unroll
    for (int e = 0; e < V; ++e) {
      of_lane[0][at + e] = sum[e];
      of_lane[1][at + e] = square[e];
      if (p.chunk == 0 && p.lane == 0) ((float*)a.shifts)[p.sample * a.channels + p.channel + e] = shift[e];
    }
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < 2 * p.channels; i += kThreads) {
    const unsigned which = i & 1, channel = i >> 1;
    float total = 0;
    for (unsigned lane = 0; lane < p.lanes; ++lane) total += of_lane[which][lane * p.channels + channel];
    ((float*)a.sums)[(((i64)p.sample * a.chunks + p.chunk) * a.channels + p.first_channel + channel) * 2 +)"
    R"( which] = total;
  }
}

struct Scales { i64 shifts, sums, weight, beta, bias, table, pixels, channels, samples, chunks, groups; double eps; };
// A warp adds up one channel; channels and groups are put together in fp64, so that no large mean swallows a)"
    R"( small variance.
template <typename T>
__device__ __forceinline__ void scales(const Scales& a) {
  __shared__ double of_warp[3][kThreads / 32];
  const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, size = (unsigned)(a.channels / a.groups);
  const i64 sample = blockIdx.x / (unsigned)a.groups, first = (blockIdx.x % (unsigned)a.groups) * (i64)size;
  double mean = 0, mean_2 = 0, variance = 0;
  for (unsigned c = warp; c < size; c += kThreads / 32) {
    double sum = 0, square = 0;
    for (unsigned chunk = lane; chunk < a.chunks; chunk += 32) {
      const float* at = (const float*)a.sums + ((sample * a.chunks + chunk) * a.channels + first + c) * 2;
      sum += at[0];
      square += at[1];
    }
    for (int step = 16; step > 0; step >>= 1) {
      sum += __shfl_down_sync(0xffffffffu, sum, step);
      square += __shfl_down_sync(0xffffffffu, square, step);
    }
    const double moved = sum / a.pixels, of_channel = ((const float*)a.shifts)[sample * a.channels + first + c] + moved;
    mean += of_channel;
    mean_2 += of_channel * of_channel;
    variance += square / a.pixels - moved * moved;
  }
  if (lane == 0) {
    of_warp[0][warp] = mean;
    of_warp[1][warp] = mean_2;
    of_warp[2][warp] = variance;
  }
  __syncthreads();
  mean = mean_2 = variance = 0;
  for (unsigned w = 0; w < kThreads / 32; ++w) {
    mean += of_warp[0][w];
    mean_2 += of_warp[1][w];
    variance += of_warp[2][w];
  }
  mean /= size;
  variance = variance / size + (mean_2 / size - mean * mean);
  const double scale = 1.0 / sqrt((variance > 0 ? variance : 0) + a.eps);
  for (unsigned c = threadIdx.x; c < size; c += kThreads) {
    const i64 channel = first + c;
    const double bias = a.bias == 0 ? 0 : load(((const T*)a.bias)[channel]), slope = scale * load(((const)"
    R"( T*)a.weight)[channel]);
    float* at = (float*)a.table + (sample * a.channels + channel) * 2;
    at[0] = (float)slope;
    at[1] = (float)(load(((const T*)a.beta)[channel]) + (bias - mean) * slope);
  }
}

struct Apply { i64 x, table, out, pixels, channels, samples, chunks, silu; };
template <typename T, int V>
__device__ __forceinline__ void apply(const Apply& a) {
  const Place p = place<V>(a.pixels, a.channels, a.samples, a.chunks);
  if (!p.active) return;
  const i64 begin = p.sample * a.pixels * a.channels + p.channel;
  const float* table = (const float*)a.table + (p.sample * a.channels + p.channel) * 2;
  float slope[V], offset[V];
#pragma unroll
  for (int e = 0; e < V; ++e) {
    slope[e] = table[2 * e];
    offset[e] = table[2 * e + 1];
  }
#pragma unroll 2
  for (i64 pixel = p.begin + p.lane; pixel < p.end; pixel += p.lanes) {
    Vector<T, V> v = *(const Vector<T, V>*)((const T*)a.x + begin + pixel * a.channels);
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const float value = load(v.e[e]) * slope[e] + offset[e];
      put(&v.e[e], a.silu ? silu(value) : value);
    }
    *(Vector<T, V>*)((T*)a.out + begin + pixel * a.channels) = v;
  }
}

struct Upsample { i64 x, out, rows, columns, channels, samples; };
template <typename T, int V>
__device__ __forceinline__ void upsample(const Upsample& a) {
  const i64 vectors = a.channels / V, row = a.columns * vectors, all = a.samples * a.rows * row;
  for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < all; i += (i64)gridDim.x * kThreads) {
    const i64 y = i / row, in_row = i - y * row, x = in_row / vectors;
    const Vector<T, V> v = ((const Vector<T, V>*)a.x)[i];
    Vector<T, V>* out = (Vector<T, V>*)a.out + 4 * y * row + in_row + x * vectors;
    out[0] = v;
    out[vectors] = v;
    out[2 * row] = v;
    out[2 * row + vectors] = v;
  }
}

struct AddPixels { i64 x, y, bias, bias_2, pixels, channels; };
template <typename T, int V>
__device__ __forceinline__ void add_pixels(const AddPixels& a) {
  const unsigned vectors = (unsigned)a.channels / V;
  const i64 all = a.pixels * vectors;
  for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < all; i += (i64)gridDim.x * kThreads) {
    const unsigned channel = (unsigned)(i % vectors) * V;
    float bias[V] = {};
    add_bias<T, V>(bias, a.bias, channel);
    add_bias<T, V>(bias, a.bias_2, channel);
    const Vector<T, V> v = ((const Vector<T, V>*)a.x)[i];
    Vector<T, V> w = ((const Vector<T, V>*)a.y)[i];
#pragma unroll
    for (int e = 0; e < V; ++e) put(&w.e[e], load(v.e[e]) + load(w.e[e]) + bias[e]);
    ((Vector<T, V>*)a.y)[i] = w;
  }
}

struct NormPixels { i64 x, bias, weight, out, pixels, channels, silu; };
// A part of a warp computes a pixel. It reads it twice, the second time from the cache.
template <typename T, int V>
__device__ __forceinline__ void norm_pixels(const NormPixels& a) {
  const unsigned vectors = (unsigned)a.channels / V;
  unsigned lanes = 1;
  while (lanes < 32 && lanes < vectors) lanes *= 2;
  const unsigned lane = threadIdx.x % lanes, of_block = kThreads / lanes;
  const unsigned mask = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  const float root = sqrtf((float)a.channels);
  for (i64 pixel = (i64)blockIdx.x * of_block + threadIdx.x / lanes; pixel < a.pixels;
       pixel += (i64)gridDim.x * of_block) {
    const Vector<T, V>* x = (const Vector<T, V>*)((const T*)a.x + pixel * a.channels);
    Vector<T, V>* out = (Vector<T, V>*)((T*)a.out + pixel * a.channels);
    float sum = 0;
    for (unsigned i = lane; i < vectors; i += lanes) {
      const Vector<T, V> v = x[i];
      float bias[V] = {};
      add_bias<T, V>(bias, a.bias, i * V);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float value = load(v.e[e]) + bias[e];
        sum += value * value;
      }
    }
    for (unsigned step = lanes / 2; step > 0; step >>= 1) sum += __shfl_xor_sync(mask, sum, step);
    const float scale = root / fmaxf(sqrtf(sum), 1e-12f);
    for (unsigned i = lane; i < vectors; i += lanes) {
      Vector<T, V> v = x[i];
      float bias[V] = {};
      add_bias<T, V>(bias, a.bias, i * V);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float value = (load(v.e[e]) + bias[e]) * scale * load(((const T*)a.weight)[i * V + e]);
        put(&v.e[e], a.silu ? silu(value) : value);
      }
      out[i] = v;
    }
  }
}
)";

void add_kernel(Source& source, const std::string& name, const std::string& arguments, std::size_t words,
                const std::string& body) {
  source.text += "extern \"C\" __global__ void __launch_bounds__(kThreads) " + name + "(const " + arguments + " a) { " +
                 body + " }\n";
  source.kernels.push_back({.name = name,
                            .variants = false,
                            .threads = kThreads,
                            .rows_per_block = 1,
                            .vector = 1,
                            .argument_words = words});
}

}  // namespace

FixedProgram channels_last_program() {
  FixedProgram program{
      "channels_last",
      {"constexpr unsigned kThreads = " + std::to_string(kThreads) + ";\n" + kElementText + kText, {}}};
  for (const auto& [type, suffix, vector] :
       {std::tuple<std::string, std::string, std::string>{"bf16", "_bf16", "8"}, {"float", "_f32", "4"}}) {
    const auto both = [&type = type, &vector = vector](const std::string& call, const std::string& more) {
      return "if (a.channels % " + vector + " == 0) " + call + "<" + type + ", " + vector + more + ">(a); else " +
             call + "<" + type + ", 1" + more + ">(a);";
    };
    add_kernel(program.source, "sums" + suffix, "AddSums", 11, both("sums", ", false"));
    add_kernel(program.source, "add_sums" + suffix, "AddSums", 11, both("sums", ", true"));
    add_kernel(program.source, "scales" + suffix, "Scales", 12, "scales<" + type + ">(a);");
    add_kernel(program.source, "apply" + suffix, "Apply", 8, both("apply", ""));
    add_kernel(program.source, "upsample" + suffix, "Upsample", 6, both("upsample", ""));
    add_kernel(program.source, "add_pixels" + suffix, "AddPixels", 6, both("add_pixels", ""));
    add_kernel(program.source, "norm_pixels" + suffix, "NormPixels", 7, both("norm_pixels", ""));
  }
  return program;
}

std::int64_t channels_last_slices(std::int64_t channels, std::int64_t bytes_of_element) {
  const std::int64_t vector = 16 / bytes_of_element, vectors = channels % vector == 0 ? channels / vector : channels;
  return (vectors + kThreads - 1) / kThreads;
}

}  // namespace ditfleet::region
