// The fields of one JSON object of a job's specification, read one by one with messages for people.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::job {

// Of a text field.
inline constexpr std::size_t kMaxTextBytes = 1u << 20;

std::string_view kind_name(const json::value& v);  // "a string", "an array", …
std::string number_text(double value);             // the shortest that reads back the same

// The first failure is kept and ends the reading: what follows reads as left out. So does null. An error's param is
// the field with its prefix, and its message begins with that.
class Fields {
 public:
  // `object` must outlive it.
  Fields(const json::object& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  const std::optional<Error>& error() const { return error_; }
  bool ok() const { return !error_; }
  const json::value* find(std::string_view name) const;
  static std::string shown(const json::value& v);  // as a person writes it: 32.5, not 3.25E1
  void fail(std::string_view name, const std::string& message);
  void fail(Error error);  // of an object within, as that says it

  std::optional<std::string> text(std::string_view name, std::size_t max_bytes = kMaxTextBytes);    // valid UTF-8
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t low, std::int64_t high);  // 4.0 is 4
  std::optional<double> real(std::string_view name, double low, double high);
  void refuse_unknown(const std::vector<std::string>& known);

 private:
  const json::object& object_;
  std::string prefix_;
  std::optional<Error> error_;
};

}  // namespace ditfleet::job
