// The sizes in which models read pictures, and those of the images that they make of them, as diffusers 0.42 computes
// them. Pure; thread-safe. Precondition: all arguments are positive.
#pragma once

#include <cstdint>

namespace ditfleet::media {

struct Size {
  int width = 0, height = 0;
  bool operator==(const Size&) const = default;
};

inline constexpr std::int64_t kMegapixel = 1 << 20;

// Each side rounded down to a multiple, but not to 0.
Size floored(Size size, int multiple);

// About `area` pixels in the aspect ratio of `shape`, each side rounded to a multiple of `step`, halves to the even
// multiple, but not to 0. With step 1 and then floored(), the size that Kontext makes.
Size with_area(Size shape, std::int64_t area, int step);

// The picture's size for the edits of Qwen: calculate_dimensions(). `area`: for its text encoder of several pictures
// 384 · 384.
Size qwen_size(Size picture, std::int64_t area = kMegapixel);

// The picture's size for Kontext: the one of 17 sizes whose aspect ratio is nearest to that of the floored picture, of
// two the narrower. `multiple`: twice the VAE's factor, here and below.
Size kontext_size(Size picture, int multiple);

// For klein, a picture of more than a megapixel is resized with Lanczos, and any is then cropped around its center. An
// image whose size is not given has the first picture's cropped size.
struct KleinSizes {
  Size resized, cropped;
};
KleinSizes klein_sizes(Size picture, int multiple);
// diffusers refuses pictures with a smaller side, and with a side that is more often as long as the other.
inline constexpr int kLeastKleinSide = 64, kMostKleinRatio = 8;

}  // namespace ditfleet::media
