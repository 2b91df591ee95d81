#include "pipeline/region/fusion/view.h"

#include <cstddef>

namespace ditfleet::region {

View whole_buffer(int buffer, const Shape& shape) {
  View view{.buffer = buffer, .shape = shape, .strides = std::vector<Dim>(shape.size(), Dim(1))};
  for (std::size_t i = shape.size(); i-- > 1;) view.strides[i - 1] = view.strides[i] * shape[i];
  for (const Dim& d : shape) view.box.emplace_back(0, d);
  return view;
}

View sliced(const View& view, int axis, const Dim& start, const Dim& length) {
  View part = view;
  const auto a = static_cast<std::size_t>(axis);
  part.offset = view.offset + start * view.strides[a];
  part.shape[a] = length;
  if (view.own_axes) part.box[a] = {view.box[a].first + start, length};
  return part;
}

View permuted(const View& view, const std::vector<int>& order) {
  View turned = view;
  for (std::size_t i = 0; i < order.size(); ++i) {
    turned.shape[i] = view.shape[static_cast<std::size_t>(order[i])];
    turned.strides[i] = view.strides[static_cast<std::size_t>(order[i])];
  }
  turned.own_axes = false;
  return turned;
}

namespace {

// The stride of an axis of length 1 does not matter.
struct Axes {
  std::vector<Dim> sizes, strides;
};
Axes without_ones(const View& view) {
  Axes axes;
  for (std::size_t i = 0; i < view.shape.size(); ++i)
    if (!(view.shape[i] == Dim(1))) {
      axes.sizes.push_back(view.shape[i]);
      axes.strides.push_back(view.strides[i]);
    }
  return axes;
}

}  // namespace

std::optional<View> reshaped(const View& view, const Shape& shape) {
  if (shape == view.shape) return view;
  const Axes from = without_ones(view);
  std::vector<std::size_t> to;  // axes of the result that are not of length 1
  for (std::size_t i = 0; i < shape.size(); ++i)
    if (!(shape[i] == Dim(1))) to.push_back(i);
  View made = view;
  made.shape = shape;
  made.strides.assign(shape.size(), Dim(0));
  made.own_axes = false;
  // Matches groups of old axes with groups of new axes of the same product, smallest groups first.
  std::size_t i = 0, j = 0;
  while (i < from.sizes.size() || j < to.size()) {
    bool matched = false;
    const std::size_t most = from.sizes.size() - i + to.size() - j;
    for (std::size_t total = 2; !matched && total <= most; ++total)
      for (std::size_t m = 1; !matched && m < total; ++m) {
        const std::size_t n = total - m;
        if (i + m > from.sizes.size() || j + n > to.size()) continue;
        Dim old_product = 1, new_product = 1;
        for (std::size_t a = 0; a < m; ++a) old_product = old_product * from.sizes[i + a];
        for (std::size_t a = 0; a < n; ++a) new_product = new_product * shape[to[j + a]];
        if (!(old_product == new_product)) continue;
        for (std::size_t a = 0; a + 1 < m; ++a)
          if (!(from.strides[i + a] == from.strides[i + a + 1] * from.sizes[i + a + 1])) return {};
        Dim stride = from.strides[i + m - 1];
        for (std::size_t a = n; a-- > 0;) {
          made.strides[to[j + a]] = stride;
          stride = stride * shape[to[j + a]];
        }
        i += m;
        j += n;
        matched = true;
      }
    if (!matched) return {};
  }
  return made;
}

std::optional<View> joined(const std::vector<View>& parts, int axis) {
  const auto a = static_cast<std::size_t>(axis);
  View whole = parts.front();
  for (std::size_t p = 1; p < parts.size(); ++p) {
    const View& next = parts[p];
    if (next.buffer != whole.buffer || next.strides != whole.strides ||
        !(next.offset == whole.offset + whole.shape[a] * whole.strides[a]))
      return {};
    whole.shape[a] = whole.shape[a] + next.shape[a];
    // The boxes merge if they differ along one axis and touch there.
    std::size_t differing = 0, at = 0;
    for (std::size_t x = 0; x < whole.box.size(); ++x)
      if (whole.box[x] != next.box[x]) {
        ++differing;
        at = x;
      }
    if (differing != 1 || !(next.box[at].first == whole.box[at].first + whole.box[at].second)) return {};
    whole.box[at].second = whole.box[at].second + next.box[at].second;
  }
  return whole;
}

bool same_place(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.shape == b.shape && a.strides == b.strides;
}

bool provably_disjoint(const View& a, const View& b) {
  if (a.buffer != b.buffer) return true;
  for (std::size_t x = 0; x < a.box.size() && x < b.box.size(); ++x) {
    const auto& [start_a, length_a] = a.box[x];
    const auto& [start_b, length_b] = b.box[x];
    if ((start_b - start_a - length_a).never_negative() || (start_a - start_b - length_b).never_negative()) return true;
  }
  return false;
}

}  // namespace ditfleet::region
