#include "shared/media/sizes.h"

#include <algorithm>
#include <cmath>

namespace ditfleet::media {
namespace {

double ratio_of(Size size) { return static_cast<double>(size.width) / size.height; }

}  // namespace

Size floored(Size size, int multiple) {
  const auto floor = [&](int side) { return std::max(side / multiple, 1) * multiple; };
  return {floor(size.width), floor(size.height)};
}

Size with_area(Size shape, std::int64_t area, int step) {
  const double ratio = ratio_of(shape), width = std::sqrt(static_cast<double>(area) * ratio);
  const auto rounded = [&](double side) { return std::max(static_cast<int>(std::nearbyint(side / step)), 1) * step; };
  return {rounded(width), rounded(width / ratio)};
}

Size qwen_size(Size picture, std::int64_t area) { return with_area(picture, area, 32); }

Size kontext_size(Size picture, int multiple) {
  static constexpr Size kSizes[] = {{672, 1568}, {688, 1504}, {720, 1456},  {752, 1392}, {800, 1328}, {832, 1248},
                                    {880, 1184}, {944, 1104}, {1024, 1024}, {1104, 944}, {1184, 880}, {1248, 832},
                                    {1328, 800}, {1392, 752}, {1456, 720},  {1504, 688}, {1568, 672}};
  const double ratio = ratio_of(floored(picture, multiple));
  const auto distance = [&](Size size) { return std::abs(ratio - ratio_of(size)); };
  return floored(*std::ranges::min_element(kSizes, {}, distance), multiple);  // the first of equals
}

KleinSizes klein_sizes(Size picture, int multiple) {
  const auto [width, height] = picture;
  KleinSizes sizes{.resized = picture};
  const std::int64_t pixels = std::int64_t{width} * height;
  if (pixels > kMegapixel) {
    const double scale = std::sqrt(static_cast<double>(kMegapixel) / static_cast<double>(pixels));
    sizes.resized = {static_cast<int>(width * scale), static_cast<int>(height * scale)};
  }
  sizes.cropped = floored(sizes.resized, multiple);
  return sizes;
}

}  // namespace ditfleet::media
