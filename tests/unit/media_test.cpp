#include <gtest/gtest.h>
// jpeglib.h uses FILE and size_t without including them.
#include <jpeglib.h>
#include <png.h>
#include <webp/decode.h>
#include <webp/demux.h>
#include <cstdio>

#include <cmath>
#include <cstdlib>

#include "pipeline/engine.h"

namespace ditfleet::pipeline {
namespace {

// Smooth colours with a few sharp edges, which lossy formats preserve well.
Media picture(int width, int height) {
  Media image{width, height, 1, 0, {}};
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      const bool inside = x > width / 3 && y > height / 2;
      image.rgb.push_back(static_cast<std::uint8_t>(inside ? 200 : 255 * x / width));
      image.rgb.push_back(static_cast<std::uint8_t>(255 * y / height));
      image.rgb.push_back(static_cast<std::uint8_t>(inside ? 30 : 128));
    }
  }
  return image;
}

Media decode_png(const std::string& bytes) {
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  Media image;
  if (png_image_begin_read_from_memory(&png, bytes.data(), bytes.size()) == 0) return image;
  EXPECT_EQ(png.format, static_cast<png_uint_32>(PNG_FORMAT_RGB));
  image.width = static_cast<int>(png.width);
  image.height = static_cast<int>(png.height);
  image.rgb.resize(PNG_IMAGE_SIZE(png));
  EXPECT_NE(png_image_finish_read(&png, nullptr, image.rgb.data(), 0, nullptr), 0);
  return image;
}

Media decode_jpeg(const std::string& bytes) {
  jpeg_decompress_struct jpeg = {};
  jpeg_error_mgr errors = {};
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&jpeg, TRUE);
  jpeg_start_decompress(&jpeg);
  Media image{static_cast<int>(jpeg.output_width), static_cast<int>(jpeg.output_height), 1, 0, {}};
  EXPECT_EQ(jpeg.output_components, 3);
  image.rgb.resize(std::size_t{jpeg.output_width} * jpeg.output_height * 3);
  while (jpeg.output_scanline < jpeg.output_height) {
    JSAMPLE* row = image.rgb.data() + std::size_t{jpeg.output_scanline} * jpeg.output_width * 3;
    jpeg_read_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  return image;
}

Media decode_webp(const std::string& bytes) {
  Media image;
  std::uint8_t* rgb =
      WebPDecodeRGB(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size(), &image.width, &image.height);
  if (rgb == nullptr) return image;
  image.rgb.assign(rgb, rgb + std::size_t(image.width) * std::size_t(image.height) * 3);
  WebPFree(rgb);
  return image;
}

double mean_difference(const Media& a, const Media& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.rgb.size(); ++i) sum += std::abs(int{a.rgb[i]} - int{b.rgb[i]});
  return sum / static_cast<double>(a.rgb.size());
}

TEST(Media, PngIsLossless) {
  for (const auto& [width, height] : {std::pair{1, 1}, {3, 5}, {64, 48}, {257, 33}}) {
    const Media image = picture(width, height);
    const auto bytes = encode_media(image, job::OutputFormat::kPng, 100);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    const Media decoded = decode_png(*bytes);
    EXPECT_EQ(decoded.width, width);
    EXPECT_EQ(decoded.height, height);
    EXPECT_EQ(decoded.rgb, image.rgb);
    EXPECT_EQ(*bytes, *encode_media(image, job::OutputFormat::kPng, 0));
  }
}

TEST(Media, LossyFormatsStayClose) {
  const Media image = picture(96, 64);
  for (const job::OutputFormat format : {job::OutputFormat::kJpeg, job::OutputFormat::kWebp}) {
    const auto good = encode_media(image, format, 95);
    const auto poor = encode_media(image, format, 5);
    ASSERT_TRUE(good.ok() && poor.ok());
    EXPECT_LT(poor->size(), good->size());
    const auto decode = format == job::OutputFormat::kJpeg ? decode_jpeg : decode_webp;
    const Media decoded = decode(*good);
    ASSERT_EQ(decoded.rgb.size(), image.rgb.size());
    EXPECT_EQ(decoded.width, 96);
    EXPECT_LT(mean_difference(decoded, image), 3.0);
    EXPECT_GT(mean_difference(decode(*poor), image), mean_difference(decoded, image));
  }
}

TEST(Media, RefusesInvalidImages) {
  const auto refused = [](const Media& image, job::OutputFormat format, int quality, const std::string& part) {
    const auto bytes = encode_media(image, format, quality);
    ASSERT_FALSE(bytes.ok());
    EXPECT_EQ(bytes.error().code, Code::kInvalidArgument);
    EXPECT_NE(bytes.error().message.find(part), std::string::npos) << bytes.error().message;
  };
  refused(Media{}, job::OutputFormat::kPng, 100, "0x0");
  refused(Media{2, 2, 1, 0, std::vector<std::uint8_t>(11)}, job::OutputFormat::kPng, 100, "needs 12");
  refused(picture(2, 2), job::OutputFormat::kJpeg, 101, "0 to 100");
  refused(picture(2, 2), job::OutputFormat::kWebp, -1, "0 to 100");
  refused(picture(16384, 1), job::OutputFormat::kWebp, 80, "16383");
  refused(picture(65501, 1), job::OutputFormat::kJpeg, 80, "65500");
}

}  // namespace
// The frames, their number and their times survive; PNG and JPEG hold one frame.
TEST(Media, AVideoBecomesAnAnimatedWebp) {
  Media video{16, 8, 5, 10, {}};
  for (int frame = 0; frame < video.frames; ++frame)
    video.rgb.insert(video.rgb.end(), std::size_t{16} * 8 * 3, static_cast<std::uint8_t>(50 * frame));
  const auto bytes = encode_media(video, job::OutputFormat::kWebp, 100);
  ASSERT_TRUE(bytes) << bytes.error().message;
  const WebPData data{reinterpret_cast<const std::uint8_t*>(bytes->data()), bytes->size()};
  const std::unique_ptr<WebPAnimDecoder, decltype(&WebPAnimDecoderDelete)> decoder(WebPAnimDecoderNew(&data, nullptr),
                                                                                   WebPAnimDecoderDelete);
  ASSERT_TRUE(decoder);
  WebPAnimInfo info;
  ASSERT_TRUE(WebPAnimDecoderGetInfo(decoder.get(), &info));
  EXPECT_EQ(info.frame_count, 5u);
  EXPECT_EQ(info.canvas_width, 16u);
  EXPECT_EQ(info.canvas_height, 8u);
  for (int frame = 0; frame < video.frames; ++frame) {
    std::uint8_t* rgba = nullptr;
    int until_ms = 0;
    ASSERT_TRUE(WebPAnimDecoderGetNext(decoder.get(), &rgba, &until_ms));
    EXPECT_NEAR(rgba[0], 50 * frame, 3);
    EXPECT_EQ(until_ms, 100 * (frame + 1));
  }
  for (const auto format : {job::OutputFormat::kPng, job::OutputFormat::kJpeg})
    EXPECT_EQ(encode_media(video, format, 100).error().param, "output_format");
}

}  // namespace ditfleet::pipeline
