// The option table, with one row per scalar in Settings. Only this table defines an option's name, type, range and
// description. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shared/config/settings.h"

namespace ditfleet::config {

// The required form of a string.
enum class Form {
  kAny,
  kPath,
  kPaths,
  kListen,
  kListenIfAny,
  kHttpUrl,
  kOrigins,
  kRedisUrl,
  kMemory,
  kDevice,
  kName,
  kSecret,
  kPassword
};

struct Option {
  std::string_view key;  // "gateway.listen"; no dot at the top level
  std::variant<std::string& (*)(Settings&), std::int64_t& (*)(Settings&), int& (*)(Settings&), double& (*)(Settings&),
               bool& (*)(Settings&)>
      at;
  std::string_view description;  // Markdown; includes the cost of a larger value, if relevant
  struct {
    std::int64_t low = 0, high = 0;
  } range = {};                   // bounds of a number, inclusive
  std::string_view choices = {};  // values of a string: "a|b|c"; empty: any text of this `form`
  Form form = Form::kAny;
};

std::span<const Option> options();
const Option* find_option(std::string_view key);

// Whether `text` is one of the choices "a|b|c".
bool is_one_of(std::string_view choices, std::string_view text);
std::string choices_text(std::string_view choices);  // "one of a, b, c"

// "an integer from 1 to 100", "one of a, b", "true or false": for REFERENCE.md and error messages.
std::string type_text(const Option& option);
std::string value_text(const Option& option, const Settings& settings);

// Parses `text` and sets the option's member. kInvalidArgument: the message is the end of a sentence, "is 'x'; it must
// be …".
Result<void> assign(const Option& option, const std::string& text, Settings& settings);

// "gateway.max_body_bytes" → "DITFLEET_GATEWAY__MAX_BODY_BYTES".
std::string environment_name(std::string_view key);

}  // namespace ditfleet::config
