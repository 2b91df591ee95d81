#include "pipeline/tokenizers/exact_json.h"

#include <algorithm>
#include <charconv>

namespace ditfleet::pipeline {
namespace {

// Rounds the numbers of a value again, from the text that it was parsed from.
struct Rounding {
  std::string_view rest;
  std::ptrdiff_t hidden_keys = 0;  // keys of the text so far that the value lacks, because they occur again

  // Cuts the text behind its next number and returns the number; empty if there is none.
  std::string_view next_number() {
    for (std::size_t at = 0; at < rest.size(); ++at) {
      if (rest[at] == ':') ++hidden_keys;
      if (rest[at] == '"') {
        while (rest[++at] != '"') at += rest[at] == '\\' ? 1 : 0;
      } else if (rest[at] == '-' || (rest[at] >= '0' && rest[at] <= '9')) {
        const std::size_t end = std::min(rest.find_first_not_of("+-.0123456789Ee", at), rest.size());
        const std::string_view number = rest.substr(at, end - at);
        rest.remove_prefix(end);
        return number;
      }
    }
    return rest = {};
  }

  void round(json::value& value) {
    if (json::array* list = value.if_array()) {
      for (json::value& item : *list) round(item);
    } else if (json::object* object = value.if_object()) {
      hidden_keys -= static_cast<std::ptrdiff_t>(object->size());
      for (auto& member : *object) round(member.value());
    } else if (value.is_number()) {
      const std::string_view number = next_number();
      // A number out of range stays as it is.
      if (double* exact = value.if_double()) std::from_chars(number.data(), number.data() + number.size(), *exact);
    }
  }
};

}  // namespace

Result<json::value> parse_exact_json(std::string_view text) {
  auto value = parse_json(text);
  if (!value) return value;
  Rounding rounding{text};
  rounding.round(*value);
  rounding.next_number();  // counts the remaining keys
  // With hidden keys the numbers of the text and of the value do not correspond.
  return rounding.hidden_keys == 0 ? value : parse_json(text);
}

}  // namespace ditfleet::pipeline
