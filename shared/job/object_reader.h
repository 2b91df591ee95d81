// Reads the fields of one JSON object, with readable error messages.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/fields.h"

namespace ditfleet::job {

std::string_view kind_name(const json::value& v);  // "a string", "an array", …
std::string number_text(double value);             // the shortest text with exactly this value

// Not thread-safe. After an error, every read returns nothing, and error() is the first error. A null field counts as
// absent. The error's param is the prefix and the field's name; the error's message starts with its param.
class ObjectReader {
 public:
  // `object` must outlive the reader.
  ObjectReader(const json::object& object, std::string prefix) : object_(object), prefix_(std::move(prefix)) {}

  const std::optional<Error>& error() const { return error_; }
  bool ok() const { return !error_; }
  const json::value* find(std::string_view name) const;
  void fail(std::string_view name, const std::string& message);
  void fail(Error error);  // sets the error of a nested object, unchanged

  // Valid UTF-8 with at most kMaxMarks combining marks in a row.
  std::optional<std::string> text(std::string_view name, std::size_t max_bytes);
  std::optional<std::int64_t> integer(std::string_view name, std::int64_t low, std::int64_t high);  // 4.0 is 4
  std::optional<double> real(std::string_view name, double low, double high);
  // Reads a field with the type and bounds of its row. Precondition: no format, size or adapters.
  std::optional<FieldValues::Value> value(Field field);
  void refuse_unknown(const std::vector<std::string>& known);

 private:
  std::nullopt_t refuse(std::string_view name, const std::string& message);
  std::optional<double> cache(const FieldRow& row);
  std::optional<std::string> images(const FieldRow& row);  // separated by commas

  const json::object& object_;
  std::string prefix_;
  std::optional<Error> error_;
};

}  // namespace ditfleet::job
