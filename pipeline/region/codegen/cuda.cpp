#include <algorithm>
#include <functional>
#include <numeric>

#include "pipeline/region/codegen/phases.h"
#include "pipeline/region/codegen/source.h"
#include "pipeline/region/codegen/text.h"

namespace ditfleet::region {
namespace {

constexpr int kWarp = 32;
constexpr int kLeastThreads = 4;                 // per row
constexpr int kBlock = 256;                      // threads, for short rows
constexpr std::int64_t kElementsPerThread = 32;  // in registers; with three live values more would spill

constexpr const char* kPrelude = R"(typedef unsigned short bf16;
typedef long long i64;
__device__ __forceinline__ float load(float v) { return v; }
__device__ __forceinline__ float load(bf16 v) { return __uint_as_float((unsigned)v << 16); }
__device__ __forceinline__ bf16 to_bf16(float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
__device__ __forceinline__ void put(float* p, float v) { *p = v; }
__device__ __forceinline__ void put(bf16* p, float v) { *p = to_bf16(v); }
__device__ __forceinline__ float round_bf16(float v) { return load(to_bf16(v)); }
__device__ __forceinline__ float gelu_tanh(float x) { return x / (1.0f + expf(-1.5957691216f * (x + 0.044715f *)"
                                 R"( x * x * x))); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
template <int kBytes> struct Word;
template <> struct Word<2> { typedef unsigned short Type; };
template <> struct Word<4> { typedef unsigned Type; };
template <> struct Word<8> { struct __align__(8) Type { unsigned w[2]; }; };
template <> struct Word<16> { struct __align__(16) Type { unsigned w[4]; }; };
template <> struct Word<32> { struct __align__(16) Type { unsigned w[8]; }; };
template <bool kAligned, int kVector, typename T>
__device__ __forceinline__ void get(const T* p, float (&v)[kVector]) {
  if (kAligned) {
    typedef typename Word<kVector * sizeof(T)>::Type W;
    union { W word; T element[kVector]; } u;
    u.word = *(const W*)p;
#pragma unroll
    for (int e = 0; e < kVector; ++e) v[e] = load(u.element[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) v[e] = load(p[e]);
  }
}
template <bool kAligned, int kVector, typename T>
__device__ __forceinline__ void set(T* p, const float (&v)[kVector]) {
  if (kAligned) {
    typedef typename Word<kVector * sizeof(T)>::Type W;
    union { W word; T element[kVector]; } u;
#pragma unroll
    for (int e = 0; e < kVector; ++e) put(&u.element[e], v[e]);
    *(W*)p = u.word;
  } else {
#pragma unroll
    for (int e = 0; e < kVector; ++e) put(p + e, v[e]);
  }
}
template <int kThreads>
__device__ __forceinline__ float row_sum(float v) {
#pragma unroll
  for (int lane = kThreads < 32 ? kThreads / 2 : 16; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  if (kThreads > 32) {
    __shared__ float part[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) v += part[w];
  }
  return v;
}
)";

// For kernels that write f8 (E4M3), which needs sm_89.
constexpr const char* kPreludeF8 = R"(typedef unsigned char f8;
__device__ __forceinline__ unsigned short to_f8_pair(float low, float high) {
  unsigned short r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
template <bool kAligned, int kVector>
__device__ __forceinline__ void set(f8* p, const float (&v)[kVector]) {
  if (kVector == 1) {
    *p = (f8)to_f8_pair(v[0], 0.0f);
  } else {
    typedef typename Word<kVector == 1 ? 2 : kVector>::Type W;
    union { W word; unsigned short pair[kVector / 2 + 1]; f8 element[kVector]; } u;
#pragma unroll
    for (int e = 0; e < kVector / 2; ++e) u.pair[e] = to_f8_pair(v[2 * e], v[2 * e + (kVector > 1)]);
    if (kAligned) {
      *(W*)p = u.word;
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) p[e] = u.element[e];
    }
  }
}
template <int kThreads>
__device__ __forceinline__ float row_max(float v) {
#pragma unroll
  for (int lane = kThreads < 32 ? kThreads / 2 : 16; lane > 0; lane /= 2)
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, lane));
  if (kThreads > 32) {
    __shared__ float part[32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    v = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) v = fmaxf(v, part[w]);
  }
  return v;
}
)";

std::string all_registers_macro(const std::string& kernel) { return "ROOM_" + kernel; }

// How a row is distributed over threads.
struct Layout {
  int vector, threads_per_row, chunks, rows_per_block;
};

Layout layout_of(const RowKernel& k) {
  Layout l{has_bf16(k) ? 8 : 4, kWarp, 1, 1};
  const auto splits = [&](std::int64_t width) { return width % l.vector == 0; };
  while (!splits(k.width) ||
         !std::all_of(k.nodes.begin(), k.nodes.end(), [&](const RowNode& node) { return splits(node.period); }))
    l.vector /= 2;
  // Short rows share a warp: a head of 128 in bf16 takes 16 threads.
  while (l.threads_per_row > kLeastThreads && l.vector * l.threads_per_row / 2 >= k.width) l.threads_per_row /= 2;
  const auto chunks = [&] {
    return static_cast<int>((k.width + l.vector * l.threads_per_row - 1) / (l.vector * l.threads_per_row));
  };
  while (chunks() * l.vector > kElementsPerThread && l.threads_per_row < 1024) l.threads_per_row *= 2;
  l.chunks = chunks();
  // Threads that all have as many elements, if they fill whole warps.
  for (int chunks = l.threads_per_row >= kWarp ? l.chunks : 0; chunks > 0; --chunks) {
    const std::int64_t even = k.width / (std::int64_t{l.vector} * chunks);
    if (even * l.vector * chunks != k.width || even % kWarp != 0 || even > 1024) continue;
    l.threads_per_row = static_cast<int>(even);
    l.chunks = chunks;
    break;
  }
  l.rows_per_block =
      l.threads_per_row > kWarp ? 1 : kBlock / l.threads_per_row;  // a longer row adds up through shared memory
  return l;
}

class Kernel {
 public:
  explicit Kernel(const RowKernel& kernel) : k_(kernel), phases_(kernel), l_(layout_of(kernel)) {}

  KernelLaunch launch() const {
    return {.name = k_.name,
            .threads = l_.threads_per_row * l_.rows_per_block,
            .rows_per_block = l_.rows_per_block,
            .vector = l_.vector,
            .argument_words = static_cast<std::size_t>(k_.instances) * (1 + instance_words(k_))};
  }

  void write(Text& out) const {
    const std::string instances = std::to_string(k_.instances), axes = std::to_string(kOuterAxes);
    out("");
    out("struct " + arguments() + " {");
    out("i64 row_end[" + instances + "];");
    out("struct { i64 extent[" + axes + "]; struct { i64 data, stride[" + axes + "]; } operand[" +
        std::to_string(k_.operands()) + "]; } at[" + instances + "];");
    out("};");
    // The usual variant keeps its row in registers and unrolls its loops.
    open_body(out, "fast_", "typename I, bool kAligned");
    for (std::size_t n = 0; n < k_.nodes.size(); ++n)
      if (saved(static_cast<int>(n)))
        out("float s" + std::to_string(n) + "[" + std::to_string(l_.chunks) + "][" + std::to_string(l_.vector) + "];");
    for (int p = 0; p < phases_.count; ++p) write_phase(out, p);
    write_scales(out);
    out("}");
    // The others, for tensors beyond 2^31 elements and unaligned rows, reload and recompute in every phase, in loops.
    // That is a fraction of the code to compile.
    open_body(out, "small_", "typename I, bool kAligned, int kWidth");
    for (int p = 0; p < phases_.count; ++p) write_small_phase(out, p);
    write_scales(out);
    out("}");
    // By default ptxas aims at several blocks per multiprocessor and for some widths spills registers. If the first
    // variant spills, it is compiled again with a minimum of one block (all_registers_option()).
    const std::string vector = std::to_string(l_.vector), single = phases_.pairs ? "2" : "1",
                      threads = std::to_string(l_.threads_per_row * l_.rows_per_block);
    out("#ifndef " + all_registers_macro(k_.name));
    out("#define " + all_registers_macro(k_.name));
    out("#endif");
    write_entry(out, "_i32_v", threads + " " + all_registers_macro(k_.name), "fast_", "int, true");
    write_entry(out, "_i64_v", threads + ", 1", "small_", "i64, true, " + vector);
    write_entry(out, "_i64_s", threads + ", 1", "small_", "i64, false, " + single);
  }

 private:
  std::string arguments() const { return "Args_" + k_.name; }
  void open_body(Text& out, const std::string& prefix, const std::string& parameters) const {
    out("template <" + parameters + ">");
    out("__device__ __forceinline__ void " + prefix + k_.name + "(const " + arguments() + "& a) {");
    write_addresses(out);
  }
  void write_entry(Text& out, const std::string& suffix, const std::string& bounds, const std::string& prefix,
                   const std::string& parameters) const {
    out("extern \"C\" __global__ void __launch_bounds__(" + bounds + ") " + k_.name + suffix +
        "(const __grid_constant__ " + arguments() + " a) { " + prefix + k_.name + "<" + parameters + ">(a); }");
  }

  // Row numbers fit 32 bits, as a grid's blocks do. Only offsets may need 64.
  void write_addresses(Text& out) const {
    out(l_.rows_per_block > 1 ? "unsigned row = blockIdx.x * " + std::to_string(l_.rows_per_block) +
                                    " + threadIdx.x / " + std::to_string(l_.threads_per_row) + ";"
                              : std::string("unsigned row = blockIdx.x;"));
    out("int k = 0;");
    if (k_.instances > 1) {
      out("unsigned before = 0;");
      out("while (k < " + std::to_string(k_.instances) +
          " && row >= (unsigned)a.row_end[k]) before = (unsigned)a.row_end[k++];");
      out("if (k == " + std::to_string(k_.instances) + ") return;");
      out("row -= before;");
    } else {
      out("if (row >= (unsigned)a.row_end[0]) return;");
    }
    out("const unsigned e3 = (unsigned)a.at[k].extent[3], e2 = (unsigned)a.at[k].extent[2], e1 = "
        "(unsigned)a.at[k].extent[1];");
    // Most calls have one or two axes, and a division costs as much as moving the element.
    out("unsigned r3 = row, r2 = 0, r1 = 0, r0 = 0;");
    out("const bool more = e1 != 1 || a.at[k].extent[0] != 1;");
    out("if (more || e2 != 1) { r2 = row / e3; r3 = row - r2 * e3; }");
    out("if (more) { const unsigned q = r2 / e2; r2 -= q * e2; r0 = q / e1; r1 = q - r0 * e1; }");
    out("const I i3 = (I)r3, i2 = (I)r2, i1 = (I)r1, i0 = (I)r0;");
    out("const int lane = threadIdx.x % " + std::to_string(l_.threads_per_row) + ";");
    for (std::size_t o = 0; o < k_.operands(); ++o) {
      const std::string at = "a.at[k].operand[" + std::to_string(o) + "]", pointer = pointer_type(k_, o);
      out(pointer + " " + pointer_name(k_, o) + " = (" + pointer + ")" + at + ".data + (i0 * (I)" + at +
          ".stride[0] + i1 * (I)" + at + ".stride[1] + i2 * (I)" + at + ".stride[2] + i3 * (I)" + at + ".stride[3]);");
    }
  }

  // Values that a later phase needs stay in registers.
  bool saved(int n) const {
    const auto i = static_cast<std::size_t>(n);
    return k_.nodes[i].code != OpCode::kRowScale && phases_.last_use[i] > first_phase(n);
  }
  // Loads happen in the first phase that uses them.
  int first_phase(int n) const {
    const auto i = static_cast<std::size_t>(n);
    if (!k_.nodes[i].load) return phases_.of_node[i];
    int first = phases_.count - 1;
    for (std::size_t m = 0; m < k_.nodes.size(); ++m) {
      const RowNode& node = k_.nodes[m];
      for (std::size_t o = 0; o < node.operands.size(); ++o)
        if (node.operands[o] == n)
          first = std::min(first, phases_.of_node[m] - (is_reduction(node.code) && o == 0 ? 1 : 0));
    }
    return first;
  }
  std::string element(int n, const std::string& e) const {
    return saved(n) ? "s" + std::to_string(n) + "[c][" + e + "]" : "v" + std::to_string(n) + "[" + e + "]";
  }
  void open_chunks(Text& out) const {
    out("#pragma unroll");
    out("for (int c = 0; c < " + std::to_string(l_.chunks) + "; ++c) {");
    out("const int at = (c * " + std::to_string(l_.threads_per_row) + " + lane) * " + std::to_string(l_.vector) + ";");
  }
  bool ragged() const { return k_.width != static_cast<std::int64_t>(l_.chunks) * l_.threads_per_row * l_.vector; }
  void open_active(Text& out) const { out(ragged() ? "if (at < " + std::to_string(k_.width) + ") {" : "{"); }
  const RowNode& node(int n) const { return k_.nodes[static_cast<std::size_t>(n)]; }
  static void each(Text& out, const std::string& width, const std::string& line) {
    out("#pragma unroll");
    out("for (int e = 0; e < " + width + "; ++e) " + line);
  }
  // Computes a node from its operands; `element(node, e)` names an element.
  template <class Element>
  void compute(Text& out, int n, const std::string& width, const Element& element) const {
    if (node(n).code != OpCode::kRope)
      return each(out, width,
                  element(n, "e") + " = " + expression(k_, n, [&](int o) { return element(o, "e"); }) + ";");
    const auto of = [&](int o, bool second) { return element(o, second ? "e + 1" : "e"); };
    out("#pragma unroll");
    out("for (int e = 0; e < " + width + "; e += 2) {");
    out(element(n, "e") + " = " + rope_expression(node(n), false, of) + ";");
    out(element(n, "e + 1") + " = " + rope_expression(node(n), true, of) + ";");
    out("}");
  }

  void write_phase(Text& out, int p) const {
    const auto nodes = phases_.computed_in(k_, p);
    const auto sums = phases_.reduced_after(k_, p);
    const std::string vector = std::to_string(l_.vector);
    for (int n : sums) out("float sum" + std::to_string(n) + " = 0.0f;");
    open_chunks(out);
    open_active(out);
    for (std::size_t n = 0; n < k_.nodes.size(); ++n) {
      const int index = static_cast<int>(n);
      if (!k_.nodes[n].load || first_phase(index) != p) continue;
      if (!saved(index)) out("float v" + std::to_string(n) + "[" + vector + "];");
      out("get<kAligned, " + vector + ">(x" + std::to_string(k_.nodes[n].input) + " + " + periodic(k_.nodes[n], "at") +
          ", " + (saved(index) ? "s" + std::to_string(n) + "[c]" : "v" + std::to_string(n)) + ");");
    }
    for (int n : nodes) {
      if (!saved(n)) out("float v" + std::to_string(n) + "[" + vector + "];");
      compute(out, n, vector, [&](int of, const std::string& e) { return element(of, e); });
    }
    for (int n : sums) each(out, vector, sum_line(n, element(node(n).operands[0], "e")));
    if (p + 1 == phases_.count)  // loads precede stores, because a result may share an operand's memory
      for (std::size_t o = 0; o < k_.outputs.size(); ++o) {
        const int n = k_.outputs[o].node;
        if (k_.outputs[o].one) continue;
        out("set<kAligned, " + vector + ">(y" + std::to_string(o) + " + at, " +
            (saved(n) ? "s" + std::to_string(n) + "[c]" : "v" + std::to_string(n)) + ");");
      }
    out("}");
    out("}");
    for (int n : sums)
      write_norm(out, n, [&] {
        open_chunks(out);
        open_active(out);
        each(out, vector, square_line(n, element(node(n).operands[0], "e")));
        out("}");
        out("}");
      });
  }

  // The nodes that must be recomputed for these nodes.
  std::vector<bool> needed(const std::vector<int>& targets) const {
    std::vector<bool> in(k_.nodes.size(), false);
    for (int n : targets) in[static_cast<std::size_t>(n)] = true;
    for (std::size_t n = k_.nodes.size(); n-- > 0;)
      if (in[n] && !k_.nodes[n].load)
        for (int o : k_.nodes[n].operands) in[static_cast<std::size_t>(o)] = true;
    return in;
  }
  // One pass in loops, kWidth elements at a time. Threads take the same elements in the same order as in the fast body,
  // so that sums are equal. `body` follows the targets, which are in v<node>[e].
  void small_pass(Text& out, const std::vector<int>& targets, const std::function<void()>& body) const {
    const std::string threads = std::to_string(l_.threads_per_row), vector = std::to_string(l_.vector);
    out("#pragma unroll 1");
    out("for (int c = 0; c < " + std::to_string(l_.chunks * l_.vector) + "; c += kWidth) {");
    out("const int at = (c / " + vector + " * " + threads + " + lane) * " + vector + " + c % " + vector + ";");
    open_active(out);
    const auto in = needed(targets);
    for (std::size_t n = 0; n < k_.nodes.size(); ++n) {
      if (!in[n] || (!k_.nodes[n].load && k_.nodes[n].code == OpCode::kRowScale)) continue;
      out("float v" + std::to_string(n) + "[kWidth];");
      if (k_.nodes[n].load)
        out("get<kAligned, kWidth>(x" + std::to_string(k_.nodes[n].input) + " + " + periodic(k_.nodes[n], "at") +
            ", v" + std::to_string(n) + ");");
      else
        compute(out, static_cast<int>(n), "kWidth",
                [](int of, const std::string& e) { return "v" + std::to_string(of) + "[" + e + "]"; });
    }
    body();
    out("}");
    out("}");
  }
  void write_small_phase(Text& out, int p) const {
    const auto sums = phases_.reduced_after(k_, p);
    if (p + 1 == phases_.count) {
      std::vector<int> targets;
      for (const RowOutput& o : k_.outputs) targets.push_back(o.node);
      small_pass(out, targets, [&] {
        for (std::size_t o = 0; o < k_.outputs.size(); ++o)
          if (!k_.outputs[o].one)
            out("set<kAligned, kWidth>(y" + std::to_string(o) + " + at, v" + std::to_string(k_.outputs[o].node) + ");");
      });
    }
    std::vector<int> operands;
    for (int n : sums) {
      operands.push_back(node(n).operands[0]);
      out("float sum" + std::to_string(n) + " = 0.0f;");
    }
    if (!sums.empty())
      small_pass(out, operands, [&] {
        for (int n : sums) each(out, "kWidth", sum_line(n, "v" + std::to_string(node(n).operands[0]) + "[e]"));
      });
    for (int n : sums)
      write_norm(out, n, [&] {
        const int operand = node(n).operands[0];
        small_pass(out, {operand}, [&] { each(out, "kWidth", square_line(n, "v" + std::to_string(operand) + "[e]")); });
      });
  }

  // The results with one element per row, which the first thread of the row writes.
  void write_scales(Text& out) const {
    for (std::size_t o = 0; o < k_.outputs.size(); ++o)
      if (k_.outputs[o].one)
        out("if (lane == 0) *y" + std::to_string(o) + " = scale" + std::to_string(k_.outputs[o].node) + ";");
  }

  std::string sum_line(int n, const std::string& x) const {
    if (node(n).code == OpCode::kRowScale)
      return "sum" + std::to_string(n) + " = fmaxf(sum" + std::to_string(n) + ", fabsf(" + x + "));";
    return "sum" + std::to_string(n) + " += " + (node(n).code == OpCode::kRmsNorm ? x + " * " + x : x) + ";";
  }
  std::string square_line(int n, const std::string& x) const {
    const std::string id = std::to_string(n);
    return "squares" + id + " += (" + x + " - mean" + id + ") * (" + x + " - mean" + id + ");";
  }
  // Turns a norm's sum over the thread's elements into the values that its expression uses; `add_squares` writes the
  // pass over them.
  void write_norm(Text& out, int n, const std::function<void()>& add_squares) const {
    const std::string id = std::to_string(n), eps = float_literal(node(n).eps),
                      threads = std::to_string(l_.threads_per_row);
    const std::string inverse = float_literal(1.0 / static_cast<double>(k_.width));
    if (node(n).code == OpCode::kRowScale) {
      out("const float scale" + id + " = fmaxf(row_max<" + threads + ">(sum" + id + ") * " +
          float_literal(1 / kLargestF8) + ", " + float_literal(kLeastRowScale) + ");");
      out("const float inverse" + id + " = 1.0f / scale" + id + ";");
      return;
    }
    if (node(n).code == OpCode::kRmsNorm) {
      out("const float scale" + id + " = rsqrtf(row_sum<" + threads + ">(sum" + id + ") * " + inverse + " + " + eps +
          ");");
      return;
    }
    out("const float mean" + id + " = row_sum<" + threads + ">(sum" + id + ") * " + inverse + ";");
    out("float squares" + id + " = 0.0f;");
    add_squares();
    out("const float scale" + id + " = rsqrtf(row_sum<" + threads + ">(squares" + id + ") * " + inverse + " + " + eps +
        ");");
  }

  const RowKernel& k_;
  const Phases phases_;
  const Layout l_;
};

}  // namespace

std::vector<std::string> function_names(const KernelLaunch& launch) {
  if (!launch.variants) return {launch.name};
  return {launch.name + "_i32_v", launch.name + "_i64_v", launch.name + "_i64_s"};
}

std::string all_registers_option(const KernelLaunch& launch) {
  return "--define-macro=" + all_registers_macro(launch.name) + "=,1";
}

Source generate_cuda(const Plan& plan) {
  Text out;
  Source source;
  for (const RowKernel& kernel : plan.kernels) {
    const Kernel writer(kernel);
    writer.write(out);
    source.kernels.push_back(writer.launch());
  }
  const bool f8 = std::any_of(plan.kernels.begin(), plan.kernels.end(), has_f8);
  source.text = "// DiTFleet " + std::string(kGeneratorId) + "\n" + kPrelude + (f8 ? kPreludeF8 : "") +
                out.take();  // without the block's name, so that equal kernels are equal text
  return source;
}

}  // namespace ditfleet::region
