#include "shared/media/resize.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ditfleet::media {
namespace {

constexpr int kPrecisionBits = 32 - 8 - 2;  // of the weights, as in Pillow's Resample.c

// The weight of a pixel at a distance, which is 0 from `support` on.
struct Filter {
  double support;
  double (*weight)(double x);
};

double sinc(double x) { return x == 0 ? 1 : std::sin(x * std::numbers::pi) / (x * std::numbers::pi); }

constexpr Filter kLanczos{3, [](double x) { return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0; }};
constexpr Filter kBicubic{2, [](double x) {
                            constexpr double a = -0.5;
                            x = std::abs(x);
                            if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
                            return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
                          }};

// The input pixels of one output pixel, and their weights.
struct Window {
  std::size_t first = 0;
  std::vector<std::int32_t> weights;
};

std::vector<Window> windows(int in, int out, const Filter& filter) {
  const double scale = static_cast<double>(in) / out, filter_scale = std::max(scale, 1.0);
  const double support = filter.support * filter_scale;
  std::vector<Window> all(static_cast<std::size_t>(out));
  for (int i = 0; i < out; ++i) {
    const double center = (i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(center - support + 0.5));
    const int last = std::min(in, static_cast<int>(center + support + 0.5));
    std::vector<double> weights;
    double sum = 0;
    for (int x = first; x < last; ++x) {
      weights.push_back(filter.weight((x - center + 0.5) * (1 / filter_scale)));
      sum += weights.back();
    }
    Window& window = all[static_cast<std::size_t>(i)];
    window.first = static_cast<std::size_t>(first);
    for (double weight : weights) {
      if (sum != 0) weight /= sum;
      window.weights.push_back(static_cast<std::int32_t>(weight * (1 << kPrecisionBits) + (weight < 0 ? -0.5 : 0.5)));
    }
  }
  return all;
}

// One pixel of three channels: those from `from` on, `step` bytes apart, by their weights.
inline void blend(const std::uint8_t* from, std::size_t step, const std::vector<std::int32_t>& weights,
                  std::uint8_t* to) {
  constexpr std::int32_t kHalf = 1 << (kPrecisionBits - 1);
  std::int32_t red = kHalf, green = kHalf, blue = kHalf;  // an array would not stay in registers
  for (const std::int32_t weight : weights) {
    red += from[0] * weight;
    green += from[1] * weight;
    blue += from[2] * weight;
    from += step;
  }
  to[0] = static_cast<std::uint8_t>(std::clamp(red >> kPrecisionBits, 0, 255));
  to[1] = static_cast<std::uint8_t>(std::clamp(green >> kPrecisionBits, 0, 255));
  to[2] = static_cast<std::uint8_t>(std::clamp(blue >> kPrecisionBits, 0, 255));
}

void resize_width(Media& image, int width, const Filter& filter) {
  const auto all = windows(image.width, width, filter);
  const auto rows = static_cast<std::size_t>(image.height), stride = 3 * static_cast<std::size_t>(image.width);
  std::vector<std::uint8_t> out(rows * all.size() * 3);
  std::uint8_t* to = out.data();
  for (std::size_t y = 0; y < rows; ++y)
    for (const Window& window : all) {
      blend(&image.rgb[y * stride + 3 * window.first], 3, window.weights, to);
      to += 3;
    }
  image.rgb = std::move(out);
  image.width = width;
}

void resize_height(Media& image, int height, const Filter& filter) {
  const auto all = windows(image.height, height, filter);
  const std::size_t stride = 3 * static_cast<std::size_t>(image.width);
  std::vector<std::uint8_t> out(all.size() * stride);
  std::uint8_t* to = out.data();
  for (const Window& window : all)
    for (std::size_t x = 0; x < stride; x += 3) {
      blend(&image.rgb[window.first * stride + x], stride, window.weights, to);
      to += 3;
    }
  image.rgb = std::move(out);
  image.height = height;
}

Media resize(Media image, int width, int height, const Filter& filter) {
  // The order matters, because the picture is rounded in between. Pillow before 13 began with the width always.
  const bool height_first = image.height > height && image.height - height > 2 * (image.width - width);
  if (height_first) resize_height(image, height, filter);
  if (image.width != width) resize_width(image, width, filter);
  if (image.height != height) resize_height(image, height, filter);
  return image;
}

}  // namespace

Media resize_lanczos(const Media& image, int width, int height) { return resize(image, width, height, kLanczos); }
Media resize_bicubic(const Media& image, int width, int height) { return resize(image, width, height, kBicubic); }

Media crop_center(const Media& image, int width, int height) {
  Media out{.width = width, .height = height};
  const auto row = static_cast<std::ptrdiff_t>(width) * 3, stride = static_cast<std::ptrdiff_t>(image.width) * 3;
  auto from = image.rgb.begin() + (image.height - height) / 2 * stride + (image.width - width) / 2 * 3;
  for (int y = 0; y < height; ++y, from += stride) out.rgb.insert(out.rgb.end(), from, from + row);
  return out;
}

std::vector<std::uint8_t> grey(const Media& image) {
  std::vector<std::uint8_t> out(image.rgb.size() / 3);
  const std::uint8_t* rgb = image.rgb.data();
  for (std::size_t i = 0; i < out.size(); ++i, rgb += 3)  // weights of 16 bits, as in Pillow's Convert.c
    out[i] = static_cast<std::uint8_t>((rgb[0] * 19595 + rgb[1] * 38470 + rgb[2] * 7471 + 0x8000) >> 16);
  return out;
}

}  // namespace ditfleet::media
