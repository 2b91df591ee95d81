// The result of fusion: buffers, and steps that are GEMMs, attention, fused row kernels and copies. Sizes stay symbols,
// so one plan serves every size.
#pragma once

#include <array>
#include <string>
#include <variant>
#include <vector>

#include "pipeline/region/fusion/row_kernel.h"
#include "pipeline/region/fusion/view.h"

namespace ditfleet::region {

enum class BufferKind : std::uint8_t {
  kInput,      // the caller's; never written
  kOutput,     // the caller's, for a result
  kWorkspace,  // in use between two steps
  kLibrary,    // the result of attention, contiguous, in memory that the library allocates
};

struct Buffer {
  BufferKind kind = BufferKind::kWorkspace;
  ElementType type = ElementType::kF32;
  Shape shape;
  int value = -1;             // kInput: the program's value; kOutput: the index in Program::outputs
  int first = -1, last = -1;  // steps between which it is in use
};

// out = Σ x · weight[:, first_column …]ᵀ + bias (+ out), or GELU of that. Several parts are the operands of a join
// that is not materialized.
struct GemmStep {
  struct Part {
    View x;
    Dim first_column, columns;
  };
  std::vector<Part> parts;
  int weight = -1, bias = -1;  // values of the program; bias -1: none
  bool per_sample = false;     // the weight is [batch, out, in]
  bool gelu = false;           // applied to the sum before it is rounded
  // fp8: the scales of x [.., 1], contiguous, and of the weight (a value). There is one part then.
  View x_scales;
  int weight_scales = -1;
  bool accumulates = false;  // the addend is in `out` already
  View out;
  std::string name;
};

struct AttentionStep {
  View q, k, v, out;
  bool across_ranks = false;  // see Op
  std::string name;
};

struct CopyStep {
  View from, to;
  std::string name;
};

// One launch of a row kernel. Each operand has kOuterAxes strides; a stride of 0 broadcasts.
struct RowStep {
  struct Operand {
    View view;
    std::array<Dim, kOuterAxes> strides;
  };
  struct Instance {
    std::array<Dim, kOuterAxes> extents;
    std::vector<Operand> operands;  // inputs, then outputs
  };
  int kernel = -1;
  std::vector<Instance> instances;
  std::string name;
};

using Step = std::variant<GemmStep, AttentionStep, CopyStep, RowStep>;

struct Plan {
  Program program;
  std::vector<Buffer> buffers;
  std::vector<RowKernel> kernels;
  std::vector<Step> steps;
  // For each output, the activation (a value of the program) whose memory it may overwrite; -1: none.
  std::vector<int> may_replace;

  const Buffer& buffer(int index) const { return buffers[static_cast<std::size_t>(index)]; }
};

// How fusion adapts a program to the devices of a compiler.
struct FuseOptions {
  // bf16 only: the GEMM's epilogue computes GELU. The sum is then rounded once, not twice.
  bool gelu_in_gemm = false;
  // Rounds every bf16 result inside a kernel too, as separate LibTorch operators would. Without this option kernels are
  // more exact than LibTorch.
  bool rounds_results = false;
  // The attention library can write rows at Op::token_stride. Otherwise Op::token_stride is ignored unless columns are
  // joined to these rows.
  bool attention_token_stride = false;
  // Copies whole rows with generated kernels, which on a GPU is twice as fast as LibTorch's strided copy.
  bool copies_in_rows = false;
};

// kInvalidArgument: an operator has no kernel (the block must run eagerly), or a size is too large. The message
// contains the operator or the size.
Result<Plan> fuse(const Program& program, const FuseOptions& options = {});

// One line per step, for --explain.
std::string print(const Plan& plan);

}  // namespace ditfleet::region
