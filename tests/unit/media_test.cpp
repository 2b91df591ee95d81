#include <gtest/gtest.h>
// jpeglib.h uses FILE and size_t without including them.
#include <jpeglib.h>
#include <png.h>
#include <webp/decode.h>
#include <cstdio>

#include <cmath>
#include <cstdlib>

#include "pipeline/engine.h"

namespace ditfleet::pipeline {
namespace {

// Smooth colours with a few sharp edges, which lossy formats preserve well.
Image picture(int width, int height) {
  Image image{width, height, {}};
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

Image decode_png(const std::string& bytes) {
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  Image image;
  if (png_image_begin_read_from_memory(&png, bytes.data(), bytes.size()) == 0) return image;
  EXPECT_EQ(png.format, static_cast<png_uint_32>(PNG_FORMAT_RGB));
  image.width = static_cast<int>(png.width);
  image.height = static_cast<int>(png.height);
  image.rgb.resize(PNG_IMAGE_SIZE(png));
  EXPECT_NE(png_image_finish_read(&png, nullptr, image.rgb.data(), 0, nullptr), 0);
  return image;
}

Image decode_jpeg(const std::string& bytes) {
  jpeg_decompress_struct jpeg = {};
  jpeg_error_mgr errors = {};
  jpeg.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&jpeg);
  jpeg_mem_src(&jpeg, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  jpeg_read_header(&jpeg, TRUE);
  jpeg_start_decompress(&jpeg);
  Image image{static_cast<int>(jpeg.output_width), static_cast<int>(jpeg.output_height), {}};
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

Image decode_webp(const std::string& bytes) {
  Image image;
  std::uint8_t* rgb =
      WebPDecodeRGB(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size(), &image.width, &image.height);
  if (rgb == nullptr) return image;
  image.rgb.assign(rgb, rgb + std::size_t(image.width) * std::size_t(image.height) * 3);
  WebPFree(rgb);
  return image;
}

double mean_difference(const Image& a, const Image& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.rgb.size(); ++i) sum += std::abs(int{a.rgb[i]} - int{b.rgb[i]});
  return sum / static_cast<double>(a.rgb.size());
}

TEST(Media, PngIsLossless) {
  for (const auto& [width, height] : {std::pair{1, 1}, {3, 5}, {64, 48}, {257, 33}}) {
    const Image image = picture(width, height);
    const auto bytes = encode_image(image, ImageFormat::kPng, 100);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    const Image decoded = decode_png(*bytes);
    EXPECT_EQ(decoded.width, width);
    EXPECT_EQ(decoded.height, height);
    EXPECT_EQ(decoded.rgb, image.rgb);
    EXPECT_EQ(*bytes, *encode_image(image, ImageFormat::kPng, 0));
  }
}

TEST(Media, LossyFormatsStayClose) {
  const Image image = picture(96, 64);
  for (const ImageFormat format : {ImageFormat::kJpeg, ImageFormat::kWebp}) {
    const auto good = encode_image(image, format, 95);
    const auto poor = encode_image(image, format, 5);
    ASSERT_TRUE(good.ok() && poor.ok());
    EXPECT_LT(poor->size(), good->size());
    const auto decode = format == ImageFormat::kJpeg ? decode_jpeg : decode_webp;
    const Image decoded = decode(*good);
    ASSERT_EQ(decoded.rgb.size(), image.rgb.size());
    EXPECT_EQ(decoded.width, 96);
    EXPECT_LT(mean_difference(decoded, image), 3.0);
    EXPECT_GT(mean_difference(decode(*poor), image), mean_difference(decoded, image));
  }
}

TEST(Media, RefusesInvalidImages) {
  const auto refused = [](const Image& image, ImageFormat format, int quality, const std::string& part) {
    const auto bytes = encode_image(image, format, quality);
    ASSERT_FALSE(bytes.ok());
    EXPECT_EQ(bytes.error().code, Code::kInvalidArgument);
    EXPECT_NE(bytes.error().message.find(part), std::string::npos) << bytes.error().message;
  };
  refused(Image{}, ImageFormat::kPng, 100, "0x0");
  refused(Image{2, 2, std::vector<std::uint8_t>(11)}, ImageFormat::kPng, 100, "takes 12");
  refused(picture(2, 2), ImageFormat::kJpeg, 101, "0 to 100");
  refused(picture(2, 2), ImageFormat::kWebp, -1, "0 to 100");
  refused(picture(16384, 1), ImageFormat::kWebp, 80, "16383");
  refused(picture(65501, 1), ImageFormat::kJpeg, 80, "65500");
}

}  // namespace
}  // namespace ditfleet::pipeline
