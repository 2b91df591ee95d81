// Builds the program of a block: each call adds an operator and infers the type of its result.
//
//   Builder b("block", ElementType::kBF16);
//   auto x = b.activation("tokens", {batch, tokens, width});
//   auto y = b.modulate(b.layer_norm("norm", x, 1e-6), …);
//   Result<Program> program = b.finish({y});
//
// finish() returns the first error; calls after an error do nothing. Not thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

// The largest combined rank of adapters at one matrix.
inline constexpr std::int64_t kMostAdapterColumns = 1024;

class Builder {
 public:
  struct Ref {  // -1: empty
    int value = -1;
  };
  // Empty Refs: what the linear does not have.
  struct Linear {
    Ref weight, bias;
    Ref adapter;  // A
    Dim rank;     // of all adapters together
    Ref up;       // B, if it is not in columns of the weight
    Ref scale;    // of an f8 weight, by row
  };
  // How a weight is stored and used.
  enum class Weight {
    kOwn,    // in the block's type
    kApart,  // as kOwn, but B of adapters is a parameter of its own
    kWide,   // f32, as are the product and its input; B as for kApart
    kF8,     // f8 with a scale per row; the input is quantized by row; B as for kApart
  };
  struct Attention {
    std::int64_t token_stride = 0;  // see Op
    bool across_ranks = false;      // see Op
  };

  Builder(std::string block, ElementType type) : type_(type) { program_.block = std::move(block); }

  Ref activation(const std::string& name, Shape shape) {
    return input(name, ValueKind::kActivation, type_, std::move(shape));
  }
  Ref parameter(const std::string& name, Shape shape) { return parameter(name, type_, std::move(shape)); }
  Ref parameter(const std::string& name, ElementType type, Shape shape) {
    return input(name, ValueKind::kParameter, type, std::move(shape));
  }
  Ref table(const std::string& name, ElementType type, Shape shape) {
    return input(name, ValueKind::kTable, type, std::move(shape));
  }
  // NAME.weight, NAME.bias, with kF8 NAME.scale.
  Linear linear_slots(const std::string& name, std::int64_t in, std::int64_t out, Weight weight = Weight::kOwn);
  // With low-rank adapters. NAME.adapter [batch, NAME.rank, in] is A; rows that a sample does not use are zero. B is
  // NAME.up [out, NAME.rank], or with kOwn in NAME.rank more columns of NAME.weight, which adapted_linear() expects
  // after the weight's own columns.
  Linear adapted_slots(const std::string& name, const Dim& batch, std::int64_t in, std::int64_t out,
                       Weight weight = Weight::kOwn);

  // `name` names the result in messages and kernels; it must be unique in the block. x and the result have the block's
  // type, whatever the weight's is.
  Ref linear(const std::string& name, Ref x, const Linear& slots) { return linear(name, x, slots, {}); }
  // x · Aᵀ of each sample: [batch, .., rank].
  Ref low_rank(const std::string& name, Ref x, const Linear& slots);
  // x · Wᵀ + x · Aᵀ · Bᵀ + bias. As [x | x·Aᵀ] · [W | B]ᵀ, or with `up` as an addend of the product. linear() if
  // `slots` has no adapter.
  Ref adapted_linear(const std::string& name, Ref x, const Linear& slots);
  Ref layer_norm(const std::string& name, Ref x, double eps);
  // An empty weight: without one.
  Ref rms_norm(const std::string& name, Ref x, Ref weight, double eps);
  Ref modulate(const std::string& name, Ref x, Ref scale, Ref shift);
  Ref gate_residual(const std::string& name, Ref x, Ref gate, Ref branch);
  Ref gelu_tanh(const std::string& name, Ref x);
  Ref gelu_erf(const std::string& name, Ref x);
  Ref silu(const std::string& name, Ref x);
  // x [.., 2 · W] → silu(first half) · second half, [.., W].
  Ref swiglu(const std::string& name, Ref x);
  Ref rope(const std::string& name, Ref x, Ref table);
  Ref attention(const std::string& name, Ref q, Ref k, Ref v) { return attention(name, q, k, v, Attention()); }
  Ref attention(const std::string& name, Ref q, Ref k, Ref v, const Attention& form);
  Ref mul(const std::string& name, Ref a, Ref b);
  Ref add(const std::string& name, Ref a, Ref b);
  Ref cast(const std::string& name, Ref x, ElementType type);
  Ref reshape(const std::string& name, Ref x, Shape shape);
  Ref slice(const std::string& name, Ref x, int axis, Dim start, Dim length);
  Ref permute(const std::string& name, Ref x, std::vector<int> order);
  Ref join(const std::string& name, int axis, const std::vector<Ref>& parts);
  Result<Program> finish(const std::vector<Ref>& outputs);

  Ref row_scale(const std::string& name, Ref x);
  Ref quantize_row(const std::string& name, Ref x, Ref scale);

 private:
  Ref linear(const std::string& name, Ref x, const Linear& slots, Ref addend);
  Ref input(const std::string& name, ValueKind kind, ElementType type, Shape shape);
  // `shape`: of a reshape; `cast_to`: of a cast.
  Ref add_op(const std::string& name, Op op, const std::vector<Ref>& operands, const Shape& shape = {},
             ElementType cast_to = ElementType::kF32);

  const ElementType type_;
  Program program_;
  std::map<int, std::pair<Ref, Ref>> quantized_;  // value → its codes and scales
  std::optional<Error> error_;
};

// The name of a block's program: "BLOCK.fp8.adapted".
std::string program_name(const std::string& block, const std::vector<Builder::Weight>& weights, bool adapters);

}  // namespace ditfleet::region
