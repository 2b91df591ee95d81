// Runs Redis Functions in Lua 5.1, with Redis' rules for arguments, replies and errors.
#pragma once

#include <map>
#include <string>

#include "tests/history/redis_model.h"

namespace ditfleet::history {

struct Script {
  struct Library {
    std::string library, error;  // its name; why it cannot be loaded
    std::map<std::string, Function> functions;
  };
  // Loads the text of a library once in this process. The reference stays valid.
  static const Library& load(const std::string& text);
  // FCALL: a[2] is the number of keys, which follow.
  static Reply call(RedisModel& model, const Function& function, const Arguments& a, std::size_t keys);
};

}  // namespace ditfleet::history
