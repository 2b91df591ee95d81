// Reads a component's config.json strictly: a field of the wrong type or out of range is an error that contains file
// and field. Fields that are not requested are ignored, as in diffusers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"

namespace ditfleet::pipeline {

// All accessors throw Failure (kDataCorrupt). They return `fallback` for a missing field and for null.
class ConfigFile {
 public:
  // Throws Failure: kNotFound (no such file), kDataCorrupt (not a JSON object).
  explicit ConfigFile(std::string path);
  // The object under `key` as a separate configuration. Its messages contain the same file.
  std::optional<ConfigFile> child(std::string_view key) const;

  const std::string& path() const { return path_; }
  bool has(std::string_view key) const;  // present and not null
  const json::object& fields() const { return fields_; }

  std::int64_t integer(std::string_view key, std::int64_t fallback, std::int64_t least, std::int64_t most) const;
  double number(std::string_view key, double fallback) const;
  std::optional<double> optional_number(std::string_view key) const;
  bool boolean(std::string_view key, bool fallback) const;
  std::string text(std::string_view key, std::string fallback) const;
  std::vector<std::int64_t> integers(std::string_view key, std::vector<std::int64_t> fallback, std::int64_t least,
                                     std::int64_t most) const;
  std::vector<double> numbers(std::string_view key, std::vector<double> fallback) const;
  std::vector<bool> booleans(std::string_view key, std::vector<bool> fallback) const;
  std::vector<std::string> texts(std::string_view key, std::vector<std::string> fallback) const;
  // axes_dims_rope: how many channels of a head rotate along each axis, as many numbers as `fallback`; even, and
  // head_dim in all.
  std::vector<std::int64_t> rope_axes(std::vector<std::int64_t> fallback, std::int64_t head_dim) const;

  // Throws Failure (kDataCorrupt): "FILE: MESSAGE".
  [[noreturn]] void refuse(const std::string& message) const;

 private:
  ConfigFile(std::string path, json::object fields) : path_(std::move(path)), fields_(std::move(fields)) {}
  const json::value* find(std::string_view key) const;
  [[noreturn]] void wrong_type(std::string_view key, std::string_view should_be) const;
  std::int64_t checked(std::string_view key, const json::value& value, std::int64_t least, std::int64_t most) const;
  // `kind`: the plural of what the items must be. `convert` returns nothing for an item of another type.
  template <class T>
  std::vector<T> list(std::string_view key, std::vector<T> fallback, const char* kind,
                      const std::function<std::optional<T>(const json::value&)>& convert) const;

  std::string path_;
  json::object fields_;
};

}  // namespace ditfleet::pipeline
