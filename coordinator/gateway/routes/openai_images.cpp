#include "coordinator/gateway/routes/openai_images.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "coordinator/gateway/routes/openai_body.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/short_numbers.h"
#include "shared/job/spec_json.h"

namespace ditfleet::gateway {
namespace {

// OpenAI's fields with a fixed set of values.
const std::map<std::string, std::vector<std::string>> kChoices = {
    {"background", {"auto", "opaque", "transparent"}},
    {"complexity", {"low", "medium", "high"}},
    {"input_fidelity", {"low", "high"}},
    {"moderation", {"auto", "low"}},
    {"quality", {"auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"}},
    {"response_format", {"url", "b64_json"}},
    {"style", {"vivid", "natural"}},
};

Result<std::string> read_choice(const std::string& name, const json::value& value,
                                const std::vector<std::string>& choices) {
  for (const auto& choice : choices) {
    if (value.is_string() && value.as_string() == choice) return choice;
  }
  return invalid_argument(fmt::format("'{}' must be one of {}", name, fmt::join(choices, ", ")), name);
}

std::string size_text(std::int64_t width, std::int64_t height) {
  return std::to_string(width) + "x" + std::to_string(height);
}

void echo(json::object& object, const ImageCall& call, std::string_view format) {
  object["background"] = "opaque";
  object["output_format"] = format;
  if (!call.quality.empty()) object["quality"] = call.quality;
  if (!call.safety_identifier.empty()) object["safety_identifier"] = call.safety_identifier;
}

// An event always names a quality.
void echo_event(json::object& object, const ImageCall& call, std::string_view format) {
  echo(object, call, format);
  if (call.quality.empty()) object["quality"] = "auto";
}

std::string_view format_of(std::string_view media_type) {
  const auto format = job::format_from_media_type(media_type);
  return format ? job::row_of(*format).name : media_type;
}

// Makes `image` or `images` of a request the job's field of that name; an array is several images under either name.
Result<void> take_image(json::object& job, const std::string& name, const json::value& value) {
  if (name == "image" && !value.is_array()) {
    auto image = image_value(value, name);
    if (!image) return image.error();
    job[name] = std::move(*image);
    return {};
  }
  if (!value.is_array()) return invalid_argument("'images' must be an array of images", name);
  json::array images;
  for (const json::value& entry : value.get_array()) {
    auto image = image_value(entry, name + "[" + std::to_string(images.size()) + "]");
    if (!image) return image.error();
    images.push_back(std::move(*image));
  }
  job["images"] = std::move(images);
  return {};
}

std::string event_name(const ImageCall& call, const char* what) {
  return std::string(call.edit ? "image_edit." : "image_generation.") + what;
}

}  // namespace

bool is_image_field(job::Field field) {
  return field != job::Field("width") && field != job::Field("height") && field != job::Field("remixed_from");
}

Error as_image_error(Error error, const ImageCall& call) {
  if (error.param == "width" || error.param == "height") error.param = "size";
  const std::string name = error.param.substr(0, error.param.find('['));
  if ((name == "image" || name == "images") && !call.image_name.empty())
    error.param.replace(0, name.size(), call.image_name);
  return error;
}

Result<ImageCall> parse_image_call(std::string_view content_type, std::string_view body, bool edit) {
  static constexpr std::string_view kFiles[] = {"image", "images", "mask", "markup"};
  auto read = read_openai_body(content_type, body, kFiles);
  if (!read) return read.error();
  ImageCall call;
  call.edit = edit;
  call.images = std::move(read->files);
  json::object job;
  for (const auto& [key, value] : read->fields) {
    if (value.is_null()) continue;
    const std::string name(key);
    if (const auto choices = kChoices.find(name); choices != kChoices.end()) {
      const auto chosen = read_choice(name, value, choices->second);
      if (!chosen) return chosen.error();
      if (*chosen == "transparent") {
        return invalid_argument("'background' cannot be transparent: the models make opaque images; use auto or opaque",
                                name);
      }
      if (name == "response_format") call.b64_json = *chosen == "b64_json";
      if (name == "quality") call.quality = *chosen;
    } else if (name == "stream") {
      if (!value.is_bool()) return invalid_argument("'stream' must be true or false", name);
      call.stream = value.as_bool();
    } else if (name == "safety_identifier") {
      if (!value.is_string()) return invalid_argument("'safety_identifier' must be a string", name);
      call.safety_identifier = value.as_string();
    } else if (name == "frame_count" || name == "frame_duration_ms" || name == "svg") {
      return invalid_argument("'" + name + "' is for gif and svg output; supported are png, jpeg and webp", name);
    } else if (name == "markup") {
      return invalid_argument("'markup' is not supported; send the part to replace as mask", name);
    } else if (name == "image" || name == "images") {
      if (!std::exchange(call.image_name, name).empty())
        return invalid_argument("'images' cannot be combined with 'image'; send one of them", "images");
      if (auto taken = take_image(job, name, value); !taken) return taken.error();
    } else if (name == "mask") {
      auto mask = image_value(value, name);
      if (!mask) return mask.error();
      job[name] = std::move(*mask);
    } else if (const auto field = job::find_field(name); field && is_image_field(*field)) {
      job[name] = value;
    } else {
      return invalid_argument("'" + excerpt(name, 100) + "' is not a field of an image request; see /openapi.json",
                              excerpt(name, 100));
    }
  }
  if (!call.safety_identifier.empty()) job["user"] = call.safety_identifier;
  if (!job.contains("prompt"))
    return invalid_argument("'prompt' is missing; send a description of the image", "prompt");

  if (edit && call.image_name.empty())
    return invalid_argument("'image' is missing; send the picture to edit, or use /v1/images/generations", "image");

  for (SentImage& image : take_images(job)) call.images.push_back(std::move(image));
  auto spec = job::parse_spec(json::value(std::move(job)));
  if (!spec) return as_image_error(spec.error(), call);
  call.spec = std::move(*spec);
  call.take_size(call.spec.fields);
  return call;
}

void ImageCall::take_size(const job::FieldValues& fields) {
  const auto width = fields.integer("width"), height = fields.integer("height");
  if (width && height) size = size_text(*width, *height);
}

void ImageCall::complete_for(const job::ModelEntry& model) {
  const bool sized_by_image = model.free_width > 0 && spec.fields.has("image");
  if (size == "auto" && !sized_by_image) take_size(model.defaults);
  if (model.media != job::MediaKind::kVideo) return;
  if (!spec.fields.has("frames")) spec.fields.set("frames", std::int64_t{1});
  if (!spec.output_format && spec.fields.integer("frames") == 1) spec.output_format = job::OutputFormat::kPng;
}

json::object images_json(const ImageCall& call, const std::string& job, std::int64_t created_s,
                         const std::vector<ImagePart>& parts) {
  json::array data;
  for (const auto& part : parts) {
    json::object item;
    if (call.b64_json)
      item["b64_json"] = "";
    else
      item["url"] = part.url;
    item["seed"] = part.manifest.seed;
    data.push_back(std::move(item));
  }
  json::object object{{"created", created_s}, {"job_id", job}};
  object["data"] = std::move(data);
  if (!parts.empty()) {
    echo(object, call, format_of(parts[0].manifest.media_type));
    object["size"] = size_text(parts[0].manifest.width, parts[0].manifest.height);
  }
  return object;
}

std::string partial_image_event(const ImageCall& call) { return event_name(call, "partial_image"); }
std::string completed_event(const ImageCall& call) { return event_name(call, "completed"); }

std::string partial_image_json(const ImageCall& call, std::int64_t created_s, int partial_index, int unit,
                               std::string_view bytes) {
  json::object object{{"type", partial_image_event(call)},
                      {"b64_json", base64(bytes)},
                      {"created_at", created_s},
                      {"partial_image_index", partial_index},
                      {"image_index", unit}};
  echo_event(object, call, format_of(sniff_media_type(bytes)));
  object["size"] = call.size;
  return json_text(object);
}

std::string completed_json(const ImageCall& call, std::int64_t created_s, const ImagePart& part) {
  json::object object{{"type", completed_event(call)}, {"b64_json", ""},
                      {"created_at", created_s},       {"image_index", part.unit},
                      {"seed", part.manifest.seed},    {"size", size_text(part.manifest.width, part.manifest.height)}};
  echo_event(object, call, format_of(part.manifest.media_type));
  return json_text(object);
}

std::string_view sniff_media_type(std::string_view bytes) {
  if (bytes.starts_with("\x89PNG\r\n\x1a\n")) return "image/png";
  if (bytes.starts_with("\xff\xd8\xff")) return "image/jpeg";
  if (bytes.size() >= 12 && bytes.starts_with("RIFF") && bytes.substr(8, 4) == "WEBP") return "image/webp";
  return "application/octet-stream";
}

}  // namespace ditfleet::gateway
