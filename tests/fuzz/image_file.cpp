// libFuzzer: image files, as clients send them. The header is bounded to a small image, because time is limited. The
// CPU time is bounded too: a file may not cost more than its size and its pixels suggest.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string_view>

#include "shared/media/image_file.h"

namespace {

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void check_cost(const char* what, double began, double most) {
  const double took = cpu_seconds() - began;
  if (took <= most) return;
  std::fprintf(stderr, "%s took %.3f s of CPU time; at most %.3f s are right\n", what, took, most);
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace ditfleet;
  const std::string_view file(reinterpret_cast<const char*>(data), size);
  const double began = cpu_seconds();
  const auto info = media::inspect(file);
  check_cost("inspect", began, 0.02 + 1e-6 * static_cast<double>(size));
  if (!info) {
    if (info.error().message.empty()) std::abort();
    return 0;
  }
  constexpr std::int64_t kMostPixels = 1 << 16;
  if (std::int64_t{info->width} * info->height > kMostPixels) return 0;
  const double decoding = cpu_seconds();
  const auto image = media::decode(file), mask = media::decode_mask(file);
  check_cost("decode", decoding, 4);
  if (image.ok() != mask.ok()) std::abort();
  if (!image) return 0;
  const auto wanted = static_cast<std::size_t>(info->width) * static_cast<std::size_t>(info->height) * 3;
  for (const media::Media& read : {*image, *mask})
    if (read.width != info->width || read.height != info->height || read.rgb.size() != wanted) std::abort();
  if (!info->has_alpha && mask->rgb != image->rgb) std::abort();
  return 0;
}
