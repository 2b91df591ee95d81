// A standing check: each open unit is in exactly one of the sets ready, delayed and lease.
#pragma once

#include "shared/queue/keys.h"
#include "shared/redis/connection.h"

namespace ditfleet::testing {

// Replies with a line for each unit that is in no set or in two, at one moment.
inline redis::Command misplaced_units(const queue::Keys& keys) {
  redis::Command command("EVAL");
  command << "local out = {} "
             "for _, member in ipairs(redis.call('HKEYS', KEYS[1])) do "
             "  local sets = 0 "
             "  for i = 2, 4 do if redis.call('ZSCORE', KEYS[i], member) then sets = sets + 1 end end "
             "  if sets ~= 1 then "
             "    out[#out + 1] = member .. ' is in ' .. sets .. ' sets: ' .. redis.call('HGET', KEYS[1], member) "
             "  end "
             "end "
             "return out"
          << 4 << keys.units() << keys.ready() << keys.delayed() << keys.lease();
  return command;
}

}  // namespace ditfleet::testing
