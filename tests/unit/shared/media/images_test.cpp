// Images that clients send, compared with what PIL reads from the same files: tests/fixtures/images/make.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <ctime>
#include <map>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/media/image_file.h"
#include "shared/media/sizes.h"
#include "shared/media/writer.h"
#include "tests/paths.h"

namespace ditfleet::media {
namespace {

using ::testing::HasSubstr;

const std::string kFolder = source_path("tests/fixtures/images/");

std::string file(const std::string& name) {
  auto bytes = read_file(kFolder + name);
  EXPECT_TRUE(bytes) << name;
  return bytes ? *bytes : std::string();
}

TEST(Images, AreReadAsPilReadsThem) {
  const auto expected = parse_json(file("expected.json"));
  ASSERT_TRUE(expected);
  int seen = 0, masks = 0;
  const auto hash = [](const Media& image) {
    return sha256_hex({reinterpret_cast<const char*>(image.rgb.data()), image.rgb.size()});
  };
  for (const auto& entry : expected->as_object()) {
    const std::string name(entry.key());
    if (name == "resized") continue;
    ++seen;
    const auto& want = entry.value().as_array();
    const auto image = decode(file(name));
    ASSERT_TRUE(image) << name << ": " << image.error().message;
    EXPECT_EQ(image->width, want[0].as_int64()) << name;
    EXPECT_EQ(image->height, want[1].as_int64()) << name;
    EXPECT_EQ(hash(*image), want[2].as_string()) << name;
    const bool has_alpha = want.size() > 3;
    masks += has_alpha;
    const auto mask = decode_mask(file(name));
    ASSERT_TRUE(mask) << name << ": " << mask.error().message;
    EXPECT_EQ(mask->width, image->width) << name;
    EXPECT_EQ(hash(*mask), want[has_alpha ? 3 : 2].as_string()) << name;
    const auto info = inspect(file(name));
    ASSERT_TRUE(info) << name << ": " << info.error().message;
    EXPECT_EQ(info->width, image->width) << name;
    EXPECT_EQ(info->height, image->height) << name;
    EXPECT_EQ(info->has_alpha, has_alpha) << name;
  }
  EXPECT_GT(seen, 45);
  EXPECT_GT(masks, 10);
}

TEST(Images, TruncatedFilesAreRefused) {
  for (const std::string name : {"rgb.png", "rgb.jpg", "progressive.jpg", "cmyk.jpg", "lossless.webp", "turned.webp",
                                 "palette.gif", "rgb.bmp", "palette.bmp", "rgba16.png", "alpha.webp", "animated.png"}) {
    const std::string whole = file(name);
    for (std::size_t size = 0; size + 12 < whole.size(); size += 7) {
      const auto image = decode(whole.substr(0, size));
      ASSERT_FALSE(image) << name << " of " << size << " bytes";
      EXPECT_EQ(image.error().code, Code::kInvalidArgument);
      EXPECT_FALSE(decode_mask(whole.substr(0, size))) << name << " of " << size << " bytes";
      (void)inspect(whole.substr(0, size));
    }
  }
}

TEST(Images, WhatIsNoImageIsRefused) {
  EXPECT_THAT(decode("").error().message, HasSubstr("empty"));
  EXPECT_THAT(inspect("<html>").error().message, HasSubstr("not a PNG, JPEG, WebP, BMP or GIF file"));
  EXPECT_THAT(inspect(std::string("\0\0\0\x18"
                                  "ftypheic",
                                  12))
                  .error()
                  .message,
              HasSubstr("HEIC or AVIF"));
  EXPECT_THAT(inspect("version https://git-lfs.github.com/spec/v1\n").error().message, HasSubstr("Git LFS pointer"));
}

// The CPU time of the calling thread, because other programs delay the clock.
double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::string number(std::uint32_t value, std::size_t bytes, bool little = false) {
  std::string out;
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>(value >> 8 * (little ? i : bytes - 1 - i) & 0xff);
  return out;
}

std::string png_chunk(const std::string& type, const std::string& data) {
  const std::string both = type + data;
  const auto sum = ::crc32(0, reinterpret_cast<const Bytef*>(both.data()), static_cast<uInt>(both.size()));
  return number(static_cast<std::uint32_t>(data.size()), 4) + both + number(static_cast<std::uint32_t>(sum), 4);
}

std::string deflated(const std::string& data) {
  uLongf size = ::compressBound(static_cast<uLong>(data.size()));
  std::string out(size, '\0');
  ::compress2(reinterpret_cast<Bytef*>(out.data()), &size, reinterpret_cast<const Bytef*>(data.data()),
              static_cast<uLong>(data.size()), 9);
  out.resize(size);
  return out;
}

std::string times(int count, const std::string& text) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

std::string png_of(std::uint32_t width, std::uint32_t height, const std::string& pixels, char interlaced = 0,
                   const std::string& bits_and_color = "\x08\x02", const std::string& before_pixels = "") {
  return "\x89PNG\r\n\x1a\n" +
         png_chunk("IHDR",
                   number(width, 4) + number(height, 4) + bits_and_color + std::string("\0\0", 2) + interlaced) +
         before_pixels + png_chunk("IDAT", deflated(pixels)) + png_chunk("IEND", "");
}

TEST(Images, TooManyPixelsAreRefusedByTheHeader) {
  const auto refused = [](const std::string& bytes, const std::string& message) {
    for (const Error& error : {inspect(bytes).error(), decode(bytes).error()}) EXPECT_EQ(error.message, message);
  };
  const auto message = [](const std::string& size, const std::string& most) {
    return "the image is " + size + "; a file of its kind must have 1 to " + most + " pixels; send a smaller picture";
  };
  refused(png_of(20'000, 8000, ""), message("20000x8000", "134217728"));
  refused(png_of(8000, 5000, "", 1), message("8000x5000", "33554432"));
  std::string gif = file("palette.gif");
  gif.replace(6, 4, "\xff\xff\xff\xff");
  refused(gif, message("65535x65535", "33554432"));
  std::string progressive = file("progressive.jpg");
  progressive.replace(progressive.find("\xff\xc2") + 5, 4, std::string("\x27\x10\x27\x10", 4));
  refused(progressive, message("10000x10000", "67108864"));
}

// A photo of more than 33.5 megapixels is read at half its size.
TEST(Images, LargePhotosAreHalved) {
  constexpr std::uint32_t kWidth = 6001, kHeight = 5601;
  std::string rows;
  for (std::uint32_t y = 0; y < kHeight; ++y)
    rows += '\0' + times(static_cast<int>(kWidth),
                         y % 2 == 0 ? std::string("\x10\x20\x30", 3) : std::string("\x20\x40\x60", 3));
  const auto image = decode(png_of(kWidth, kHeight, rows));
  ASSERT_TRUE(image) << image.error().message;
  EXPECT_EQ(image->width, 3001);
  EXPECT_EQ(image->height, 2801);
  const auto pixel = [&](const Media& of, std::size_t x, std::size_t y) {
    const std::uint8_t* at = &of.rgb[3 * (y * static_cast<std::size_t>(of.width) + x)];
    return std::vector<int>{at[0], at[1], at[2]};
  };
  EXPECT_EQ(pixel(*image, 3000, 0), (std::vector<int>{0x18, 0x30, 0x48}));
  EXPECT_EQ(pixel(*image, 0, 2800), (std::vector<int>{0x10, 0x20, 0x30})) << "a last row alone";
  Media photo{.width = static_cast<int>(kWidth), .height = static_cast<int>(kHeight)};
  photo.rgb.assign(std::size_t{3} * kWidth * kHeight, 100);
  const auto jpeg = encode(photo, job::OutputFormat::kJpeg, 90);
  ASSERT_TRUE(jpeg) << jpeg.error().message;
  const auto half = decode(*jpeg);
  ASSERT_TRUE(half) << half.error().message;
  EXPECT_EQ(half->width, 3001);
  EXPECT_EQ(half->height, 2801);
  EXPECT_EQ(pixel(*half, 1500, 1400), (std::vector<int>{100, 100, 100}));
  EXPECT_EQ(inspect(*jpeg)->width, static_cast<int>(kWidth));
}

TEST(Images, LargeMasksAreHalved) {
  constexpr std::uint32_t kWidth = 20'000, kHeight = 1700;
  std::string rows;
  for (std::uint32_t y = 0; y < kHeight; ++y)
    rows += '\0' + times(kWidth, y % 2 == 0 ? std::string("\x10\xff", 2) : std::string("\x10\x7f", 2));
  const auto mask = decode_mask(png_of(kWidth, kHeight, rows, 0, "\x08\x04"));
  ASSERT_TRUE(mask) << mask.error().message;
  EXPECT_EQ(mask->width, 10'000);
  EXPECT_EQ(mask->height, 850);
  EXPECT_EQ(mask->rgb, std::vector<std::uint8_t>(mask->rgb.size(), 64)) << "the mean of 0 and 128";
}

TEST(Images, LongPicturesAreRead) {
  for (const auto format : {job::OutputFormat::kPng, job::OutputFormat::kJpeg}) {
    for (const auto& [width, height] : {std::pair(20'000, 20), std::pair(20, 20'000)}) {
      Media image{.width = width, .height = height};
      image.rgb.assign(std::size_t{3} * 20 * 20'000, 90);
      const auto read = decode(encode(image, format, 90).value());
      ASSERT_TRUE(read) << read.error().message;
      EXPECT_EQ(read->width, width);
      EXPECT_EQ(read->rgb, image.rgb);
    }
  }
}

// Pillow makes all but the darkest pixels white.
TEST(Images, SixteenBitGrayKeepsItsUpperBytes) {
  const auto image = decode(png_of(2, 1, std::string("\0\x12\x34\xab\xcd", 5), 0, std::string("\x10\0", 2)));
  ASSERT_TRUE(image) << image.error().message;
  EXPECT_EQ(image->rgb, (std::vector<std::uint8_t>{0x12, 0x12, 0x12, 0xab, 0xab, 0xab}));
}

// libpng ignores such a tRNS chunk, so that the file's alpha is 255.
TEST(Images, MasksWithoutATransparentPixelAreTheirColors) {
  const std::string gray(std::string("\0\x12", 2));
  for (const std::string& chunk : {png_chunk("tRNS", "long" + times(300, "x")), png_chunk("tRNS", "")}) {
    const auto mask = decode_mask(png_of(1, 1, gray, 0, std::string("\x08\0", 2), chunk));
    ASSERT_TRUE(mask) << mask.error().message;
    EXPECT_EQ(mask->rgb, (std::vector<std::uint8_t>{0x12, 0x12, 0x12}));
  }
  const auto mask = decode_mask(png_of(2, 1, std::string("\0\xff\xff\0\xff", 5), 0, "\x08\x04"));
  ASSERT_TRUE(mask) << mask.error().message;
  EXPECT_EQ(mask->rgb, (std::vector<std::uint8_t>{255, 255, 255, 0, 0, 0}));
}

// The end of the IHDR chunk, after which a PNG may have any chunks.
constexpr std::size_t kBehindHeader = 33;

TEST(Images, WhatIsBesideThePixelsCostsNothing) {
  const std::string zeros = deflated(std::string(7'990'000, '\0'));
  const std::string png = file("rgb.png"), jpeg = file("rgb.jpg"), webp = file("turned.webp");
  std::map<std::string, std::string> files;
  for (const auto& [type, before] : std::map<std::string, std::string>{
           {"zTXt", {"k\0\0", 3}}, {"iTXt", {"k\0\1\0\0\0", 6}}, {"iCCP", {"k\0\0", 3}}, {"tEXt", {"k\0", 2}}})
    files[type] = std::string(png).insert(kBehindHeader, times(300, png_chunk(type, before + zeros)));
  files["sPLT"] = std::string(png).insert(
      kBehindHeader, times(900, png_chunk("sPLT", std::string("k\0\x08", 3) + std::string(6000, '\0'))));
  files["many chunks"] = std::string(png).insert(kBehindHeader, times(60'000, png_chunk("tEXt", "k")));
  files["APP2"] = std::string(jpeg).insert(2, times(60'000, std::string("\xff\xe2\0\x04zz", 6)));
  files["APP1"] = std::string(jpeg).insert(2, times(300, std::string("\xff\xe1\xff\xff", 4) + std::string(65533, 'x')));
  files["WebP"] = webp + times(60'000, std::string("junk\0\0\0\0", 8));
  for (const auto& [name, bytes] : files) {
    const double began = cpu_seconds();
    const auto info = inspect(bytes);
    const double inspected = cpu_seconds();
    const auto image = decode(bytes);
    EXPECT_TRUE(info) << name << ": " << info.error().message;
    EXPECT_TRUE(image) << name << ": " << image.error().message;
    EXPECT_LT(inspected - began, 0.05) << name;
    EXPECT_LT(cpu_seconds() - inspected, 0.5) << name;
  }
}

TEST(Images, TooManyChunksAreRefused) {
  const auto refused = [](const std::string& bytes, const std::string& message) {
    EXPECT_THAT(inspect(bytes).error().message, HasSubstr(message));
    EXPECT_THAT(decode(bytes).error().message, HasSubstr(message));
  };
  refused(file("rgb.png").insert(kBehindHeader, times(70'000, png_chunk("tEXt", ""))), "more than 65536 chunks");
  refused(file("rgb.jpg").insert(2, times(70'000, std::string("\xff\xfe\0\x02", 4))), "more than 65536 segments");
  // Behind VP8X, so that the picture comes last.
  refused(file("turned.webp").insert(30, times(70'000, std::string("junk\0\0\0\0", 8))), "more than 65536 chunks");
}

TEST(Images, HeadersThatDecodingWouldRefuseAreRefused) {
  const auto refused = [](std::string bytes, const std::string& message) {
    EXPECT_THAT(inspect(bytes).error().message, HasSubstr(message));
    EXPECT_THAT(decode(bytes).error().message, HasSubstr(message));
  };
  const auto png = [](const std::string& header, const std::string& rest) {
    return std::string("\x89PNG\r\n\x1a\n") + png_chunk("IHDR", header) + rest + png_chunk("IEND", "");
  };
  const std::string size = number(4, 4) + number(4, 4), pixels = png_chunk("IDAT", "");
  refused(png(size + std::string("\x08\x07\0\0\0", 5), pixels), "color type");
  refused(png(size + std::string("\x10\x03\0\0\0", 5), pixels), "color type");
  refused(png(size + std::string("\x08\x02\0\0\2", 5), pixels), "color type");
  refused(png(size + std::string("\x08\x03\0\0\0", 5), pixels), "no palette");
  refused(png(size + std::string("\x08\x02\0\0\0", 5), ""), "no pixels");
  refused(png(size + "\x08", pixels), "IHDR");
  refused(file("rgb.png").replace(16, 1, "\x01"), "checksum");
  refused(file("rgb.png").insert(kBehindHeader, file("rgb.png").substr(8, 25)), "one IHDR");

  const std::string jpeg = file("rgb.jpg");
  const std::size_t frame = jpeg.find("\xff\xc0");
  ASSERT_NE(frame, jpeg.npos);
  refused(std::string(jpeg).replace(frame + 1, 1, "\xc3"), "not baseline or progressive");
  refused(std::string(jpeg).replace(frame + 4, 1, "\x0c"), "8 bits");
  refused(std::string(jpeg).replace(frame + 9, 1, "\x02"), "gray, color or CMYK");
  refused(std::string(jpeg).insert(frame, jpeg.substr(frame, 19)), "size is damaged");
  refused(jpeg.substr(0, frame) + "\xff\xd9 pad", "no pixels");

  const std::string bmp = file("rgb.bmp");
  refused(std::string(bmp).replace(14, 1, "\x20"), "unknown kind");
  refused(std::string(bmp).replace(28, 1, "\x07"), "bits per pixel");
  refused(std::string(bmp).replace(30, 1, "\x01"), "compressed");
  refused(std::string(bmp).replace(18, 4, std::string(4, '\0')), "size or offset");
  const std::string gif = file("palette.gif");
  refused(gif.substr(0, 13 + 768) + ";", "truncated");
  refused(gif.substr(0, 13 + 768) + ";;", "no picture");

  const std::string webp = file("turned.webp");
  refused(std::string(webp).replace(24, 1, "\x7f"), "header is damaged");  // another canvas
  refused(std::string(webp).replace(20, 1, "\x02"), "animated");
  refused(webp.substr(0, 30), "header is damaged");
}

// Each scan of a few bytes costs as much as the whole image.
TEST(Images, ManyScansAreRefused) {
  std::string jpeg = file("progressive.jpg");
  const std::size_t scan = jpeg.find("\xff\xda"), next = jpeg.find("\xff\xc4", scan), end = jpeg.rfind("\xff\xd9");
  jpeg.insert(end, times(120, jpeg.substr(scan, next - scan)));
  EXPECT_TRUE(inspect(jpeg));
  EXPECT_THAT(decode(jpeg).error().message, HasSubstr("more than 100 scans"));
}

// tests/fixtures/images/make_sizes.py.
TEST(Sizes, AreThoseOfDiffusers) {
  const auto rows = parse_json(file("sizes.json"));
  ASSERT_TRUE(rows);
  EXPECT_GT(rows->as_array().size(), 70u);
  for (const json::value& row : rows->as_array()) {
    const auto size = [](const json::array& sides, std::size_t at = 0) {
      return Size{static_cast<int>(sides.at(at).as_int64()), static_cast<int>(sides.at(at + 1).as_int64())};
    };
    const auto& want = row.as_array();
    const Size picture = size(want);
    EXPECT_EQ(kontext_size(picture, 16), size(want.at(2).as_array())) << row;
    EXPECT_EQ(floored(with_area(picture, kMegapixel, 1), 16), size(want.at(3).as_array())) << row;
    EXPECT_EQ(qwen_size(picture), size(want.at(4).as_array())) << row;
    EXPECT_EQ(qwen_size(picture, 384 * 384), size(want.at(5).as_array())) << row;
    const int shorter = std::min(picture.width, picture.height), longer = std::max(picture.width, picture.height);
    const bool refused = shorter < kLeastKleinSide || longer > kMostKleinRatio * shorter;
    ASSERT_EQ(refused, want.at(6).is_null()) << row;
    if (refused) continue;
    const KleinSizes klein = klein_sizes(picture, 16);
    EXPECT_EQ(klein.resized, size(want.at(6).as_array())) << row;
    EXPECT_EQ(klein.cropped, size(want.at(6).as_array(), 2)) << row;
  }
}

TEST(Sizes, NoSideIsZero) {
  for (const Size& picture : {Size{1, 1}, Size{1, 1 << 27}, Size{1 << 27, 1}, Size{20'000, 20}})
    for (const Size& size :
         {kontext_size(picture, 16), floored(with_area(picture, kMegapixel, 1), 16), qwen_size(picture)})
      EXPECT_GE(std::min(size.width, size.height), 16);
}

}  // namespace
}  // namespace ditfleet::media
