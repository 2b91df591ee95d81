// Images that clients send, compared with what PIL reads from the same files: tests/fixtures/images/make.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/images/image_file.h"

namespace ditfleet::images {
namespace {

using ::testing::HasSubstr;

const std::string kFolder = std::string(DITFLEET_SOURCE_DIR) + "/tests/fixtures/images/";

std::string file(const std::string& name) {
  auto bytes = read_file(kFolder + name);
  EXPECT_TRUE(bytes) << name;
  return bytes ? *bytes : std::string();
}

TEST(Images, AreReadAsPilReadsThem) {
  const auto expected = parse_json(file("expected.json"));
  ASSERT_TRUE(expected);
  int seen = 0;
  for (const auto& entry : expected->as_object()) {
    const std::string name(entry.key());
    if (name == "resized") continue;
    ++seen;
    const auto& want = entry.value().as_array();
    const auto image = decode(file(name));
    ASSERT_TRUE(image) << name << ": " << image.error().message;
    EXPECT_EQ(image->width, want[0].as_int64()) << name;
    EXPECT_EQ(image->height, want[1].as_int64()) << name;
    const std::string_view bytes(reinterpret_cast<const char*>(image->rgb.data()), image->rgb.size());
    EXPECT_EQ(sha256_hex(bytes), want[2].as_string()) << name;
    const auto info = inspect(file(name));
    ASSERT_TRUE(info) << name << ": " << info.error().message;
    EXPECT_EQ(info->width, image->width) << name;
    EXPECT_EQ(info->height, image->height) << name;
  }
  EXPECT_GT(seen, 15);
}

TEST(Images, TruncatedFilesAreRefused) {
  for (const std::string name : {"rgb.png", "rgb.jpg", "progressive.jpg", "lossless.webp", "turned.webp"}) {
    const std::string whole = file(name);
    for (std::size_t size = 0; size + 12 < whole.size(); size += 7) {
      const auto image = decode(whole.substr(0, size));
      ASSERT_FALSE(image) << name << " of " << size << " bytes";
      EXPECT_EQ(image.error().code, Code::kInvalidArgument);
      (void)inspect(whole.substr(0, size));
    }
  }
}

TEST(Images, WhatIsNoImageIsRefused) {
  EXPECT_THAT(decode("").error().message, HasSubstr("empty"));
  EXPECT_THAT(decode("GIF89a").error().message, HasSubstr("not a PNG, JPEG or WebP file"));
  EXPECT_THAT(inspect("<html>").error().message, HasSubstr("not a PNG, JPEG or WebP file"));
}

TEST(Images, TooManyPixelsAreRefusedByTheHeader) {
  std::string png = file("rgb.png");
  // 8000 × 5000 = 40 megapixels. The checksum of IHDR is that of the new size.
  png.replace(16, 8, std::string("\x00\x00\x1f\x40\x00\x00\x13\x88", 8));
  png.replace(29, 4, std::string("\xb3\x88\xcc\x0e", 4));
  for (const Error& error : {inspect(png).error(), decode(png).error()})
    EXPECT_EQ(error.message, "the image is 8000x5000; it must have 1 to 33554432 pixels");
}

}  // namespace
}  // namespace ditfleet::images
