// A plan with its symbols replaced by one call's sizes.
#pragma once

#include <variant>
#include <vector>

#include "pipeline/region/fusion/plan.h"

namespace ditfleet::region {

struct ResolvedView {
  int buffer = -1;
  std::int64_t offset = 0;  // elements
  std::vector<std::int64_t> sizes, strides;
};

// A matrix product. A view whose rows are not evenly spaced needs several products.
struct ResolvedGemm {
  struct Rows {
    std::int64_t x_offset = 0, x_stride = 0, out_offset = 0, out_stride = 0, count = 0;
    std::int64_t sample = 0;  // selects the weight if each sample has its own
    std::int64_t first = 0;   // row of x
  };
  struct Part {
    ResolvedView x;
    bool gather = false;  // x is not a matrix with a row stride and is copied first
    std::int64_t first_column = 0, columns = 0;
    std::vector<Rows> rows;
  };
  std::vector<Part> parts;
  int weight = -1, bias = -1;  // the program's values
  bool gelu = false;
  ResolvedView x_scales;  // fp8
  int weight_scales = -1;
  bool accumulates = false;
  ResolvedView out;
};

struct ResolvedAttention {
  ResolvedView q, k, v, out;
  bool across_ranks = false;
  std::size_t ready = 0;  // the first step before which q, k and v are complete
};

struct ResolvedCopy {
  ResolvedView from, to;
};

// The kernel arguments of each instance, without the pointers.
struct ResolvedRows {
  struct Operand {
    int buffer = -1;
    std::int64_t offset_bytes = 0;
    std::size_t word = 0;  // position of its pointer; the strides follow
    int input = -1;        // index of the input if the operand is a complete input, whose strides then apply; else -1
    std::size_t axes = 0;  // axes of that input without the row's
  };
  struct Instance {
    std::vector<long long> words;
    std::vector<Operand> operands;
    std::int64_t rows = 0;
  };
  int kernel = -1;
  std::vector<Instance> instances;
  std::int64_t rows = 0;
};

using ResolvedStep = std::variant<ResolvedGemm, ResolvedAttention, ResolvedCopy, ResolvedRows>;

struct Resolved {
  std::vector<ResolvedStep> steps;
  std::vector<std::int64_t> workspace_offset;  // of each buffer, in bytes; -1: not in the workspace
  std::int64_t workspace_bytes = 0;
  std::vector<std::vector<std::int64_t>> output_sizes;
  // For each input: whether it must be contiguous, because a step reads only a part of it; and its size.
  std::vector<bool> contiguous_input;
  std::vector<std::vector<std::int64_t>> input_sizes;
};

Resolved resolve(const Plan& plan, const Sizes& sizes);

}  // namespace ditfleet::region
