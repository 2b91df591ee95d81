#include "pipeline/nn/config_file.h"

#include <cmath>
#include <numeric>

#include "pipeline/device/failure.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {

ConfigFile::ConfigFile(std::string path) : path_(std::move(path)) {
  const std::string bytes = unwrap(read_file(path_));
  auto value = parse_json(bytes);
  if (!value) refuse("is not valid JSON: " + value.error().message);
  if (!value->is_object()) refuse("must contain a JSON object");
  fields_ = value->get_object();
}

std::optional<ConfigFile> ConfigFile::child(std::string_view key) const {
  const json::value* v = find(key);
  if (!v) return {};
  if (!v->is_object()) wrong_type(key, "an object");
  return ConfigFile(path_, v->get_object());
}

const json::value* ConfigFile::find(std::string_view key) const {
  const json::value* v = fields_.if_contains(key);
  return v && !v->is_null() ? v : nullptr;
}

bool ConfigFile::has(std::string_view key) const { return find(key) != nullptr; }

std::vector<std::int64_t> ConfigFile::rope_axes(std::vector<std::int64_t> fallback, std::int64_t head_dim) const {
  const std::size_t count = fallback.size();
  auto axes = integers("axes_dims_rope", std::move(fallback), 0, 1 << 20);
  if (axes.size() != count)
    refuse("axes_dims_rope has " + std::to_string(axes.size()) + " entries; it must have " + std::to_string(count));
  for (const std::int64_t channels : axes)
    if (channels % 2 != 0)
      refuse("axes_dims_rope has the odd number " + std::to_string(channels) + "; each must be even");
  if (const auto sum = std::accumulate(axes.begin(), axes.end(), std::int64_t{0}); sum != head_dim)
    refuse("axes_dims_rope adds up to " + std::to_string(sum) + "; it must be attention_head_dim, " +
           std::to_string(head_dim));
  return axes;
}

void ConfigFile::refuse(const std::string& message) const { fail(Code::kDataCorrupt, path_ + ": " + message); }

void ConfigFile::wrong_type(std::string_view key, std::string_view should_be) const {
  refuse(std::string(key) + " is " + excerpt(json::serialize(fields_.at(key)), 80) + "; it must be " +
         std::string(should_be));
}

std::int64_t ConfigFile::checked(std::string_view key, const json::value& value, std::int64_t least,
                                 std::int64_t most) const {
  std::int64_t n = 0;
  if (value.is_int64()) {
    n = value.get_int64();
  } else if (value.is_double() && std::abs(value.get_double()) < 1e15 &&
             value.get_double() == std::floor(value.get_double())) {
    n = static_cast<std::int64_t>(value.get_double());
  } else {
    wrong_type(key, "an integer from " + std::to_string(least) + " to " + std::to_string(most));
  }
  if (n < least || n > most) wrong_type(key, "from " + std::to_string(least) + " to " + std::to_string(most));
  return n;
}

std::int64_t ConfigFile::integer(std::string_view key, std::int64_t fallback, std::int64_t least,
                                 std::int64_t most) const {
  const json::value* v = find(key);
  return v ? checked(key, *v, least, most) : fallback;
}

std::optional<double> ConfigFile::optional_number(std::string_view key) const {
  const json::value* v = find(key);
  if (!v) return {};
  if (!v->is_number()) wrong_type(key, "a number");
  return v->to_number<double>();
}

double ConfigFile::number(std::string_view key, double fallback) const {
  return optional_number(key).value_or(fallback);
}

bool ConfigFile::boolean(std::string_view key, bool fallback) const {
  const json::value* v = find(key);
  if (!v) return fallback;
  if (!v->is_bool()) wrong_type(key, "true or false");
  return v->get_bool();
}

std::string ConfigFile::text(std::string_view key, std::string fallback) const {
  const json::value* v = find(key);
  if (!v) return fallback;
  if (!v->is_string()) wrong_type(key, "a string");
  return std::string(v->get_string());
}

template <class T>
std::vector<T> ConfigFile::list(std::string_view key, std::vector<T> fallback, const char* kind,
                                const std::function<std::optional<T>(const json::value&)>& convert) const {
  const json::value* v = find(key);
  if (!v) return fallback;
  const auto refuse_type = [&] { wrong_type(key, std::string("a list of ") + kind); };
  if (!v->is_array()) refuse_type();
  std::vector<T> out;
  for (const auto& item : v->get_array()) {
    std::optional<T> converted = convert(item);
    if (!converted) refuse_type();
    out.push_back(*std::move(converted));
  }
  return out;
}

std::vector<std::int64_t> ConfigFile::integers(std::string_view key, std::vector<std::int64_t> fallback,
                                               std::int64_t least, std::int64_t most) const {
  return list<std::int64_t>(key, std::move(fallback), "integers",
                            [&](const json::value& item) { return checked(key, item, least, most); });
}

std::vector<double> ConfigFile::numbers(std::string_view key, std::vector<double> fallback) const {
  return list<double>(key, std::move(fallback), "numbers", [](const json::value& item) {
    return item.is_number() ? std::optional(item.to_number<double>()) : std::nullopt;
  });
}

std::vector<bool> ConfigFile::booleans(std::string_view key, std::vector<bool> fallback) const {
  return list<bool>(key, std::move(fallback), "true and false", [](const json::value& item) {
    return item.is_bool() ? std::optional(item.get_bool()) : std::nullopt;
  });
}

std::vector<std::string> ConfigFile::texts(std::string_view key, std::vector<std::string> fallback) const {
  return list<std::string>(key, std::move(fallback), "strings", [](const json::value& item) {
    return item.is_string() ? std::optional(std::string(item.get_string())) : std::nullopt;
  });
}

}  // namespace ditfleet::pipeline
