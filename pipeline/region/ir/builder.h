// Builds the program of a block: each call adds an operator and infers the type of its result.
//
//   Builder b("block", ElementType::kBF16);
//   auto x = b.activation("tokens", {batch, tokens, width});
//   auto y = b.modulate(b.layer_norm("norm", x, 1e-6), …);
//   Result<Program> program = b.finish({y});
//
// finish() returns the first error; calls after an error do nothing. Not thread-safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

class Builder {
 public:
  struct Ref {  // -1: empty
    int value = -1;
  };
  struct Linear {
    Ref weight, bias;  // bias: an empty Ref for none
    Ref adapter;       // A; an empty Ref for none
    Dim rank;          // of all adapters together
  };
  struct Attention {
    Ref bias;  // an empty Ref for none
    bool causal = false;
    double scale = 0;               // 0: 1/√ of the head size
    std::int64_t token_stride = 0;  // see Op
  };

  Builder(std::string block, ElementType type) : type_(type) { program_.block = std::move(block); }

  Ref activation(const std::string& name, Shape shape) {
    return input(name, ValueKind::kActivation, type_, std::move(shape));
  }
  Ref parameter(const std::string& name, Shape shape) {
    return input(name, ValueKind::kParameter, type_, std::move(shape));
  }
  Ref table(const std::string& name, ElementType type, Shape shape) {
    return input(name, ValueKind::kTable, type, std::move(shape));
  }
  Linear linear_slots(const std::string& name, std::int64_t in, std::int64_t out);  // NAME.weight, NAME.bias
  // With low-rank adapters. NAME.adapter [batch, NAME.rank, in] is A; rows that a sample does not use are zero.
  // NAME.weight has NAME.rank more columns for B. adapted_linear() expects them after the weight's own columns.
  Linear adapted_slots(const std::string& name, const Dim& batch, std::int64_t in, std::int64_t out);

  // `name` names the result in messages and kernels; it must be unique in the block.
  Ref linear(const std::string& name, Ref x, Linear slots);
  // x · Aᵀ of each sample: [batch, .., rank].
  Ref low_rank(const std::string& name, Ref x, Linear slots);
  // [x | x·Aᵀ] · [W | B]ᵀ + bias, or linear() if `slots` has no adapter.
  Ref adapted_linear(const std::string& name, Ref x, Linear slots);
  Ref layer_norm(const std::string& name, Ref x, double eps);
  Ref rms_norm(const std::string& name, Ref x, Ref weight, double eps);
  Ref modulate(const std::string& name, Ref x, Ref scale, Ref shift);
  Ref gate_residual(const std::string& name, Ref x, Ref gate, Ref branch);
  Ref gelu_tanh(const std::string& name, Ref x);
  Ref gelu_erf(const std::string& name, Ref x);
  Ref silu(const std::string& name, Ref x);
  Ref quick_gelu(const std::string& name, Ref x);
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

 private:
  Ref input(const std::string& name, ValueKind kind, ElementType type, Shape shape);
  // `shape`: of a reshape; `cast_to`: of a cast.
  Ref add_op(const std::string& name, Op op, const std::vector<Ref>& operands, const Shape& shape = {},
             ElementType cast_to = ElementType::kF32);

  const ElementType type_;
  Program program_;
  std::optional<Error> error_;
};

}  // namespace ditfleet::region
