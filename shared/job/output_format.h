// The file formats of results: their names, media types and file name extensions. No side effects; thread-safe.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace ditfleet::job {

enum class OutputFormat { kPng, kJpeg, kWebp, kMp4 };

struct FormatRow {
  OutputFormat format;
  std::string_view name;        // "jpeg", in JSON
  std::string_view media_type;  // "image/jpeg"
  std::string_view extension;   // ".jpg"
  bool holds_images, holds_videos;
};

// In the order of the enumeration.
inline constexpr auto kOutputFormats = std::to_array<FormatRow>({
    {OutputFormat::kPng, "png", "image/png", ".png", true, false},
    {OutputFormat::kJpeg, "jpeg", "image/jpeg", ".jpg", true, false},
    {OutputFormat::kWebp, "webp", "image/webp", ".webp", true, true},
    {OutputFormat::kMp4, "mp4", "video/mp4", ".mp4", false, true},
});

constexpr const FormatRow& row_of(OutputFormat format) { return kOutputFormats[static_cast<std::size_t>(format)]; }

constexpr OutputFormat default_format(bool video) { return video ? OutputFormat::kMp4 : OutputFormat::kPng; }

// The format of a video's previews, which are images.
constexpr OutputFormat preview_format(OutputFormat format) {
  return row_of(format).holds_images ? format : OutputFormat::kWebp;
}

inline std::string media_type_of(OutputFormat format) { return std::string(row_of(format).media_type); }

std::optional<OutputFormat> format_from_name(std::string_view name);
std::optional<OutputFormat> format_from_media_type(std::string_view media_type);
// The format of the path's extension, in upper or lower case; .jpeg is also accepted. Nothing for other extensions.
std::optional<OutputFormat> format_from_path(std::string_view path);

}  // namespace ditfleet::job
