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

enum class ElementType : std::uint8_t { kF32, kBF16, kF8 };  // kF8: E4M3, without infinities
std::string_view name_of(ElementType type);                  // "f32", "bf16", "f8"
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
  // x [.., K], weight [N, K], bias [N] or none → [.., N]; or x [batch, .., K], weight [batch, N, K]. After the bias may
  // follow an addend [.., N], which is added to the product.
  kLinear,
  // The same in fp8: x f8 [.., K], weight f8 [N, K], scales of x f32 [.., 1], scales of weight f32 [N], bias [N] →
  // [.., N] of the bias's type: x · weightᵀ · scales + bias. An addend may follow.
  kScaledLinear,
  kLayerNorm,     // over the last axis, without parameters
  kRmsNorm,       // x, weight [W] or none
  kModulate,      // x, scale, shift: x · scale + shift
  kGateResidual,  // x, gate, branch: x + gate · branch; with an f32 gate computed in f32 and rounded once
  kGeluTanh,
  kGeluErf,  // exact GELU; only `eager` computes it
  kSilu,
  // x [.., W], table f32 [.., P] of (cos, sin) for each adjacent pair. P divides W: the table repeats along the row.
  kRope,
  // softmax(q kᵀ / √hd) v for each head: q [.., T, H, hd], k and v [.., T of the keys, H, hd] → [.., T, H, hd] of v's
  // type. If q and k are f8, v is rounded to f8 with a scale per sample and head.
  kAttention,
  kMul,
  kAdd,  // the second operand may broadcast
  kCast,
  kRowScale,     // x [.., W] → f32 [.., 1]: max |x| / 448, at least kLeastRowScale
  kQuantizeRow,  // x [.., W], its row_scale [.., 1] → f8 [.., W]: x / scale
  kReshape,
  kSlice,
  kPermute,
  kJoin,  // puts values one after another along an axis
};
std::string_view name_of(OpCode code);
// The smallest scale of a row: a row of zeros must not divide by zero.
inline constexpr float kLeastRowScale = 1e-30F, kLargestF8 = 448;
std::size_t operands_of(OpCode code);  // without optional ones; of a join: at least
bool is_view(OpCode code);             // reshape, slice, permute
bool is_linear(OpCode code);           // linear, scaled_linear
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
  // bf16 attention: elements between tokens of the result, if the library supports it. Blocks with the same stride
  // share the library's plan. 0: the best stride for this block.
  std::int64_t token_stride = 0;
  // attention: where several ranks share the tokens, the queries attend to the tokens of all ranks, not only to this
  // one's. The program is the same for any number of ranks.
  bool across_ranks = false;
};

// Of a linear: the value, or -1.
int bias_of(const Op& op);
int addend_of(const Op& op);

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

// The program with q and k of its attentions across ranks (self-attention) in f8, rounded where they are computed:
// after a norm their elements are neither so small nor so large that f8 would need a scale.
Program with_f8_attention(Program program);
bool has_f8_attention(const Program& program);

// kInvalidArgument: the message contains the block, the operator's result and what would be right.
Result<void> verify(const Program& program);

// The type and shape of an op's result, or the error that verify() would return. `block` and `name` are for the
// message.
Result<Value> infer(const std::string& block, const std::string& name, const Op& op, const std::vector<Value>& operands,
                    const Shape& wanted, ElementType type);

}  // namespace ditfleet::region
