#include "coordinator/gateway/routes/openai_body.h"

#include <algorithm>

#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/http/multipart.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"

namespace ditfleet::gateway {
namespace {

// The value of a form's field. Forms have only text.
json::value form_value(const std::string& name, std::string_view text) {
  const auto field = job::find_field(name);
  const job::FieldType type = field ? field->row().type : job::FieldType::kText;
  if (type == job::FieldType::kInteger || type == job::FieldType::kReal || type == job::FieldType::kAdapters ||
      type == job::FieldType::kCache || type == job::FieldType::kWebhook || type == job::FieldType::kFlag ||
      name == "stream") {
    if (auto value = parse_json(text)) return std::move(*value);
  }
  return json::value(text);
}

Result<OpenAiBody> read_form(std::string_view content_type, std::string_view body,
                             std::span<const std::string_view> file_fields) {
  const auto parts = parse_form(content_type, body);
  if (!parts) return parts.error();
  OpenAiBody out;
  for (const FormPart& part : *parts) {
    const std::string name = part.name.substr(0, part.name.find('['));  // "image[]", "input_reference[image_url]"
    const std::string shown = excerpt(name, 100);
    if (!is_valid_utf8(name) || (!part.is_file && !is_valid_utf8(part.contents)))
      return invalid_argument("the form's field '" + shown + "' is not valid UTF-8", shown);
    json::value* before = out.fields.if_contains(name);
    if (before && name != "image" && name != "images")
      return invalid_argument("'" + shown + "' is in the form twice", shown);
    if (part.is_file && std::find(file_fields.begin(), file_fields.end(), name) == file_fields.end())
      return invalid_argument("'" + shown + "' must be text, not a file", shown);
    const std::size_t index = !before ? 0 : before->is_array() ? before->get_array().size() : 1;
    if (part.is_file) {
      out.files.push_back({.field = name == "mask" ? job::Field("mask") : job::Field("image"),
                           .index = index,
                           .param = index == 0 ? name : name + "[" + std::to_string(index) + "]",
                           .contents = std::string(part.contents)});
    }
    json::value value = part.is_file ? json::value(kUnknownSha256) : form_value(name, part.contents);
    if (!before && name != "images") {
      out.fields[name] = std::move(value);
      continue;
    }
    json::value& list = out.fields[name];
    if (!list.is_array()) {
      json::array several;
      if (before) several.push_back(std::move(list));
      list = std::move(several);
      for (SentImage& file : out.files)
        if (file.param == name) file.param += "[0]";
    }
    list.get_array().push_back(std::move(value));
  }
  return out;
}

}  // namespace

Result<OpenAiBody> read_openai_body(std::string_view content_type, std::string_view body,
                                    std::span<const std::string_view> file_fields) {
  if (media_type_of(content_type) == "multipart/form-data") return read_form(content_type, body, file_fields);
  auto parsed = parse_json(body);
  if (!parsed) return parsed.error();
  if (!parsed->is_object())
    return invalid_argument("the body must be a JSON object such as {\"prompt\": \"a red circle\"}");
  return OpenAiBody{std::move(parsed->as_object()), {}};
}

Result<json::value> image_value(const json::value& value, const std::string& name) {
  if (value.is_string()) return value;
  if (value.is_object() && value.as_object().size() == 1) {
    const auto& [key, image] = *value.as_object().begin();
    if ((key == "image_url" || key == "file_id") && image.is_string()) return image;
  }
  return invalid_argument("'" + name +
                              "' must be a file, a data URL, or an object with either image_url, a data URL, or "
                              "file_id, an id of POST /v1/uploads",
                          name);
}

}  // namespace ditfleet::gateway
