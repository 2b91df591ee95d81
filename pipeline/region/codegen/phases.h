// The order of a row kernel's computation. A phase is one pass over the row's elements. A reduction (the sums of a
// norm, the maximum of a row_scale) ends a phase, and its result is available in the next one.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pipeline/region/fusion/row_kernel.h"

namespace ditfleet::region {

struct Phases {
  explicit Phases(const RowKernel& kernel);

  int count = 1;
  std::vector<int> of_node;   // loads: 0
  std::vector<int> last_use;  // the last phase that needs the node; stores are in the last phase
  bool pairs = false;         // the kernel has a rope, which works on pairs of elements

  // Nodes with a value per element, other than loads, that phase p computes, in order.
  std::vector<int> computed_in(const RowKernel& kernel, int p) const;
  // Nodes that reduce a row and whose operand is complete after phase p, where they reduce it.
  std::vector<int> reduced_after(const RowKernel& kernel, int p) const;
};

bool is_reduction(OpCode code);

// The C expression for one element of a node; `of` names an operand's element. Not for loads and ropes.
std::string expression(const RowKernel& kernel, int node, const std::function<std::string(int)>& of);

// The C expression for the first or second element of a rope's pair; `of(node, second)` names an operand's element.
std::string rope_expression(const RowNode& node, bool second, const std::function<std::string(int, bool)>& of);

// The C expression for the position in a load's input of the row's element `at`.
std::string periodic(const RowNode& load, const std::string& at);

std::string float_literal(double value);

bool has_bf16(const RowKernel& kernel);  // among its operands
bool has_f8(const RowKernel& kernel);

// An operand's pointer: x0, x1, … for inputs, y0, y1, … for outputs; its type is "const bf16*".
std::string pointer_name(const RowKernel& kernel, std::size_t operand);
std::string pointer_type(const RowKernel& kernel, std::size_t operand);

}  // namespace ditfleet::region
