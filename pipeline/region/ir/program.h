// A region's program: one transformer block as typed SSA. Built by Builder (builder.h), checked by verify().
//
// Weights are slots: a program names its parameters and never holds one, so that all copies of a block share it
// with a pointer table each. Sizes that differ from call to call (batch, image tokens, text tokens, frames) are
// symbols; what the model fixes (width, heads, head size) are numbers.
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
  kActivation,  // given anew in each call
  kParameter,   // a slot: one tensor per copy of the block
  kTable,       // computed once a request: rope, modulation rows
  kScalar,      // one number a call
  kAdapter,     // A of the low-rank adapters of a linear; their B are columns of its weight
  kResult,      // of an op
};
std::string_view name_of(ValueKind kind);

enum class OpCode : std::uint8_t {
  kLinear,  // x [.., K], weight [N, K], bias [N] or none → [.., N]; or x [batch, .., K], weight [batch, N, K]: each
            // sample by its own
  kLayerNorm,     // over the last axis, without parameters
  kRmsNorm,       // x, weight [W]
  kModulate,      // x, scale, shift: x · scale + shift
  kGateResidual,  // x, gate, branch: x + gate · branch
  kGeluTanh,
  kGeluErf,  // exact GELU: no generated kernel has it yet, `eager` does
  kSilu,
  kQuickGelu,  // x · sigmoid(1.702 x)
  kRope,       // x [.., W], table f32 [.., W] of (cos, sin) for each adjacent pair
  kAttention,  // q, k, v [.., T, H, hd] → [.., T, H, hd], softmax(q kᵀ · scale + bias) v for each head; the bias, if
               // there is one, is [batch or 1, H or 1, T, T of the keys], an input of the program
  kMul,
  kAdd,  // the second operand may broadcast
  kCast,
  kReshape,
  kSlice,
  kPermute,
  kJoin,  // views; join puts values one after another along an axis
};
std::string_view name_of(OpCode code);
bool is_view(OpCode code);    // reshape, slice, permute
bool is_row_op(OpCode code);  // each row (last axis) of the result depends on the same row of its operands

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
  bool causal = false;     // attention: a token attends to none after it
  double scale = 0;        // attention; 0: 1/√hd
  std::int64_t pitch =
      0;  // attention in bf16: tokens of the result lie so many elements apart where a library can write them so, as
          // they do in other blocks of the model, and one plan of it serves all; 0: wherever it is best for this block
};

struct Program {
  std::string block;  // "flux.double"
  std::vector<Value> values;
  std::vector<Op> ops;  // in an order that computes
  std::vector<int> outputs;

  std::vector<int> inputs() const;           // values that no op makes, in order
  std::vector<std::string> symbols() const;  // in order of first use in the inputs
  // The same with some symbols made numbers (compile.dynamic off).
  Program bind(const Sizes& sizes) const;
};

// One line an op: "%7 image_qkv: bf16 [batch, image, 576] = linear(%5 …, %3 …)".
std::string print(const Program& program);

// kInvalidArgument; the message names block, op (by its result) and what would be right.
Result<void> verify(const Program& program);

// What an op makes of operands of these types and shapes, or the error of verify(). `block` and `name` are for
// the message.
Result<Value> infer(const std::string& block, const std::string& name, const Op& op, const std::vector<Value>& operands,
                    const Shape& wanted, ElementType type);

}  // namespace ditfleet::region
