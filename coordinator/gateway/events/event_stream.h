// Server-sent events as text (WHATWG HTML §9.2). Pure, thread safe.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"
#include "shared/queue/types.h"

namespace ditfleet::gateway {

// One event. `id` and `type` have no line breaks; each line of `data` becomes a data field of its own.
// An empty id is left out.
std::string format_event(std::string_view id, std::string_view type, std::string_view data);

// A comment line, which clients ignore: keeps proxies from closing an idle stream.
std::string format_comment(std::string_view text);

// The data of a native event: one JSON object (README.md). `preview_url` is added where it is not empty.
std::string event_json(const queue::Event& event, std::string_view preview_url);

// "1700000000000-3", or "1700000000000" which is given as "1700000000000-0", "0" for the first event; so made whole,
// since the queue takes no other. kInvalidArgument otherwise.
Result<std::string> parse_event_id(std::string_view text);

// The greatest id below `id` (a valid one that is not 0-0): reading after it starts with `id` itself.
std::string id_before(std::string_view id);

// An event that ends its job: a terminal type of the job as a whole.
bool ends_job(const queue::Event& event);

}  // namespace ditfleet::gateway
