#include "pipeline/nn/text/qwen_processor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "pipeline/device/failure.h"
#include "pipeline/nn/config_file.h"
#include "shared/media/resize.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kMost = std::int64_t{1} << 40;

std::array<double, 3> channels(const ConfigFile& file, const char* key, const std::array<double, 3>& fallback) {
  const auto values = file.numbers(key, {fallback.begin(), fallback.end()});
  if (values.size() != 3) file.refuse(std::string(key) + " must have three numbers");
  return {values[0], values[1], values[2]};
}

// Of one value for each channel: [3, 1, 1] fp32.
at::Tensor of_channels(const std::array<double, 3>& values) {
  return at::tensor(values, c10::ScalarType::Float).view({3, 1, 1});
}

}  // namespace

QwenProcessor read_qwen_processor(const std::string& dir) {
  std::optional<ConfigFile> found;
  if (const std::string both = dir + "/processor_config.json"; std::filesystem::exists(both))
    found = ConfigFile(both).child("image_processor");
  const ConfigFile file = found ? *found : ConfigFile(dir + "/preprocessor_config.json");
  QwenProcessor c;
  for (const char* step : {"do_resize", "do_rescale", "do_normalize", "do_convert_rgb"})
    if (!file.boolean(step, true)) file.refuse(std::string(step) + " is false, which is not supported");
  constexpr std::int64_t kBicubic = 3;  // of PIL
  if (const auto filter = file.integer("resample", kBicubic, 0, kMost); filter != kBicubic)
    file.refuse("resample is " + std::to_string(filter) + ", which is not supported; it must be 3, bicubic");
  c.patch_size = file.integer("patch_size", c.patch_size, 1, 1024);
  c.temporal_patch_size = file.integer("temporal_patch_size", c.temporal_patch_size, 1, 1024);
  c.merge_size = file.integer("merge_size", c.merge_size, 1, 1024);
  if (const auto size = file.child("size")) {
    c.min_pixels = size->integer("shortest_edge", c.min_pixels, 1, kMost);
    c.max_pixels = size->integer("longest_edge", c.max_pixels, 1, kMost);
  }
  c.min_pixels = file.integer("min_pixels", c.min_pixels, 1, kMost);
  c.max_pixels = file.integer("max_pixels", c.max_pixels, 1, kMost);
  c.rescale_factor = file.number("rescale_factor", c.rescale_factor);
  c.mean = channels(file, "image_mean", c.mean);
  c.std = channels(file, "image_std", c.std);
  return c;
}

std::pair<int, int> QwenProcessor::resized(int width, int height) const {
  if (std::max(width, height) > 200 * std::min(width, height))
    fail(Code::kInvalidArgument, "the picture has " + std::to_string(width) + " × " + std::to_string(height) +
                                     " pixels; one side must be at most 200 times the other");
  const auto factor = static_cast<double>(patch_size * merge_size);
  const double w = width, h = height, least = static_cast<double>(min_pixels), most = static_cast<double>(max_pixels);
  // As in Python, halves are rounded to even.
  double to_w = std::nearbyint(w / factor) * factor, to_h = std::nearbyint(h / factor) * factor;
  if (to_w * to_h > most) {
    const double beta = std::sqrt(h * w / most);
    to_w = std::max(factor, std::floor(w / beta / factor) * factor);
    to_h = std::max(factor, std::floor(h / beta / factor) * factor);
  } else if (to_w * to_h < least) {
    const double beta = std::sqrt(least / (h * w));
    to_w = std::ceil(w * beta / factor) * factor;
    to_h = std::ceil(h * beta / factor) * factor;
  }
  return {static_cast<int>(to_w), static_cast<int>(to_h)};
}

PictureTokens QwenProcessor::patches(const media::Media& picture) const {
  const auto [width, height] = resized(picture.width, picture.height);
  media::Media resized = media::resize_bicubic(picture, width, height);
  const std::int64_t rows = height / patch_size, columns = width / patch_size;
  const at::Tensor bytes = at::from_blob(resized.rgb.data(), {height, width, 3}, c10::ScalarType::Byte);
  // Multiplied in fp64, the rest in fp32.
  const at::Tensor scaled =
      (bytes.permute({2, 0, 1}).to(c10::ScalarType::Double) * rescale_factor).to(c10::ScalarType::Float);
  const at::Tensor values = (scaled - of_channels(mean)) / of_channels(std);
  return {values.reshape({3, rows / merge_size, merge_size, patch_size, columns / merge_size, merge_size, patch_size})
              .permute({1, 4, 2, 5, 0, 3, 6})
              .unsqueeze(5)
              .expand({-1, -1, -1, -1, -1, temporal_patch_size, -1, -1})
              .reshape({rows * columns, 3 * temporal_patch_size * patch_size * patch_size}),
          rows, columns};
}

}  // namespace ditfleet::pipeline
