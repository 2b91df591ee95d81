// The option table: one row for each scalar of Settings. Everything that knows an option's name, type,
// range or description reads it here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shared/config/settings.h"

namespace ditfleet::config {

// What a string must look like beyond being text.
enum class Form { kAny, kPath, kListen, kListenIfAny, kHttpUrl, kRedisUrl, kMemory, kDevice, kName, kSecret };

struct Option {
  std::string_view key;  // "gateway.listen"; without a dot at the top level
  std::variant<std::string& (*)(Settings&), std::int64_t& (*)(Settings&), int& (*)(Settings&), bool& (*)(Settings&)> at;
  std::string_view description;
  std::int64_t low = 0, high = 0;  // of numbers, inclusive
  std::string_view choices = {};   // of strings: "a|b|c"; empty: any of `form`
  Form form = Form::kAny;
};

std::span<const Option> options();
const Option* find_option(std::string_view key);

// "integer 1…65535", "one of a, b", "true or false": as REFERENCE.md and error messages say it.
std::string type_text(const Option& option);
std::string value_text(const Option& option, const Settings& settings);

// Parses `text` into the option's place. The error is the end of a sentence: "is 'x'; it must be …".
Result<void> assign(const Option& option, const std::string& text, Settings& settings);

// "gateway.max_body_bytes" → "DITFLEET_GATEWAY__MAX_BODY_BYTES".
std::string environment_name(std::string_view key);

}  // namespace ditfleet::config
