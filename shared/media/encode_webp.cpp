#include <webp/encode.h>
#include <webp/mux.h>

#include <cmath>
#include <memory>

#include "shared/media/encoders.h"

namespace ditfleet::media {
namespace {

Error no_memory() { return {Code::kOutOfMemory, "[media] cannot write WebP: the encoder ran out of memory"}; }

Result<std::string> encode_one(const Media& image, int quality) {
  std::uint8_t* bytes = nullptr;
  const std::size_t size =
      WebPEncodeRGB(image.rgb.data(), image.width, image.height, image.width * 3, static_cast<float>(quality), &bytes);
  std::string result;
  if (bytes != nullptr) result.assign(reinterpret_cast<const char*>(bytes), size);
  WebPFree(bytes);
  if (size == 0) return no_memory();
  return result;
}

Result<std::string> encode_animation(const Media& video, int quality) {
  const std::unique_ptr<WebPAnimEncoder, decltype(&WebPAnimEncoderDelete)> encoder(
      WebPAnimEncoderNew(video.width, video.height, nullptr), WebPAnimEncoderDelete);
  WebPConfig config;
  WebPPicture picture;
  if (!encoder || !WebPConfigInit(&config) || !WebPPictureInit(&picture)) return no_memory();
  config.quality = static_cast<float>(quality);
  picture.use_argb = 1;
  picture.width = video.width;
  picture.height = video.height;
  const std::size_t frame_bytes = video.rgb.size() / static_cast<std::size_t>(video.frames);
  const double rate = video.frame_rate > 0 ? video.frame_rate : 16;
  const auto timestamp_ms = [&](int frame) { return static_cast<int>(std::lround(1000.0 * frame / rate)); };
  bool written = true;
  for (int frame = 0; frame < video.frames && written; ++frame) {
    written = WebPPictureImportRGB(&picture, video.rgb.data() + static_cast<std::size_t>(frame) * frame_bytes,
                                   video.width * 3) &&
              WebPAnimEncoderAdd(encoder.get(), &picture, timestamp_ms(frame), &config);
  }
  WebPPictureFree(&picture);
  written = written && WebPAnimEncoderAdd(encoder.get(), nullptr, timestamp_ms(video.frames), nullptr);
  WebPData data;
  WebPDataInit(&data);
  if (!written || !WebPAnimEncoderAssemble(encoder.get(), &data)) {
    return internal_error("[media] cannot write WebP: " + std::string(WebPAnimEncoderGetError(encoder.get())));
  }
  std::string result(reinterpret_cast<const char*>(data.bytes), data.size);
  WebPDataClear(&data);
  return result;
}

}  // namespace

Result<std::string> encode_webp(const Media& media, int quality) {
  if (media.width > WEBP_MAX_DIMENSION || media.height > WEBP_MAX_DIMENSION)
    return invalid_argument("[media] WebP supports at most " + std::to_string(WEBP_MAX_DIMENSION) + " pixels per side");
  return media.frames > 1 ? encode_animation(media, quality) : encode_one(media, quality);
}

}  // namespace ditfleet::media
