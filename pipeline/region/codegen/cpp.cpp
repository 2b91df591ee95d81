#include <set>

#include "pipeline/region/codegen/phases.h"
#include "pipeline/region/codegen/source.h"
#include "pipeline/region/codegen/text.h"

namespace ditfleet::region {
namespace {

// exp: Cephes' expf (range reduction by ln 2 in two parts, polynomial of degree 5), written so that it vectorizes. The
// argument is held within ±87 through its bits: comparing floats costs twice as much, since they may be NaN. A NaN comes
// back out of gelu_tanh, silu and quick_gelu through their numerator.
constexpr const char* kPrelude = R"(typedef unsigned short bf16;
typedef long long i64;
static inline float bits_to_float(unsigned u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
static inline unsigned float_to_bits(float f) { unsigned u; __builtin_memcpy(&u, &f, 4); return u; }
static inline float load(float v) { return v; }
static inline float load(bf16 v) { return bits_to_float((unsigned)v << 16); }
static inline bf16 to_bf16(float f) {
  const unsigned u = float_to_bits(f);
  const unsigned rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (bf16)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
static inline void store(float* p, float v) { *p = v; }
static inline void store(bf16* p, float v) { *p = to_bf16(v); }
static inline float round_bf16(float v) { return load(to_bf16(v)); }
static inline float exp_of(float x) {
  const unsigned u = float_to_bits(x), size = u & 0x7fffffffu;
  x = bits_to_float((size < 0x42ae0000u ? size : 0x42ae0000u) | (u & 0x80000000u));
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
static inline float quick_gelu(float x) { return x / (1.0f + exp_of(-1.702f * x)); }
)";

constexpr const char* type_name(ElementType type) { return type == ElementType::kF32 ? "float" : "bf16"; }

class Function {
 public:
  explicit Function(const RowKernel& kernel) : k_(kernel), phases_(kernel), step_(phases_.pairs ? 2 : 1) {}

  void write(Text& out) {
    const std::string width = std::to_string(k_.width);
    out("");
    out("extern \"C\" void " + k_.name + "(const i64* a, i64 first, i64 end) {");
    out("i64 i3 = first % a[3], i2 = first / a[3] % a[2], i1 = first / a[3] / a[2] % a[1], i0 = first / a[3] / a[2] / a[1];");
    for (std::size_t o = 0; o < k_.operands(); ++o) out(pointer_type(o) + pointer(o) + ";");
    out("bool moved = true;");
    out("for (i64 row = first; row < end; ++row) {");
    out("if (moved) {");
    for (std::size_t o = 0; o < k_.operands(); ++o) {
      const std::size_t at = kOuterAxes + o * (kOuterAxes + 1);
      const auto stride = [&](std::size_t axis) { return "a[" + std::to_string(at + 1 + axis) + "]"; };
      out(pointer(o) + " = (" + pointer_type(o) + ")a[" + std::to_string(at) + "] + i0 * " + stride(0) + " + i1 * " + stride(1) + " + i2 * " +
          stride(2) + " + i3 * " + stride(3) + ";");
    }
    out("}");
    for (std::size_t n = 0; n < k_.nodes.size(); ++n)
      if (saved(static_cast<int>(n))) out("float s" + std::to_string(n) + "[" + width + "];");
    for (int p = 0; p < phases_.count; ++p) write_phase(out, p, width);
    // The next row: most often the next one along the last axis.
    out("moved = ++i3 == a[3];");
    out("if (moved) {");
    out("i3 = 0;");
    out("if (++i2 == a[2]) { i2 = 0; if (++i1 == a[1]) { i1 = 0; ++i0; } }");
    out("} else {");
    for (std::size_t o = 0; o < k_.operands(); ++o)
      out(pointer(o) + " += a[" + std::to_string(kOuterAxes + o * (kOuterAxes + 1) + 1 + 3) + "];");
    out("}");
    out("}");
    out("}");
  }

 private:
  std::string pointer(std::size_t o) const { return (o < k_.inputs.size() ? "x" : "y") + std::to_string(o < k_.inputs.size() ? o : o - k_.inputs.size()); }
  std::string pointer_type(std::size_t o) const {
    return o < k_.inputs.size() ? std::string("const ") + type_name(k_.inputs[o]) + "* "
                                : std::string(type_name(k_.outputs[o - k_.inputs.size()].type)) + "* ";
  }
  // Computed values that a later phase needs wait in an array; loads are loaded again.
  bool saved(int n) const {
    const auto i = static_cast<std::size_t>(n);
    return !k_.nodes[i].load && phases_.last_use[i] > phases_.of_node[i];
  }
  std::string element(int n, int phase, int lane) const {
    const auto i = static_cast<std::size_t>(n);
    const RowNode& node = k_.nodes[i];
    const std::string at = lane == 0 ? "[c]" : "[c + 1]";
    if (node.load) return "load(x" + std::to_string(node.input) + at + ")";
    if (phases_.of_node[i] == phase) return "v" + std::to_string(n) + (step_ == 2 ? "_" + std::to_string(lane) : "");
    return "s" + std::to_string(n) + at;
  }
  void open_loop(Text& out, const std::string& width, const std::string& sums) const {
    out("#pragma omp simd" + (sums.empty() ? "" : " reduction(+:" + sums + ")"));
    out("for (int c = 0; c < " + width + "; c += " + std::to_string(step_) + ") {");
  }

  void write_phase(Text& out, int p, const std::string& width) const {
    const auto nodes = phases_.computed_in(k_, p);
    const auto sums = phases_.summed_after(k_, p);
    const bool last = p + 1 == phases_.count;
    std::string names;
    for (int n : sums) {
      out("float sum" + std::to_string(n) + " = 0.0f;");
      names += (names.empty() ? "sum" : ", sum") + std::to_string(n);
    }
    open_loop(out, width, names);
    for (int n : nodes)
      for (int lane = 0; lane < step_; ++lane) {
        const RowNode& node = k_.nodes[static_cast<std::size_t>(n)];
        const std::string value =
            node.code == OpCode::kRope
                ? rope_expression(node, lane == 1, [&](int o, bool second) { return element(o, p, second ? 1 : 0); })
                : expression(k_, n, [&](int o) { return element(o, p, lane); });
        out("const float " + element(n, p, lane) + " = " + value + ";");
      }
    for (int n : nodes)
      if (saved(n))
        for (int lane = 0; lane < step_; ++lane) out("s" + std::to_string(n) + (lane ? "[c + 1] = " : "[c] = ") + element(n, p, lane) + ";");
    for (int n : sums)
      for (int lane = 0; lane < step_; ++lane) {
        const RowNode& node = k_.nodes[static_cast<std::size_t>(n)];
        const std::string x = element(node.operands[0], p, lane);
        out("sum" + std::to_string(n) + " += " + (node.code == OpCode::kRmsNorm ? x + " * " + x : x) + ";");
      }
    if (last)  // all loads of an element come before its stores: a result may take an operand's memory
      for (int lane = 0; lane < step_; ++lane)
        for (std::size_t o = 0; o < k_.outputs.size(); ++o)
          out("const float r" + std::to_string(o) + "_" + std::to_string(lane) + " = " + element(k_.outputs[o].node, p, lane) + ";");
    if (last)
      for (int lane = 0; lane < step_; ++lane)
        for (std::size_t o = 0; o < k_.outputs.size(); ++o)
          out("store(y" + std::to_string(o) + (lane ? " + c + 1, r" : " + c, r") + std::to_string(o) + "_" + std::to_string(lane) + ");");
    out("}");
    const std::string inverse = float_literal(1.0 / static_cast<double>(k_.width));
    for (int n : sums) {
      const RowNode& node = k_.nodes[static_cast<std::size_t>(n)];
      const std::string id = std::to_string(n), eps = float_literal(node.eps);
      if (node.code == OpCode::kRmsNorm) {
        out("const float scale" + id + " = 1.0f / __builtin_sqrtf(sum" + id + " * " + inverse + " + " + eps + ");");
        continue;
      }
      out("const float mean" + id + " = sum" + id + " * " + inverse + ";");
      out("float squares" + id + " = 0.0f;");
      open_loop(out, width, "squares" + id);
      for (int lane = 0; lane < step_; ++lane) {
        // The phase's own values are out of scope here: what norms read is saved.
        const std::string d = "d" + std::to_string(lane);
        out("const float " + d + " = " + element(node.operands[0], p + 1, lane) + " - mean" + id + ";");
        out("squares" + id + " += " + d + " * " + d + ";");
      }
      out("}");
      out("const float scale" + id + " = 1.0f / __builtin_sqrtf(squares" + id + " * " + inverse + " + " + eps + ");");
    }
  }

  const RowKernel& k_;
  const Phases phases_;
  const int step_;
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
  source.text = "// DiTFleet " + std::string(kGeneratorId) + ", region " + plan.program.block + "\n" + kPrelude + out.take();
  return source;
}

}  // namespace ditfleet::region
