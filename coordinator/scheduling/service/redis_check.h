// Whether a Redis is fit for a queue, from its INFO: how it persists and evicts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::scheduling {

struct RedisCheck {
  std::string refusal;                // why no queue may live there; empty: it may
  std::vector<std::string> warnings;  // what an operator should mend
  bool operator==(const RedisCheck&) const = default;
};

// `info`: the reply to INFO with the sections `persistence` and `memory`; what it lacks is taken for good. `where`: the
// server, for messages. `allow_eviction`: eviction is a warning instead of a refusal. Sets the metrics.
RedisCheck check_redis(std::string_view info, const std::string& where, bool allow_eviction);

}  // namespace ditfleet::scheduling
