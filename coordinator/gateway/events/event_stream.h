// Server-sent events as text (WHATWG HTML §9.2). Pure functions, thread-safe.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/queue/types.h"

namespace ditfleet::gateway {

// One event. `id` and `type` have no line breaks; each line of `data` becomes a data field.
// An empty id is omitted.
std::string format_event(std::string_view id, std::string_view type, std::string_view data);

// A comment line, which clients ignore. It keeps proxies from closing an idle stream.
std::string format_comment(std::string_view text);

// The type of an event as clients get it: a unit that is ready again because its job was paused or resumed has an event
// paused or resumed.
std::string_view shown_type(const queue::Event& event);

// The data of a native event as one JSON object (openapi.json: Event). Adds `preview_url` unless it is empty.
std::string event_json(const queue::Event& event, std::string_view preview_url);

// Parses "1700000000000-3", or "1700000000000" and "0", to which it appends "-0" because the queue requires it.
// kInvalidArgument otherwise.
Result<std::string> parse_event_id(std::string_view text);

// Whether the event ends its job: a terminal state of the job, not of a unit.
bool ends_job(const queue::Event& event);

}  // namespace ditfleet::gateway
