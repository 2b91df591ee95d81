#include "shared/job/output_format.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <string>

namespace ditfleet::job {
namespace {

std::optional<OutputFormat> find(std::string_view FormatRow::*column, std::string_view value) {
  for (const FormatRow& row : kOutputFormats) {
    if (row.*column == value) return row.format;
  }
  return std::nullopt;
}

}  // namespace

std::optional<OutputFormat> format_from_name(std::string_view name) { return find(&FormatRow::name, name); }

std::optional<OutputFormat> format_from_media_type(std::string_view media_type) {
  return find(&FormatRow::media_type, media_type);
}

std::optional<OutputFormat> format_from_path(std::string_view path) {
  std::string extension = std::filesystem::path(path).extension().string();
  std::transform(extension.begin(), extension.end(), extension.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return find(&FormatRow::extension, extension == ".jpeg" ? ".jpg" : extension);
}

}  // namespace ditfleet::job
