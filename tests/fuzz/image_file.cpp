// libFuzzer: image files, as clients send them. The header is bounded to a small image, because time is limited.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "shared/images/image_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const auto info = images::inspect(file);
  if (!info) {
    if (info.error().message.empty()) std::abort();
    return 0;
  }
  constexpr std::int64_t kMostPixels = 1 << 16;
  if (std::int64_t{info->width} * info->height > kMostPixels) return 0;
  const auto image = images::decode(file);
  if (!image) return 0;
  const auto wanted = static_cast<std::size_t>(info->width) * static_cast<std::size_t>(info->height) * 3;
  if (image->width != info->width || image->height != info->height || image->rgb.size() != wanted) std::abort();
  return 0;
}
