#include <gtest/gtest.h>
// jpeglib.h uses FILE and size_t without including them.
#include <jpeglib.h>
#include <png.h>
#include <webp/decode.h>
#include <webp/demux.h>
#include <cstdio>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/core/json.h"
#include "shared/media/mp4.h"
#include "shared/media/resize.h"
#include "shared/media/writer.h"
#include "tests/paths.h"

namespace ditfleet::media {
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
  for (const auto& [width, height] : {std::pair{1, 1}, {3, 5}, {64, 48}, {257, 33}, {33, 64}, {1, 65}, {7, 300}}) {
    const Media image = picture(width, height);
    const auto bytes = encode(image, job::OutputFormat::kPng, 100);
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    const Media decoded = decode_png(*bytes);
    EXPECT_EQ(decoded.width, width);
    EXPECT_EQ(decoded.height, height);
    EXPECT_EQ(decoded.rgb, image.rgb);
    EXPECT_EQ(*bytes, *encode(image, job::OutputFormat::kPng, 0));
  }
}

TEST(Media, LossyFormatsStayClose) {
  const Media image = picture(96, 64);
  for (const job::OutputFormat format : {job::OutputFormat::kJpeg, job::OutputFormat::kWebp}) {
    const auto good = encode(image, format, 95);
    const auto poor = encode(image, format, 5);
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
    const auto bytes = encode(image, format, quality);
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

TEST(Resize, CropsAroundTheCenter) {
  Media image{.width = 4, .height = 3};
  for (std::uint8_t i = 0; i < 36; ++i) image.rgb.push_back(i);
  const Media cropped = crop_center(image, 1, 2);
  EXPECT_EQ(cropped.width, 1);
  EXPECT_EQ(cropped.height, 2);
  EXPECT_EQ(cropped.rgb, (std::vector<std::uint8_t>{3, 4, 5, 15, 16, 17}));
  EXPECT_EQ(crop_center(image, 4, 3).rgb, image.rgb);
}

}  // namespace
// The frames, their number and their times survive; PNG and JPEG hold one frame.
TEST(Media, AVideoBecomesAnAnimatedWebp) {
  Media video{16, 8, 5, 10, {}};
  for (int frame = 0; frame < video.frames; ++frame)
    video.rgb.insert(video.rgb.end(), std::size_t{16} * 8 * 3, static_cast<std::uint8_t>(50 * frame));
  const auto bytes = encode(video, job::OutputFormat::kWebp, 100);
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
    EXPECT_EQ(encode(video, format, 100).error().param, "output_format");
}

// What a program prints.
std::string output_of(const std::string& command) {
  std::string text;
  FILE* pipe = ::popen(command.c_str(), "r");
  char bytes[4096];
  while (const std::size_t n = std::fread(bytes, 1, sizeof bytes, pipe)) text.append(bytes, n);
  EXPECT_EQ(::pclose(pipe), 0) << command;
  return text;
}

constexpr std::uint8_t kColours[][3] = {{255, 0, 0},     {0, 255, 0},    {0, 0, 255},  {255, 255, 0},
                                        {0, 255, 255},   {255, 0, 255},  {0, 0, 0},    {255, 255, 255},
                                        {128, 128, 128}, {200, 100, 50}, {30, 60, 90}, {250, 190, 160}};

// Squares of 16 pixels, each of one colour; every frame begins with the next colour.
Media colours(int frames, double frame_rate) {
  Media video{64, 48, frames, frame_rate, {}};
  for (int frame = 0; frame < frames; ++frame) {
    for (int y = 0; y < video.height; ++y) {
      for (int x = 0; x < video.width; ++x) {
        const auto& colour = kColours[(static_cast<std::size_t>(y / 16 * 4 + x / 16 + frame)) % std::size(kColours)];
        video.rgb.insert(video.rgb.end(), std::begin(colour), std::end(colour));
      }
    }
  }
  return video;
}

struct Mp4 : testing::Test {
  void SetUp() override {
    if (std::system("ffprobe -version >/dev/null 2>&1 && ffmpeg -version >/dev/null 2>&1") != 0)
      GTEST_SKIP() << "ffmpeg is not installed (tests/packages.txt)";
  }
  void TearDown() override { std::filesystem::remove(path); }
  // What ffprobe reports of the file, a line for each entry.
  std::string probe(const std::string& bytes, const std::string& entries) {
    std::ofstream(path, std::ios::binary) << bytes;
    return output_of("ffprobe -v error -count_frames -of default=nk=1:nw=1 -show_entries " + entries + " " + path);
  }
  const std::string path = std::filesystem::temp_directory_path() / ("ditfleet-media-" + new_nonce() + ".mp4");
};

TEST_F(Mp4, HasTheFramesTheRateAndTheTagsThatPlayersNeed) {
  const auto bytes = encode(colours(9, 16), job::OutputFormat::kMp4, 100);
  ASSERT_TRUE(bytes) << bytes.error().message;
  EXPECT_EQ(probe(*bytes,
                  "stream=codec_name,width,height,pix_fmt,color_range,color_space,color_transfer,color_primaries,"
                  "chroma_location,avg_frame_rate,nb_read_frames:format=start_time,duration"),
            "h264\n64\n48\nyuv420p\ntv\nbt709\nbt709\nbt709\nleft\n16/1\n9\n0.000000\n0.563000\n");
  EXPECT_LT(bytes->find("moov"), bytes->find("mdat"));
  for (const auto& [rate, text] : {std::pair{30000.0 / 1001, "30000/1001\n"},
                                   {23.976, "2997/125\n"},
                                   {12.5, "25/2\n"},
                                   {1.0, "1/1\n"},
                                   {240.0, "240/1\n"},
                                   {0.0, "16/1\n"}}) {
    const auto other = encode(colours(3, rate), job::OutputFormat::kMp4, 50);
    ASSERT_TRUE(other) << other.error().message;
    EXPECT_EQ(probe(*other, "stream=r_frame_rate"), text);
  }
  const auto one = encode(colours(1, 8), job::OutputFormat::kMp4, 50);
  ASSERT_TRUE(one) << one.error().message;
  EXPECT_EQ(probe(*one, "stream=duration,nb_read_frames"), "0.125000\n1\n");
}

// The matrix of bt601 would shift saturated colours by up to 50.
TEST_F(Mp4, KeepsColours) {
  const Media video = colours(5, 16);
  const auto bytes = encode(video, job::OutputFormat::kMp4, 100);
  ASSERT_TRUE(bytes) << bytes.error().message;
  std::ofstream(path, std::ios::binary) << *bytes;
  const std::string rgb = output_of("ffmpeg -v error -i " + path +
                                    " -vf scale=in_color_matrix=bt709:in_range=tv:out_range=pc:flags=accurate_rnd"
                                    " -pix_fmt rgb24 -f rawvideo -");
  ASSERT_EQ(rgb.size(), video.rgb.size());
  for (int row = 8; row < video.height * video.frames; row += 16) {
    for (int x = 8; x < video.width; x += 16) {
      for (int channel = 0; channel < 3; ++channel) {
        const auto at = static_cast<std::size_t>((row * video.width + x) * 3 + channel);
        EXPECT_NEAR(static_cast<std::uint8_t>(rgb[at]), video.rgb[at], 6) << "row " << row << ", column " << x;
      }
    }
  }
}

TEST_F(Mp4, IsTheSameForTheSameFramesAndSmallerAtALowerQuality) {
  const Media video = colours(40, 24);
  const auto bytes = encode(video, job::OutputFormat::kMp4, 80);
  ASSERT_TRUE(bytes) << bytes.error().message;
  auto writer = Mp4Writer::open(video.width, video.height, video.frame_rate, 80);
  ASSERT_TRUE(writer) << writer.error().message;
  const std::size_t frame_bytes = video.rgb.size() / 40;
  for (std::size_t frame = 0; frame < 40; ++frame) {
    std::vector<std::uint8_t> reused(video.rgb.data() + frame * frame_bytes,
                                     video.rgb.data() + (frame + 1) * frame_bytes);
    ASSERT_TRUE(writer->add(reused));
    std::fill(reused.begin(), reused.end(), std::uint8_t{7});
  }
  EXPECT_TRUE(*writer->finish("") == *bytes);
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(*encode(video, job::OutputFormat::kMp4, 80) == *bytes) << i;
  EXPECT_LT(encode(video, job::OutputFormat::kMp4, 10)->size(), bytes->size());
}

TEST_F(Mp4, CarriesAComment) {
  const Media video = colours(3, 8);
  for (const std::string comment : {"DiTFleet receipt 5f", ""}) {
    const auto bytes = open_writer(job::OutputFormat::kMp4, 80)->finish(video, comment);
    ASSERT_TRUE(bytes) << bytes.error().message;
    EXPECT_EQ(probe(*bytes, "format_tags=comment"), comment.empty() ? "" : comment + "\n");
  }
}

TEST(Png, CarriesAComment) {
  const Media image{2, 1, 1, 0, std::vector<std::uint8_t>(6)};
  const auto bytes = open_writer(job::OutputFormat::kPng, 0)->finish(image, "a receipt");
  ASSERT_TRUE(bytes) << bytes.error().message;
  EXPECT_NE(bytes->find(std::string("\0\0\0\x11tEXtComment\0a receipt", 25)), std::string::npos);
  EXPECT_EQ(encode(image, job::OutputFormat::kPng, 0)->find("tEXt"), std::string::npos);
}

// A model decodes groups of frames, and repeats them after a lack of memory.
TEST(MediaWriter, GivesTheSameFileInAnyParts) {
  const Media video = colours(40, 24);
  const auto first = [&](int frames) {
    Media part = video;
    part.frames = frames;
    part.rgb.resize(video.rgb.size() / 40 * static_cast<std::size_t>(frames));
    return part;
  };
  for (const auto format : {job::OutputFormat::kMp4, job::OutputFormat::kWebp}) {
    const auto writer = open_writer(format, 80);
    for (const int frames : {1, 5, 1, 5, 9, 33}) writer->add(first(frames));
    EXPECT_TRUE(*writer->finish(video, "") == *encode(video, format, 80)) << job::row_of(format).name;
  }

  const auto abandoned = open_writer(job::OutputFormat::kMp4, 80);
  abandoned->add(video);

  const auto odd = open_writer(job::OutputFormat::kMp4, 80);
  for (int i = 0; i < 2; ++i) odd->add({33, 32, 1, 24, std::vector<std::uint8_t>(33 * 32 * 3)});
  const auto refused = odd->finish({33, 32, 1, 24, std::vector<std::uint8_t>(33 * 32 * 3)}, "");
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("33x32"), std::string::npos) << refused.error().message;
}

