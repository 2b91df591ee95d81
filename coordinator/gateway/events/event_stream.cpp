#include "coordinator/gateway/events/event_stream.h"

#include <cstdint>

#include "shared/core/excerpt.h"
#include "shared/core/short_numbers.h"
#include "shared/core/text.h"

namespace ditfleet::gateway {
namespace {

// A part of a Redis stream's id.
bool is_id_part(std::string_view text) { return number_of<std::uint64_t>(text).has_value(); }

// Fields that become numbers in JSON. Others stay text, even if they happen to be all digits.
bool is_numeric_field(std::string_view name) {
  return name == "step" || name == "total" || name == "total_steps" || name == "attempt" || name == "index" ||
         name == "units" || name == "steps" || name == "adapters" || name == "width" || name == "height" ||
         name == "bytes" || name.ends_with("_ms") || name.ends_with("_us");
}

}  // namespace

std::string format_event(std::string_view id, std::string_view type, std::string_view data) {
  std::string text;
  text.reserve(id.size() + type.size() + data.size() + 32);
  if (!id.empty()) text.append("id: ").append(id).append("\n");
  text.append("event: ").append(type).append("\n");
  while (true) {
    const auto line_end = data.find('\n');
    text.append("data: ").append(data.substr(0, line_end)).append("\n");
    if (line_end == std::string_view::npos) break;
    data.remove_prefix(line_end + 1);
  }
  return text.append("\n");
}

std::string format_comment(std::string_view text) { return std::string(": ").append(text).append("\n\n"); }

std::string_view shown_type(const queue::Event& event) {
  const auto reason = event.type == "ready" ? event.fields.find("reason") : event.fields.end();
  const bool pauses = reason != event.fields.end() && (reason->second == "paused" || reason->second == "resumed");
  return pauses ? reason->second : event.type;
}

std::string event_json(const queue::Event& event, std::string_view preview_url) {
  const std::string_view type = shown_type(event);
  json::object object{{"id", event.id}, {"job", event.job}, {"type", type}};
  object["unit"] = event.unit < 0 ? json::value(nullptr) : json::value(event.unit);
  object["at_ms"] = event.at_ms;
  for (const auto& [name, value] : event.fields) {
    // Internal: the nonce authorizes actions, keys and manifests describe storage.
    if (name == "nonce" || name == "key" || name == "manifest" || object.contains(name)) continue;
    if (type == "paused" && name == "not_before_ms") continue;  // the year 2100
    const auto number = number_of<std::int64_t>(value);
    if (name == "phases_us") {
      const auto phases = parse_json(value);
      object[name] = phases ? *phases : json::value(nullptr);
    } else if (is_numeric_field(name) && number) {
      object[name] = *number;
    } else {
      object[name] = value;
    }
  }
  if (!preview_url.empty()) object["url"] = preview_url;
  return json_text(object);
}

Result<std::string> parse_event_id(std::string_view text) {
  const auto dash = text.find('-');
  const bool ok =
      is_id_part(text.substr(0, dash)) && (dash == std::string_view::npos || is_id_part(text.substr(dash + 1)));
  if (!ok) {
    return invalid_argument("'" + excerpt(text, 64) +
                                "' is not an event id; send the id of the last event received, such as 1700000000000-0",
                            "last_event_id");
  }
  return std::string(text) + (dash == std::string_view::npos ? "-0" : "");
}

bool ends_job(const queue::Event& event) {
  const auto state = job::state_from_name(event.type);
  return event.unit < 0 && state && job::is_terminal(*state);
}

}  // namespace ditfleet::gateway
