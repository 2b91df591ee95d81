// A region's program: one transformer block as typed SSA. Built by Builder (builder.h), checked by verify().
//
// Weights are inputs: a program contains only their names. All copies of a block share the program, and each copy has a
// pointer table. Sizes that differ between calls (batch, image tokens, text tokens, frames) are symbols. Sizes that the
// model fixes (width, heads, head size) are numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/region/ir/dim.h"
#include "shared/core/result.h"

namespace ditfleet::region {

enum class ElementType : std::uint8_t { kF32, kBF16 };
std::string_view name_of(ElementType type);  // "f32", "bf16"
std::int64_t bytes_of(ElementType type);

// What a value is.
enum class ValueKind : std::uint8_t {
  kActivation,  // differs in each call
  kParameter,   // a weight: one tensor per copy of the block
  kTable,       // computed once per request: rope, modulation rows
  kScalar,      // one number per call
  kAdapter,     // A of the low-rank adapters of a linear; B is in columns of the weight
  kResult,      // computed by an operator
};
std::string_view name_of(ValueKind kind);

enum class OpCode : std::uint8_t {
  kLinear,        // x [.., K], weight [N, K], bias [N] or none → [.., N]; or x [batch, .., K], weight [batch, N, K]
  kLayerNorm,     // over the last axis, without parameters
  kRmsNorm,       // x, weight [W]
  kModulate,      // x, scale, shift: x · scale + shift
  kGateResidual,  // x, gate, branch: x + gate · branch
  kGeluTanh,
  kGeluErf,  // exact GELU; only `eager` computes it
  kSilu,
  kQuickGelu,  // x · sigmoid(1.702 x)
  kRope,       // x [.., W], table f32 [.., W] of (cos, sin) for each adjacent pair
  // softmax(q kᵀ · scale + bias) v for each head: q [.., T, H, hd], k and v [.., T of the keys, H, hd] → [.., T, H,
  // hd]. The optional bias is an input of the program: [batch or 1, H or 1, T, T of the keys].
  kAttention,
  kMul,
  kAdd,  // the second operand may broadcast
  kCast,
  kReshape,
  kSlice,
  kPermute,
  kJoin,  // puts values one after another along an axis
};
std::string_view name_of(OpCode code);
std::size_t operands_of(OpCode code);  // without an optional bias; of a join: at least
bool is_view(OpCode code);             // reshape, slice, permute
bool is_row_op(OpCode code);           // each row (last axis) of the result depends on the same row of its operands

struct Value {
  std::string name;
  ValueKind kind = ValueKind::kResult;
  ElementType type = ElementType::kF32;
  Shape shape;
};

// Attributes that an op does not use stay at their defaults.
struct Op {
  OpCode code;
  std::vector<int> inputs;  // values, by index
  int output = -1;
  double eps = 0;          // layer_norm, rms_norm
  int axis = 0;            // slice, join
  Dim start, length;       // slice
  std::vector<int> order;  // permute: result axis i is axis order[i] of the operand
  bool causal = false;     // attention: a token does not attend to later ones
  double scale = 0;        // attention; 0: 1/√hd
  // bf16 attention: elements between tokens of the result, if the library supports it. Blocks with the same stride
  // share the library's plan. 0: the best stride for this block.
  std::int64_t token_stride = 0;
};

struct Program {
  std::string block;  // its name
  std::vector<Value> values;
  std::vector<Op> ops;  // operands before their users
  std::vector<int> outputs;

  const Value& value(int index) const { return values[static_cast<std::size_t>(index)]; }
  std::vector<int> inputs() const;           // values that no op makes, in order
  std::vector<std::string> symbols() const;  // in order of first use in the inputs
  // Replaces symbols by numbers (compile.dynamic off).
  Program bind(const Sizes& sizes) const;
};

// One line per op: "%7 image_qkv: bf16 [batch, image, 576] = linear(%5 …, %3 …)".
std::string print(const Program& program);

// kInvalidArgument: the message contains the block, the operator's result and what would be right.
Result<void> verify(const Program& program);

// The type and shape of an op's result, or the error that verify() would return. `block` and `name` are for the
// message.
Result<Value> infer(const std::string& block, const std::string& name, const Op& op, const std::vector<Value>& operands,
                    const Shape& wanted, ElementType type);

}  // namespace ditfleet::region
