// What fusion makes of a program: buffers, and steps that are GEMMs, attention, fused row kernels and copies.
// Sizes stay symbols: one plan serves every size.
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
  kWorkspace,  // lives between two steps
  kLibrary,    // made for or by the attention library, contiguous
};

struct Buffer {
  BufferKind kind = BufferKind::kWorkspace;
  ElementType type = ElementType::kF32;
  Shape shape;
  int value = -1;             // of kInput: the program's value; of kOutput: the index in Program::outputs
  int first = -1, last = -1;  // steps between which it holds something
};

// out = Σ x · weight[:, first_column …]ᵀ + bias, or GELU of that. More than one part: the operands of a join that never
// happens.
struct GemmStep {
  struct Part {
    View x;
    Dim first_column, columns;
  };
  std::vector<Part> parts;
  int weight = -1, bias = -1;  // the program's values; bias -1: none
  bool per_sample = false;     // the weight is [batch, out, in]
  bool gelu = false;           // of the sum, before it is rounded
  View out;
  std::string name;
};

struct AttentionStep {
  View q, k, v, out;
  int bias = -1;  // the program's value, an input; -1: none
  bool causal = false;
  double scale = 0;  // 0: 1/√ of the head size
  std::string name;
};

struct CopyStep {
  View from, to;
  std::string name;
};

// One launch of a row kernel. Every operand's strides are of kOuterAxes axes, 0 where it broadcasts.
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
  // For each output, the activation (a program's value) whose memory may be given for it; -1: none.
  std::vector<int> may_replace;
};

// What is better on a compiler's devices.
struct FuseOptions {
  bool gelu_in_gemm = false;  // in bf16: the sum is then rounded once, not twice
  // Every result in bf16 is rounded, also inside a kernel: what LibTorch's operators compute one by one, instead of
  // what errs less.
  bool rounds_results = false;
  bool attention_pitch = false;  // attention's library writes rows as far apart as Op::pitch says; else that is ignored
                                 // where nothing is joined to them
  bool copies_in_rows =
      false;  // copies of whole rows are kernels of ours, twice as fast as a GPU library's strided copy
};

// kInvalidArgument names the op that has no kernel (`eager` computes it) or what is too large.
Result<Plan> fuse(const Program& program, const FuseOptions& options = {});

// Each step on a line, for --explain.
std::string print(const Plan& plan);

}  // namespace ditfleet::region
