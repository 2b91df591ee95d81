#include <webp/decode.h>
#include <webp/demux.h>

#include <memory>

#include "shared/images/formats.h"

namespace ditfleet::images {
namespace {

struct Delete {
  void operator()(WebPDemuxer* demuxer) const { WebPDemuxDelete(demuxer); }
};

std::string exif_of(std::string_view file) {
  const WebPData data{reinterpret_cast<const std::uint8_t*>(file.data()), file.size()};
  const std::unique_ptr<WebPDemuxer, Delete> demuxer(WebPDemux(&data));
  WebPChunkIterator chunk;
  if (!demuxer || WebPDemuxGetChunk(demuxer.get(), "EXIF", 1, &chunk) == 0) return {};
  std::string exif(reinterpret_cast<const char*>(chunk.chunk.bytes), chunk.chunk.size);
  WebPDemuxReleaseChunkIterator(&chunk);
  return exif;
}

}  // namespace

Result<Picture> read_webp(std::string_view file, bool with_pixels) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(file.data());
  WebPBitstreamFeatures features;
  if (WebPGetFeatures(bytes, file.size(), &features) != VP8_STATUS_OK) return damaged("WebP", "its header is damaged");
  if (features.has_animation != 0) return damaged("WebP", "it is animated; send one picture");
  if (auto good = check_size(features.width, features.height); !good) return good.error();
  Picture picture{{features.width, features.height, {}}, exif_of(file)};
  if (!with_pixels) return picture;
  const std::size_t stride = std::size_t{3} * static_cast<std::size_t>(features.width);
  picture.image.rgb.resize(stride * static_cast<std::size_t>(features.height));
  if (WebPDecodeRGBInto(bytes, file.size(), picture.image.rgb.data(), picture.image.rgb.size(),
                        static_cast<int>(stride)) == nullptr)
    return damaged("WebP", "it is truncated, or its pixels cannot be read");
  return picture;
}

}  // namespace ditfleet::images
