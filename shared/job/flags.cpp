#include "shared/job/flags.h"

#include <charconv>
#include <cmath>

#include "shared/core/bytes.h"

namespace ditfleet::job {
namespace {

template <class Number>
std::optional<Number> read_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

Error refused(const FieldRow& row, const std::string& text, std::string_view kind) {
  return invalid_argument(std::string(row.flag) + " is '" + text + "'; it must be " + std::string(kind) + " from " +
                          std::to_string(row.low) + " to " + std::to_string(row.high));
}

}  // namespace

Result<json::object> fields_of(const FieldFlags& texts) {
  json::object out;
  for (const auto& [field, text] : texts) {
    const FieldRow& row = field.row();
    if (!is_valid_utf8(text)) return invalid_argument(std::string(row.flag) + " is not valid UTF-8");
    if (row.type == FieldType::kInteger) {
      const auto value = read_number<std::int64_t>(text);
      if (!value) return refused(row, text, "an integer");
      out[row.name] = *value;
    } else if (row.type == FieldType::kReal) {
      const auto value = read_number<double>(text);
      if (!value || !std::isfinite(*value)) return refused(row, text, "a number");
      out[row.name] = *value;
    } else {
      out[row.name] = text;
    }
  }
  return out;
}

Error name_the_flag(Error error) {
  auto field = find_field(error.param);
  if (field == Field("width") || field == Field("height")) field = Field("size");
  if (field && !field->row().flag.empty()) error.message = std::string(field->row().flag) + ": " + error.message;
  return error;
}

std::optional<LoraUse> parse_lora_flag(std::string_view text) {
  const auto colon = text.rfind(':');
  LoraUse use{.name = std::string(text.substr(0, colon))};
  if (colon == std::string_view::npos) return use;
  const auto scale = read_number<double>(text.substr(colon + 1));
  if (!scale || !(std::abs(*scale) <= kMaxLoraScale)) return std::nullopt;  // not NaN either
  use.scale = *scale;
  return use;
}

}  // namespace ditfleet::job
