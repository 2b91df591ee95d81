#include "shared/telemetry/otlp_json.h"

#include <algorithm>
#include <chrono>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/text.h"

namespace ditfleet::telemetry {
namespace {

constexpr int kStatusError = 2;

// Requests are written as text: a tree of JSON values would cost ten times the instructions.
void put(std::string& out, std::string_view text) {
  const bool plain =
      std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c != '"' && c != '\\' && c != '\x7f'; });
  if (plain) {
    out.append(1, '"').append(text).append(1, '"');
    return;
  }
  std::string valid(text);
  if (!is_valid_utf8(valid))
    std::replace_if(
        valid.begin(), valid.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }, '?');
  out += json::serialize(json::value(valid));
}

// Puts a member after others: `,"name":"text"`.
void put_member(std::string& out, std::string_view name, std::string_view text) {
  out.append(",\"").append(name).append("\":");
  put(out, text);
}

// The same for text that needs no escapes, such as ids.
void put_plain(std::string& out, std::string_view name, std::string_view text) {
  out.append(",\"").append(name).append("\":\"").append(text).append(1, '"');
}

void put_value(std::string& out, const AttributeValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    put(out.append("{\"stringValue\":"), *text);
  } else if (const auto* number = std::get_if<std::int64_t>(&value)) {
    out.append("{\"intValue\":\"").append(std::to_string(*number)).append(1, '"');
  } else if (const auto* real = std::get_if<double>(&value)) {
    out.append("{\"doubleValue\":").append(json::serialize(json::value(*real)));
  } else {
    out.append("{\"boolValue\":").append(std::get<bool>(value) ? "true" : "false");
  }
  out += '}';
}

void put_attributes(std::string& out, const Attributes& attributes) {
  out += "\"attributes\":[";
  for (const auto& [key, value] : attributes) {
    if (out.back() != '[') out += ',';
    put(out.append("{\"key\":"), key);
    put_value(out.append(",\"value\":"), value);
    out += '}';
  }
  out += ']';
}

std::string nanoseconds(std::chrono::system_clock::time_point at) {
  return std::to_string(std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count());
}

void put_span(std::string& out, const Span& span) {
  put_attributes(out.append(1, '{'), span.attributes);
  put_plain(out, "traceId", span.trace_id);
  put_plain(out, "spanId", span.span_id);
  put_member(out, "name", span.name);
  out.append(",\"kind\":").append(std::to_string(static_cast<int>(span.kind)));
  put_plain(out, "startTimeUnixNano", nanoseconds(span.start));
  put_plain(out, "endTimeUnixNano", nanoseconds(std::max(span.start, span.end)));
  if (!span.parent_id.empty()) put_plain(out, "parentSpanId", span.parent_id);
  if (!span.links.empty()) out += ",\"links\":[";
  for (const auto& link : span.links) {
    if (out.back() != '[') out += ',';
    put(out.append("{\"traceId\":"), link.trace_id);
    put_plain(out, "spanId", link.span_id);
    out += '}';
  }
  if (!span.links.empty()) out += ']';
  if (!span.error.empty()) {
    out.append(",\"status\":{\"code\":").append(std::to_string(kStatusError));
    put_member(out, "message", span.error);
    out += '}';
  }
  out += '}';
}

}  // namespace

std::string otlp_json(std::span<const Span> spans, const Attributes& resource, const std::string& scope_version) {
  std::string out = "{\"resourceSpans\":[{\"resource\":{";
  put_attributes(out, resource);
  out += "},\"scopeSpans\":[{\"scope\":{\"name\":\"ditfleet\"";
  put_member(out, "version", scope_version);
  out += "},\"spans\":[";
  for (const Span& span : spans) {
    if (out.back() != '[') out += ',';
    put_span(out, span);
  }
  return out += "]}]}]}";
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
