#include "coordinator/gateway/routes/openapi.h"

#include "coordinator/gateway/routes/embedded.h"
#include "coordinator/gateway/routes/openai_images.h"
#include "coordinator/gateway/routes/openai_videos.h"
#include "shared/job/output_format.h"

namespace ditfleet::gateway {

json::object schema_of(const job::FieldRow& row) {
  json::object out{{"description", row.description}};
  const auto number = [&](const char* type) {
    out["type"] = type;
    out["minimum"] = row.low;
    out["maximum"] = row.high;
  };
  switch (row.type) {
    case job::FieldType::kInteger: number("integer"); break;
    case job::FieldType::kReal: number("number"); break;
    case job::FieldType::kText:
    case job::FieldType::kImage:
    case job::FieldType::kSize: out["type"] = "string"; break;
    case job::FieldType::kFlag: out["type"] = "boolean"; break;
    case job::FieldType::kImages:
      out["type"] = "array";
      out["items"] = json::object{{"type", "string"}};
      out["minItems"] = row.low;
      out["maxItems"] = row.high;
      break;
    case job::FieldType::kFormat: {
      json::array names;
      for (const job::FormatRow& format : job::kOutputFormats) names.emplace_back(format.name);
      out["type"] = "string";
      out["enum"] = std::move(names);
      break;
    }
    case job::FieldType::kCache: {
      const json::object threshold{{"type", "number"}, {"minimum", job::kLeastCacheThreshold}, {"maximum", row.high}};
      out["type"] = "object";
      out["properties"] =
          json::object{{"mode", json::object{{"type", "string"}, {"enum", json::array{"first_block", "off"}}}},
                       {"threshold", threshold}};
      out["required"] = json::array{"mode"};
      out["additionalProperties"] = false;
      break;
    }
    case job::FieldType::kWebhook: {
      const json::object url{{"type", "string"}, {"format", "uri"}, {"maxLength", job::kMaxUrlBytes}};
      json::array names;
      for (const std::string_view event : job::kWebhookEvents) names.emplace_back(event);
      const json::object events{
          {"type", "array"}, {"items", json::object{{"type", "string"}, {"enum", std::move(names)}}}, {"minItems", 1}};
      out["oneOf"] = json::array{url, json::object{{"type", "object"},
                                                   {"properties", json::object{{"url", url}, {"events", events}}},
                                                   {"required", json::array{"url"}},
                                                   {"additionalProperties", false}}};
      break;
    }
    case job::FieldType::kAdapters:
      out["type"] = "array";
      out["items"] = json::object{{"$ref", "#/components/schemas/LoraUse"}};
  }
  return out;
}

const std::string& openapi_document() {
  static const std::string kDocument = [] {
    json::value document = parse_json(kOpenApiJson).value();
    json::object& schemas = document.at("components").at("schemas").as_object();
    json::object& job_fields = schemas["JobRequest"].at("properties").as_object();
    json::object& image_fields = schemas["ImageRequest"].at("properties").as_object();
    json::object& video_fields = schemas["VideoRequest"].at("properties").as_object();
    for (const job::Field field : job::kFields) {
      job_fields[field.name()] = schema_of(field.row());
      if (is_image_field(field)) image_fields.emplace(field.name(), schema_of(field.row()));
      if (is_video_field(field)) video_fields.emplace(field.name(), schema_of(field.row()));
    }
    return json::serialize(document);
  }();
  return kDocument;
}

}  // namespace ditfleet::gateway
