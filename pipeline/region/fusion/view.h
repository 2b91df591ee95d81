// Where a value lies in a buffer: offset and strides in elements, as sizes that may hold symbols.
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
  // The part of the buffer it may touch: start and length along each of the buffer's own axes.
  std::vector<std::pair<Dim, Dim>> box;
  bool own_axes = true;  // its axes are the buffer's, so that a slice narrows the box
};

// All of a buffer, row by row.
View whole_buffer(int buffer, const Shape& shape);
View sliced(const View& view, int axis, const Dim& start, const Dim& length);
View permuted(const View& view, const std::vector<int>& order);
// Nothing when the elements would have to move.
std::optional<View> reshaped(const View& view, const Shape& shape);
// Views that lie one behind another along an axis of one buffer, as one; nothing if they don't.
std::optional<View> joined(const std::vector<View>& parts, int axis);

bool same_place(const View& a, const View& b);
bool surely_apart(const View& a, const View& b);  // they share no element, whatever the sizes

}  // namespace ditfleet::region
