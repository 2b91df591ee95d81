#include "shared/media/resize.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ditfleet::media {
namespace {

constexpr double kSupport = 3;
constexpr int kPrecisionBits = 32 - 8 - 2;  // of the weights, as in Pillow's Resample.c

double sinc(double x) { return x == 0 ? 1 : std::sin(x * std::numbers::pi) / (x * std::numbers::pi); }
double lanczos(double x) { return x >= -kSupport && x < kSupport ? sinc(x) * sinc(x / kSupport) : 0; }

// The input pixels of one output pixel, and their weights.
struct Window {
  int first = 0;
  std::vector<std::int32_t> weights;
};

std::vector<Window> windows(int in, int out) {
  const double scale = static_cast<double>(in) / out, filter_scale = std::max(scale, 1.0);
  const double support = kSupport * filter_scale;
  std::vector<Window> all(static_cast<std::size_t>(out));
  for (int i = 0; i < out; ++i) {
    const double center = (i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(center - support + 0.5));
    const int last = std::min(in, static_cast<int>(center + support + 0.5));
    std::vector<double> weights;
    double sum = 0;
    for (int x = first; x < last; ++x) {
      weights.push_back(lanczos((x - center + 0.5) * (1 / filter_scale)));
      sum += weights.back();
    }
    Window& window = all[static_cast<std::size_t>(i)];
    window.first = first;
    for (double weight : weights) {
      if (sum != 0) weight /= sum;
      window.weights.push_back(static_cast<std::int32_t>(weight * (1 << kPrecisionBits) + (weight < 0 ? -0.5 : 0.5)));
    }
  }
  return all;
}

// Resizes one axis of `lines` lines. Pixel i of a line is `step` bytes after pixel i − 1, line j is `stride` bytes
// after line j − 1, in input and output. A pixel has three channels.
struct Axis {
  std::size_t lines, in_step, in_stride, out_step, out_stride;
};

std::vector<std::uint8_t> resize_axis(const std::vector<std::uint8_t>& from, int in, int out, const Axis& axis) {
  std::vector<std::uint8_t> to(axis.lines * static_cast<std::size_t>(out) * 3);
  const auto all = windows(in, out);
  for (std::size_t line = 0; line < axis.lines; ++line) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::uint8_t* pixel = &from[line * axis.in_stride + static_cast<std::size_t>(all[i].first) * axis.in_step];
      std::int32_t sum[3] = {1 << (kPrecisionBits - 1), 1 << (kPrecisionBits - 1), 1 << (kPrecisionBits - 1)};
      for (const std::int32_t weight : all[i].weights) {
        for (int c = 0; c < 3; ++c) sum[c] += pixel[c] * weight;
        pixel += axis.in_step;
      }
      for (std::size_t c = 0; c < 3; ++c) {
        to[line * axis.out_stride + i * axis.out_step + c] =
            static_cast<std::uint8_t>(std::clamp(sum[c] >> kPrecisionBits, 0, 255));
      }
    }
  }
  return to;
}

}  // namespace

Media resize_lanczos(const Media& image, int width, int height) {
  Media out = image;
  const auto resize_width = [&] {
    const auto rows = static_cast<std::size_t>(out.height);
    const Axis axis{rows, 3, std::size_t{3} * static_cast<std::size_t>(out.width), 3,
                    std::size_t{3} * static_cast<std::size_t>(width)};
    if (out.width != width) out.rgb = resize_axis(out.rgb, out.width, width, axis);
    out.width = width;
  };
  const auto resize_height = [&] {
    const auto columns = static_cast<std::size_t>(out.width);
    const Axis axis{columns, columns * 3, 3, columns * 3, 3};
    if (out.height != height) out.rgb = resize_axis(out.rgb, out.height, height, axis);
    out.height = height;
  };
  // The order matters, because the picture is rounded in between. Pillow before 13 began with the width always.
  const bool height_first = image.height > height && image.height - height > 2 * (image.width - width);
  if (height_first) resize_height();
  resize_width();
  if (!height_first) resize_height();
  return out;
}

}  // namespace ditfleet::media
