#include "shared/telemetry/otlp_json.h"

#include <algorithm>
#include <chrono>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/text.h"

namespace ditfleet::telemetry {
namespace {

constexpr int kStatusError = 2;

std::string text_of(std::string text) {
  if (!is_valid_utf8(text))
    std::replace_if(
        text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }, '?');
  return text;
}

json::object value_of(const AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return {{"stringValue", text_of(*text)}};
  if (const auto* number = std::get_if<std::int64_t>(&value)) return {{"intValue", std::to_string(*number)}};
  if (const auto* number = std::get_if<double>(&value)) return {{"doubleValue", *number}};
  return {{"boolValue", std::get<bool>(value)}};
}

json::array attributes_of(const Attributes& attributes) {
  json::array out;
  for (const auto& [key, value] : attributes)
    out.push_back(json::object{{"key", text_of(key)}, {"value", value_of(value)}});
  return out;
}

std::string nanoseconds(std::chrono::system_clock::time_point at) {
  return std::to_string(std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count());
}

json::object span_of(const Span& span) {
  json::object out{{"traceId", span.trace_id},
                   {"spanId", span.span_id},
                   {"name", text_of(span.name)},
                   {"kind", static_cast<int>(span.kind)},
                   {"startTimeUnixNano", nanoseconds(span.start)},
                   {"endTimeUnixNano", nanoseconds(std::max(span.start, span.end))},
                   {"attributes", attributes_of(span.attributes)}};
  if (!span.parent_id.empty()) out["parentSpanId"] = span.parent_id;
  json::array links;
  for (const auto& link : span.links)
    links.push_back(json::object{{"traceId", link.trace_id}, {"spanId", link.span_id}});
  if (!links.empty()) out["links"] = std::move(links);
  if (!span.error.empty()) out["status"] = json::object{{"code", kStatusError}, {"message", text_of(span.error)}};
  return out;
}

}  // namespace

std::string otlp_json(std::span<const Span> spans, const Attributes& resource, const std::string& scope_version) {
  json::array list;
  for (const Span& span : spans) list.push_back(span_of(span));
  const json::object scope_spans{{"scope", json::object{{"name", "ditfleet"}, {"version", scope_version}}},
                                 {"spans", std::move(list)}};
  const json::object resource_spans{{"resource", json::object{{"attributes", attributes_of(resource)}}},
                                    {"scopeSpans", json::array{scope_spans}}};
  return json::serialize(json::object{{"resourceSpans", json::array{resource_spans}}});
}

std::size_t rejected_spans(std::string_view answer) {
  const auto parsed = parse_json(answer);
  if (!parsed || !parsed->is_object()) return 0;
  const json::value* partial = parsed->as_object().if_contains("partialSuccess");
  if (!partial || !partial->is_object()) return 0;
  const json::value* rejected = partial->as_object().if_contains("rejectedSpans");
  if (!rejected) return 0;
  // 64-bit integers are strings in proto3's JSON.
  if (const auto* text = rejected->if_string()) return leading_integer<std::size_t>(*text);
  const auto* number = rejected->if_int64();
  return number && *number > 0 ? static_cast<std::size_t>(*number) : 0;
}

}  // namespace ditfleet::telemetry
