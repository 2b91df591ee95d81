// A fused row kernel: what it computes from each row, independent of where rows are in memory. Chains of the same
// structure share a kernel, and its instances (image and text stream, query and key) one launch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

inline constexpr std::size_t kOuterAxes = 4;  // axes before the row's own
inline constexpr std::int64_t kMaxRowWidth = 32768;

// One value of a row: an input's elements, or an op on earlier nodes. Arithmetic is fp32; only stores and casts round.
struct RowNode {
  bool load = false;
  int input = -1;           // load
  std::int64_t period = 0;  // load: the input has only this many elements per row and repeats; 0: the row's width
  OpCode code{};            // op
  std::vector<int> operands;
  double eps = 0;
  ElementType type = ElementType::kF32;  // cast: rounds to this
};

struct RowOutput {
  int node = -1;
  ElementType type = ElementType::kF32;
  bool one = false;  // one element per row
};

struct RowKernel {
  std::string name;  // "layer_norm_modulate_3072"
  std::int64_t width = 0;
  std::vector<ElementType> inputs;
  std::vector<RowNode> nodes;
  std::vector<RowOutput> outputs;
  int instances = 1;  // at most, in one launch

  std::string structure() const;  // equal for kernels that can be shared
  std::size_t operands() const { return inputs.size() + outputs.size(); }
  bool one_per_row(std::size_t operand) const {
    return operand >= inputs.size() && outputs[operand - inputs.size()].one;
  }
  ElementType type_of(std::size_t operand) const {
    return operand < inputs.size() ? inputs[operand] : outputs[operand - inputs.size()].type;
  }
};

}  // namespace ditfleet::region
