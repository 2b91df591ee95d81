#include <webp/encode.h>

#include "pipeline/media/encoders.h"

namespace ditfleet::pipeline::media {

Result<std::string> encode_webp(const Image& image, int quality) {
  if (image.width > WEBP_MAX_DIMENSION || image.height > WEBP_MAX_DIMENSION) {
    return invalid_argument("[media] WebP holds at most " + std::to_string(WEBP_MAX_DIMENSION) + " pixels a side");
  }
  std::uint8_t* bytes = nullptr;
  const std::size_t size =
      WebPEncodeRGB(image.rgb.data(), image.width, image.height, image.width * 3, static_cast<float>(quality), &bytes);
  std::string result;
  if (bytes != nullptr) result.assign(reinterpret_cast<const char*>(bytes), size);
  WebPFree(bytes);
  if (size == 0) return Error{Code::kOutOfMemory, "[media] cannot write WebP: the encoder found no memory"};
  return result;
}

}  // namespace ditfleet::pipeline::media
