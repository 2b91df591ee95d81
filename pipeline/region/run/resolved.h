// A plan with its numbers filled in for one set of sizes: what a call walks through.
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

// One product of matrices; a view whose rows are not evenly spaced is several.
struct ResolvedGemm {
  struct Rows {
    std::int64_t x_offset = 0, x_stride = 0, out_offset = 0, out_stride = 0, count = 0;
    std::int64_t sample = 0;  // whose weight, where each has its own
  };
  struct Part {
    ResolvedView x;
    bool gather = false;  // x's rows are no matrix at all: copied first
    std::int64_t first_column = 0, columns = 0;
    std::vector<Rows> rows;
  };
  std::vector<Part> parts;
  int weight = -1, bias = -1;  // the program's values
  bool gelu = false;
  ResolvedView out;
};

struct ResolvedAttention {
  ResolvedView q, k, v, out;
  int bias = -1;  // the program's value
  bool causal = false;
  double scale = 0;
};

struct ResolvedCopy {
  ResolvedView from, to;
};

// The words of each instance as the kernels take them, less the pointers.
struct ResolvedRows {
  struct Operand {
    int buffer = -1;
    std::int64_t offset_bytes = 0;
    std::size_t word = 0;  // where its pointer goes; strides follow
    int input = -1;        // a whole input: the position among the inputs whose strides hold; else -1
    std::size_t axes = 0;  // of that input, less the row's
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
  std::vector<std::int64_t> workspace_offset;  // of each buffer, bytes; -1: not in the workspace
  std::int64_t workspace_bytes = 0;
  std::vector<std::vector<std::int64_t>> output_sizes;
  // Inputs, by position, of which a view other than the whole is taken: they must be contiguous and of these sizes.
  std::vector<bool> contiguous_input;
  std::vector<std::vector<std::int64_t>> input_sizes;
};

Resolved resolve(const Plan& plan, const Sizes& sizes);

}  // namespace ditfleet::region