TEST(Mp4Writer, RefusesWhatPlayersCannotShow) {
  const auto refused = [](int width, int height, double rate, const std::string& part) {
    const auto writer = Mp4Writer::open(width, height, rate, 80);
    ASSERT_FALSE(writer.ok());
    EXPECT_EQ(writer.error().code, Code::kInvalidArgument);
    EXPECT_NE(writer.error().message.find(part), std::string::npos) << writer.error().message;
  };
  refused(33, 32, 16, "33x32");
  refused(32, 31, 16, "even");
  refused(0, 32, 16, "from 2 to 16384");
  refused(16386, 32, 16, "from 2 to 16384");
  refused(32, 32, -1, "frames per second");
  refused(32, 32, std::nan(""), "frames per second");
  refused(32, 32, 1e-9, "0.1 to 1000");
  auto writer = Mp4Writer::open(32, 32, 16, 80);
  ASSERT_TRUE(writer) << writer.error().message;
  EXPECT_NE(writer->add(std::vector<std::uint8_t>(5)).error().message.find("needs 3072"), std::string::npos);
  EXPECT_EQ(writer->finish("").error().code, Code::kInvalidArgument);
}

TEST(Resize, GivesPilsPixels) {
  const std::string folder = source_path("tests/fixtures/images/");
  const Media picture = decode_png(read_file(folder + "rgb.png").value());
  const auto expected = parse_json(read_file(folder + "expected.json").value());
  const auto& sizes = expected->at("resized").as_array();
  EXPECT_GT(sizes.size(), 5u);
  for (const json::value& want : sizes) {
    const int width = static_cast<int>(want.at(0).as_int64()), height = static_cast<int>(want.at(1).as_int64());
    const auto hash = [&](const std::vector<std::uint8_t>& bytes) {
      return sha256_hex({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    };
    const Media lanczos = resize_lanczos(picture, width, height);
    EXPECT_EQ(hash(lanczos.rgb), want.at(2).as_string()) << json::serialize(want);
    EXPECT_EQ(hash(resize_bicubic(picture, width, height).rgb), want.at(3).as_string()) << json::serialize(want);
    EXPECT_EQ(hash(grey(lanczos)), want.at(4).as_string()) << json::serialize(want);
  }
}

}  // namespace ditfleet::media
