// A fused row kernel: what it computes of each row, without where rows lie. Kernels of one structure are one kernel;
// its instances (image and text stream, query and key) are launched together.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pipeline/region/ir/program.h"

namespace ditfleet::region {

inline constexpr std::size_t kOuterAxes = 4;  // axes before the row's own
inline constexpr std::int64_t kMaxRowWidth = 32768;

// One value of a row: an input's elements, or an op on earlier nodes. All arithmetic is fp32; nothing is rounded
// but what is stored and what a cast says.
struct RowNode {
  bool load = false;
  int input = -1;  // of a load
  OpCode code{};   // of an op
  std::vector<int> operands;
  double eps = 0;
  ElementType type = ElementType::kF32;  // of a cast: what it rounds to
};

struct RowOutput {
  int node = -1;
  ElementType type = ElementType::kF32;
};

struct RowKernel {
  std::string name;  // "layer_norm_modulate_3072"
  std::int64_t width = 0;
  std::vector<ElementType> inputs;
  std::vector<RowNode> nodes;
  std::vector<RowOutput> outputs;
  int instances = 1;  // the most that one launch has

  std::string structure() const;  // equal for kernels that may share one
  std::size_t operands() const { return inputs.size() + outputs.size(); }
};

}  // namespace ditfleet::region
