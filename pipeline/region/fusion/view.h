// A value's place in a buffer: offset and strides in elements, which may contain symbols.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "pipeline/region/ir/dim.h"

namespace ditfleet::region {

struct View {
  int buffer = -1;
  Dim offset;
  Shape shape;
  std::vector<Dim> strides;
  // Bounding box in the buffer: start and length along each of the buffer's own axes.
  std::vector<std::pair<Dim, Dim>> box;
  bool own_axes = true;  // the axes are the buffer's, so a slice narrows the box
};

// All of a buffer, row-major.
View whole_buffer(int buffer, const Shape& shape);
View sliced(const View& view, int axis, const Dim& start, const Dim& length);
View permuted(const View& view, const std::vector<int>& order);
// Empty if the elements would have to move.
std::optional<View> reshaped(const View& view, const Shape& shape);
// Views that are adjacent along an axis of one buffer, as one view; empty if they are not.
std::optional<View> joined(const std::vector<View>& parts, int axis);

bool same_place(const View& a, const View& b);
bool provably_disjoint(const View& a, const View& b);  // no common element for any sizes

}  // namespace ditfleet::region
