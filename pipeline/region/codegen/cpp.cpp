#include <algorithm>
#include <set>

#include "pipeline/region/codegen/phases.h"
#include "pipeline/region/codegen/source.h"
#include "pipeline/region/codegen/text.h"

namespace ditfleet::region {
namespace {

// exp: Cephes' expf (range reduction by ln 2 in two parts, polynomial of degree 5), written so that it vectorizes. The
// argument is clamped to [-87, 89] by comparing bits: positive floats are ordered like signed integers, negative ones
// like unsigned integers in reverse. Comparing floats costs twice as much because of NaN.
// From 88.4 on exp is infinite, so that -3e38 and -infinity become 0 and NaN, as in eager mode. gelu_tanh and silu
// return NaN for NaN through their numerator.
constexpr const char* kPrelude = R"(typedef unsigned short bf16;
typedef long long i64;
static inline float bits_to_float(unsigned u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline unsigned float_to_bits(float f) { unsigned u; __builtin_memcpy(&u, &f, 4); return u; }
static inline float load(float v) { return v; }
static inline float load(bf16 v) { return bits_to_float((unsigned)v << 16); }
// To nearest, ties to even. What is not a number may overflow to one where bits of its lower half are set:)"
                                 R"( round_any sets all its
// bits instead. Processors make none with such bits, nor does bf16 have them.
static inline float round_bf16(float v) {
  const unsigned u = float_to_bits(v);
  return bits_to_float((u + (u >> 16 & 1u) + 0x7fffu) & 0xffff0000u);
}
static inline float round_any(float v) { return bits_to_float(float_to_bits(round_bf16(v)) | (v != v ?)"
                                 R"( 0xffffffffu : 0u)); }
// What is stored as bf16 is rounded already: its upper half is all there is.
static inline void store(float* p, float v) { *p = v; }
static inline void store(bf16* p, float v) { *p = (bf16)(float_to_bits(v) >> 16); }
static inline unsigned word(const bf16* p) { unsigned u; __builtin_memcpy(&u, p, 4); return u; }
static inline float low(unsigned w) { return bits_to_float(w << 16); }
static inline float high(unsigned w) { return bits_to_float(w & 0xffff0000u); }
static inline void store_word(bf16* p, float v, float w) {
  const unsigned u = float_to_bits(v) >> 16 | (float_to_bits(w) & 0xffff0000u);
  __builtin_memcpy(p, &u, 4);
}
static inline float exp_of(float x) {
  const int above = (int)float_to_bits(x);
  const unsigned below = (unsigned)(above < 0x42b20000 ? above : 0x42b20000);
  x = bits_to_float(below < 0xc2ae0000u ? below : 0xc2ae0000u);
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * bits_to_float((float_to_bits(shifted) - 0x4b400000u + 127u) << 23);
}
static inline float gelu_tanh(float x) { return x / (1.0f + exp_of(-1.5957691216f * (x + 0.044715f * x * x * x))); }
static inline float silu(float x) { return x / (1.0f + exp_of(-x)); }
)";

// For kernels that write f8 (E4M3): to nearest, ties to even, larger values to 448. Adding 2^14 to a value below 2^-6
// leaves the multiple of 2^-9 in the lowest bits.
constexpr const char* kPreludeF8 = R"(typedef unsigned char f8;
static inline void store(f8* p, float v) {
  const unsigned u = float_to_bits(v), magnitude = u & 0x7fffffffu;
  const unsigned bounded = magnitude < 0x43e00000u ? magnitude : 0x43e00000u;
  const unsigned normal = (bounded + 0x7ffffu + (bounded >> 20 & 1u) >> 20) - 960u;
  const unsigned small = float_to_bits(bits_to_float(bounded) + 16384.0f) & 0xffu;
  const unsigned code = bounded < 0x3c800000u ? small : normal;
  *p = (f8)((u >> 24 & 0x80u) | (magnitude > 0x7f800000u ? 0x7fu : code));
}
)";

// A loop iteration computes two elements if it can, each in its own expression. Sums then have two independent
// accumulators. bf16 elements are neighbors, read and written as one 32-bit word, so that vectors need no packing
// between two widths. Ropes also take neighbors. Other elements are half a row apart.
class Function {
 public:
  explicit Function(const RowKernel& kernel)
      : k_(kernel),
        phases_(kernel),
        lanes_(kernel.width % 2 == 0 ? 2 : 1),
        neighbours_(phases_.pairs || has_bf16(kernel)) {}

  void write(Text& out) {
    out("");
    out("extern \"C\" void " + k_.name + "(const i64* a, i64 first, i64 end) {");
    out("i64 i3 = first % a[3], i2 = first / a[3] % a[2], i1 = first / a[3] / a[2] % a[1], i0 = first / a[3] / a[2] / "
        "a[1];");
    for (std::size_t o = 0; o < k_.operands(); ++o) out(pointer_type(k_, o) + " " + pointer_name(k_, o) + ";");
    out("bool moved = true;");
    out("for (i64 row = first; row < end; ++row) {");
    out("if (moved) {");
    for (std::size_t o = 0; o < k_.operands(); ++o) {
      const std::size_t at = kOuterAxes + o * (kOuterAxes + 1);
      const auto stride = [&](std::size_t axis) { return "a[" + std::to_string(at + 1 + axis) + "]"; };
      out(pointer_name(k_, o) + " = (" + pointer_type(k_, o) + " )a[" + std::to_string(at) + "] + i0 * " + stride(0) +
          " + i1 * " + stride(1) + " + i2 * " + stride(2) + " + i3 * " + stride(3) + ";");
    }
    out("}");
    for (std::size_t n = 0; n < k_.nodes.size(); ++n)
      if (saved(static_cast<int>(n)))
        for (int lane = 0; lane < lanes_; ++lane)
          out("float " + name("s", static_cast<int>(n), lane) + "[" + steps() + "];");
    for (int p = 0; p < phases_.count; ++p) write_phase(out, p);
    // The next row, usually along the last axis.
    out("moved = ++i3 == a[3];");
    out("if (moved) {");
    out("i3 = 0;");
    out("if (++i2 == a[2]) { i2 = 0; if (++i1 == a[1]) { i1 = 0; ++i0; } }");
    out("} else {");
    for (std::size_t o = 0; o < k_.operands(); ++o)
      out(pointer_name(k_, o) + " += a[" + std::to_string(kOuterAxes + o * (kOuterAxes + 1) + 1 + 3) + "];");
    out("}");
    out("}");
    out("}");
  }

 private:
  static std::string name(const std::string& prefix, int n, int lane) {
    return prefix + std::to_string(n) + "_" + std::to_string(lane);
  }
  std::string steps() const { return std::to_string(k_.width / lanes_); }
  const RowNode& node(int n) const { return k_.nodes[static_cast<std::size_t>(n)]; }
  bool in_words(const RowNode& load) const {
    return lanes_ == 2 && neighbours_ && k_.inputs[static_cast<std::size_t>(load.input)] == ElementType::kBF16;
  }
  // Computed values that a later phase needs are kept in an array; loads are repeated.
  bool saved(int n) const {
    return !node(n).load && node(n).code != OpCode::kRowScale &&
           phases_.last_use[static_cast<std::size_t>(n)] > phases_.of_node[static_cast<std::size_t>(n)];
  }
  // Whether a value is already rounded to bf16.
  bool is_rounded(int n) const {
    const RowNode& made = node(n);
    return made.load ? k_.inputs[static_cast<std::size_t>(made.input)] == ElementType::kBF16
                     : made.code == OpCode::kCast && made.type == ElementType::kBF16;
  }
  bool reads_f32(int n) const {
    if (node(n).load) return k_.inputs[static_cast<std::size_t>(node(n).input)] == ElementType::kF32;
    return std::any_of(node(n).operands.begin(), node(n).operands.end(), [&](int o) { return reads_f32(o); });
  }
  std::string rounded(int n, int phase, int lane) const {
    return (reads_f32(n) ? "round_any(" : "round_bf16(") + element(n, phase, lane) + ")";
  }
  std::string at(int lane) const {
    if (lanes_ == 1 || (!neighbours_ && lane == 0)) return "c";
    return !neighbours_ ? "c + " + steps() : lane == 0 ? "2 * c" : "2 * c + 1";
  }
  std::string element(int n, int phase, int lane) const {
    const RowNode& made = node(n);
    if (made.load)
      return in_words(made) ? (lane == 0 ? "low(w" : "high(w") + std::to_string(n) + ")"
                            : "load(x" + std::to_string(made.input) + "[" + periodic(made, at(lane)) + "])";
    return phases_.of_node[static_cast<std::size_t>(n)] == phase ? name("v", n, lane) : name("s", n, lane) + "[c]";
  }
  // Each lane has its own sum until the loop has ended.
  std::string begin_sums(Text& out, const std::string& prefix, int n) const {
    std::string names;
    for (int lane = 0; lane < lanes_; ++lane) {
      out("float " + name(prefix, n, lane) + " = 0.0f;");
      names += (lane ? ", " : "") + name(prefix, n, lane);
    }
    return names;
  }
  std::string sum(const std::string& prefix, int n) const {
    return lanes_ == 1 ? name(prefix, n, 0) : "(" + name(prefix, n, 0) + " + " + name(prefix, n, 1) + ")";
  }
  // A loop over the row; it begins by reading the operands' words.
  void open_loop(Text& out, const std::string& sums, const std::string& maxima, const std::set<int>& reads) const {
    out("#pragma omp simd" + (sums.empty() ? "" : " reduction(+:" + sums + ")") +
        (maxima.empty() ? "" : " reduction(max:" + maxima + ")"));
    out("for (int c = 0; c < " + steps() + "; ++c) {");
    for (int n : reads)
      if (node(n).load && in_words(node(n)))
        out("const unsigned w" + std::to_string(n) + " = word(x" + std::to_string(node(n).input) + " + 2 * c);");
  }

  void write_phase(Text& out, int p) const {
    const auto nodes = phases_.computed_in(k_, p);
    const auto sums = phases_.reduced_after(k_, p);
    const bool last = p + 1 == phases_.count;
    std::string names, maxima;
    std::set<int> reads;
    for (int n : nodes) reads.insert(node(n).operands.begin(), node(n).operands.end());
    for (int n : sums) {
      std::string& list = node(n).code == OpCode::kRowScale ? maxima : names;
      list += (list.empty() ? "" : ", ") + begin_sums(out, "sum", n);
      reads.insert(node(n).operands[0]);
    }
    if (last)
      for (const RowOutput& o : k_.outputs) reads.insert(o.node);
    open_loop(out, names, maxima, reads);
    for (int n : nodes)
      for (int lane = 0; lane < lanes_; ++lane) {
        const bool rounds = node(n).code == OpCode::kCast && node(n).type == ElementType::kBF16;
        const std::string value =
            node(n).code == OpCode::kRope
                ? rope_expression(node(n), lane == 1, [&](int o, bool second) { return element(o, p, second ? 1 : 0); })
            : rounds ? rounded(node(n).operands[0], p, lane)
                     : expression(k_, n, [&](int o) { return element(o, p, lane); });
        out("const float " + name("v", n, lane) + " = " + value + ";");
      }
    for (int n : nodes)
      if (saved(n))
        for (int lane = 0; lane < lanes_; ++lane) out(name("s", n, lane) + "[c] = " + element(n, p, lane) + ";");
    for (int n : sums)
      for (int lane = 0; lane < lanes_; ++lane) {
        const std::string x = element(node(n).operands[0], p, lane);
        if (node(n).code == OpCode::kRowScale) {
          const std::string largest = name("sum", n, lane), magnitude = "__builtin_fabsf(" + x + ")";
          out(largest + " = " + largest + " > " + magnitude + " ? " + largest + " : " + magnitude + ";");
          continue;
        }
        out(name("sum", n, lane) + " += " + (node(n).code == OpCode::kRmsNorm ? x + " * " + x : x) + ";");
      }
    if (last) write_stores(out, p);
    out("}");
    for (int n : sums) write_norm(out, n, p);
    if (last)
      for (std::size_t o = 0; o < k_.outputs.size(); ++o)
        if (k_.outputs[o].one) out("*y" + std::to_string(o) + " = scale" + std::to_string(k_.outputs[o].node) + ";");
  }

  // All loads of an element precede its stores, because a result may share an operand's memory.
  void write_stores(Text& out, int p) const {
    for (std::size_t o = 0; o < k_.outputs.size(); ++o)
      for (int lane = 0; lane < lanes_ && !k_.outputs[o].one; ++lane) {
        const int n = k_.outputs[o].node;
        const bool rounds = k_.outputs[o].type == ElementType::kBF16 && !is_rounded(n);
        out("const float " + name("r", static_cast<int>(o), lane) + " = " +
            (rounds ? rounded(n, p, lane) : element(n, p, lane)) + ";");
      }
    for (std::size_t o = 0; o < k_.outputs.size(); ++o) {
      if (k_.outputs[o].one) continue;
      const std::string y = "y" + std::to_string(o), r = "r" + std::to_string(o) + "_";
      if (lanes_ == 2 && neighbours_ && k_.outputs[o].type == ElementType::kBF16) {
        out("store_word(" + y + " + 2 * c, " + r + "0, " + r + "1);");
        continue;
      }
      for (int lane = 0; lane < lanes_; ++lane)
        out("store(" + y + " + " + at(lane) + ", " + r + std::to_string(lane) + ");");
    }
  }

  // Turns a norm's sum into the values that its expression uses.
  void write_norm(Text& out, int n, int p) const {
    const std::string inverse = float_literal(1.0 / static_cast<double>(k_.width)), id = std::to_string(n),
                      eps = float_literal(node(n).eps);
    if (node(n).code == OpCode::kRowScale) {
      const std::string a = name("sum", n, 0), b = name("sum", n, lanes_ - 1), least = float_literal(kLeastRowScale);
      out("const float largest" + id + " = (" + a + " > " + b + " ? " + a + " : " + b + ") * " +
          float_literal(1 / kLargestF8) + ";");
      out("const float scale" + id + " = largest" + id + " > " + least + " ? largest" + id + " : " + least + ";");
      out("const float inverse" + id + " = 1.0f / scale" + id + ";");
      return;
    }
    if (node(n).code == OpCode::kRmsNorm) {
      out("const float scale" + id + " = 1.0f / __builtin_sqrtf(" + sum("sum", n) + " * " + inverse + " + " + eps +
          ");");
      return;
    }
    out("const float mean" + id + " = " + sum("sum", n) + " * " + inverse + ";");
    open_loop(out, begin_sums(out, "squares", n), "", {node(n).operands[0]});
    for (int lane = 0; lane < lanes_; ++lane) {
      // The phase's values are out of scope here, so those that norms read have been saved.
      const std::string d = "d" + std::to_string(lane);
      out("const float " + d + " = " + element(node(n).operands[0], p + 1, lane) + " - mean" + id + ";");
      out(name("squares", n, lane) + " += " + d + " * " + d + ";");
    }
    out("}");
    out("const float scale" + id + " = 1.0f / __builtin_sqrtf(" + sum("squares", n) + " * " + inverse + " + " + eps +
        ");");
  }

  const RowKernel& k_;
  const Phases phases_;
  const int lanes_;  // elements per loop iteration
  const bool neighbours_;
};

}  // namespace

std::size_t instance_words(const RowKernel& kernel) { return kOuterAxes + kernel.operands() * (kOuterAxes + 1); }

Source generate_cpp(const Plan& plan) {
  Text out;
  Source source;
  for (const RowKernel& kernel : plan.kernels) {
    Function(kernel).write(out);
    source.kernels.push_back({.name = kernel.name, .argument_words = instance_words(kernel)});
  }
  const bool f8 = std::any_of(plan.kernels.begin(), plan.kernels.end(), has_f8);
  source.text = "// DiTFleet " + std::string(kGeneratorId) + "\n" + kPrelude + (f8 ? kPreludeF8 : "") +
                out.take();  // without the block's name, so that equal kernels are equal text
  return source;
}

}  // namespace ditfleet::region
