#include "shared/job/flags.h"

#include <filesystem>

#include "shared/core/bytes.h"
#include "shared/core/text.h"

namespace ditfleet::job {
namespace {

Error refused(const FieldRow& row, const std::string& text, std::string_view kind) {
  return invalid_argument(std::string(row.flag) + " is '" + text + "'; it must be " + std::string(kind) + " from " +
                          std::to_string(row.low) + " to " + std::to_string(row.high));
}

}  // namespace

std::vector<std::string> files_of(const std::string& text) {
  std::vector<std::string> files;
  for (const std::string_view file : split(text, '\n')) files.emplace_back(file);
  return files;
}

Result<json::object> body_of(const FieldFlags& texts, const std::string& out_flag, const std::string& out) {
  json::object body;
  for (const auto& [field, text] : texts) {
    const FieldRow& row = field.row();
    if (!is_valid_utf8(text)) return invalid_argument(std::string(row.flag) + " is not valid UTF-8");
    if (row.type == FieldType::kInteger) {
      const auto value = number_of<std::int64_t>(text);
      if (!value) return refused(row, text, "an integer");
      body[row.name] = *value;
    } else if (row.type == FieldType::kReal) {
      const auto value = number_of<double>(text);
      if (!value) return refused(row, text, "a number");
      body[row.name] = *value;
    } else if (row.type == FieldType::kFlag) {
      body[row.name] = text == "true";
    } else if (row.type == FieldType::kImage) {
      const auto images = files_of(text);
      if (images.size() == 1)
        body[row.name] = text;
      else
        body["images"] = json::array(images.begin(), images.end());
    } else if (row.type == FieldType::kCache) {
      const auto colon = text.find(':');
      json::object& cache = body[row.name].emplace_object();
      cache["mode"] = text.substr(0, colon);
      if (colon == text.npos) continue;
      const auto threshold = number_of<double>(text.substr(colon + 1));
      if (!threshold)
        return invalid_argument(std::string(row.flag) + " is '" + text + "'; it must be first_block:THRESHOLD or off");
      cache["threshold"] = *threshold;
    } else {
      body[row.name] = text;
    }
  }
  if (std::filesystem::path(out).extension().empty()) return body;
  const auto format = format_from_path(out);
  if (!format) return invalid_argument(out_flag + " is '" + out + "'; it must end in .png, .jpg, .webp or .mp4");
  body["output_format"] = row_of(*format).name;
  return body;
}

Error name_the_flag(Error error) {
  auto field = find_field(std::string_view(error.param).substr(0, error.param.find_first_of(".[")));  // cache.threshold
  if (field == Field("images")) field = Field("image");
  if (field == Field("width") || field == Field("height")) field = Field("size");
  if (field && !field->row().flag.empty()) error.message = std::string(field->row().flag) + ": " + error.message;
  return error;
}

std::optional<LoraUse> parse_lora_flag(std::string_view text) {
  LoraUse use;
  auto colon = text.rfind(':');
  if (const auto expert = colon == text.npos ? std::nullopt : find_expert(text.substr(colon + 1))) {
    use.expert = *expert;
    text = text.substr(0, colon);
    colon = text.rfind(':');
  }
  use.name = text.substr(0, colon);
  if (colon == std::string_view::npos) return use;
  const auto scale = number_of(text.substr(colon + 1), -kMaxLoraScale, kMaxLoraScale);
  if (!scale) return std::nullopt;
  use.scale = *scale;
  return use;
}

std::string numbered_path(const std::string& path, int index, int count) {
  if (count <= 1) return path;
  const std::filesystem::path p(path);
  return (p.parent_path() / (p.stem().string() + "-" + std::to_string(index + 1) + p.extension().string())).string();
}

}  // namespace ditfleet::job
