#include "shared/core/json.h"

#include <algorithm>
#include <boost/json/src.hpp>
#include <cmath>
#include <string>
#include <utility>

namespace ditfleet {
namespace {

// The parser makes infinity of a number that no double can hold, and serialize() then writes a word that is not JSON.
bool is_finite(const json::value& value) {
  switch (value.kind()) {
    case json::kind::double_: return std::isfinite(value.get_double());
    case json::kind::array: return std::all_of(value.get_array().begin(), value.get_array().end(), is_finite);
    case json::kind::object:
      return std::all_of(value.get_object().begin(), value.get_object().end(),
                         [](const auto& member) { return is_finite(member.value()); });
    default: return true;
  }
}

}  // namespace

Result<json::value> parse_json(std::string_view text, json::storage_ptr storage) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // ignored, as RFC 8259 §8.1 permits
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  json::parse_options options;
  options.max_depth = 64;
  unsigned char buffer[2048];  // saves the parser an allocation for a small text
  json::stream_parser parser({}, options, buffer);
  parser.reset(std::move(storage));
  boost::system::error_code ec;
  const std::size_t read = parser.write_some(text.data(), text.size(), ec);
  if (!ec && parser.done() && text.find_first_not_of(" \t\r\n", read) != std::string_view::npos) {
    ec = json::error::extra_data;
  }
  if (!ec && !parser.done()) {
    parser.finish(ec);
    if (!ec && !parser.done()) ec = json::error::incomplete;
  }
  if (ec) {
    return invalid_argument("not valid JSON near byte " + std::to_string(read) + ": " + ec.message());
  }
  json::value parsed = parser.release();
  if (!is_finite(parsed)) return invalid_argument("the JSON has a number beyond ±1.8e308");
  return parsed;
}

std::vector<std::string> strings_of(const json::value& value) {
  std::vector<std::string> out;
  if (!value.is_array()) return out;
  for (const json::value& item : value.get_array()) {
    if (item.is_string()) out.emplace_back(item.get_string());
  }
  return out;
}

}  // namespace ditfleet
