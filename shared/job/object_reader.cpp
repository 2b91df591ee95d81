#include "shared/job/object_reader.h"

#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/nearest_name.h"
#include "shared/core/sha256.h"

namespace ditfleet::job {

namespace {

// 32.5, not Boost's 3.25E1.
std::string shown(const json::value& v) { return v.is_double() ? number_text(v.get_double()) : json::serialize(v); }

// The longest run of combining marks. Precondition: valid UTF-8.
std::size_t most_marks(const std::string& text) {
  std::size_t most = 0, run = 0;
  for (std::size_t at = 0; at < text.size();) {
    UChar32 c = 0;
    U8_NEXT_UNSAFE(text.data(), at, c);
    // Of the first character that c decomposes to: a few characters of class 0 consist of marks.
    run = u_getIntPropertyValue(c, UCHAR_LEAD_CANONICAL_COMBINING_CLASS) == 0 ? 0 : run + 1;
    most = std::max(most, run);
  }
  return most;
}

std::optional<std::string> image(ObjectReader& reader, std::string_view name) {
  auto digest = reader.text(name, kMaxTextBytes);
  if (!digest || is_sha256_hex(*digest)) return digest;
  reader.fail(name,
              "is '" + excerpt(*digest, 64) + "'; it must be the id of an upload, 64 lower-case hexadecimal digits");
  return std::nullopt;
}

}  // namespace

std::string_view kind_name(const json::value& v) {
  switch (v.kind()) {
    case json::kind::null: return "null";
    case json::kind::bool_: return "a boolean";
    case json::kind::int64:
    case json::kind::uint64:
    case json::kind::double_: return "a number";
    case json::kind::string: return "a string";
    case json::kind::array: return "an array";
    case json::kind::object: return "an object";
  }
  return "something else";
}

std::string number_text(double value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

const json::value* ObjectReader::find(std::string_view name) const {
  const json::value* v = object_.if_contains(name);
  return v && !v->is_null() ? v : nullptr;
}

void ObjectReader::fail(Error error) {
  if (!error_) error_ = std::move(error);
}

void ObjectReader::fail(std::string_view name, const std::string& message) {
  if (error_) return;
  const std::string param = prefix_ + std::string(name);
  error_ = invalid_argument(param + " " + message, param);
}

std::nullopt_t ObjectReader::refuse(std::string_view name, const std::string& message) {
  fail(name, message);
  return std::nullopt;
}

std::optional<std::string> ObjectReader::text(std::string_view name, std::size_t max_bytes) {
  const json::value* v = find(name);
  if (!v || error_) return std::nullopt;
  if (!v->is_string()) return refuse(name, "is " + std::string(kind_name(*v)) + "; it must be a string");
  std::string out(v->get_string());
  if (!is_valid_utf8(out)) return refuse(name, "is not valid UTF-8");
  if (out.size() > max_bytes)
    return refuse(
        name, "has " + std::to_string(out.size()) + " bytes; at most " + std::to_string(max_bytes) + " are allowed");
  if (const std::size_t marks = most_marks(out); marks > kMaxMarks)
    return refuse(name, "has " + std::to_string(marks) + " combining marks in a row; at most " +
                            std::to_string(kMaxMarks) + " are allowed");
  return out;
}

std::optional<std::int64_t> ObjectReader::integer(std::string_view name, std::int64_t low, std::int64_t high) {
  const json::value* v = find(name);
  if (!v || error_) return std::nullopt;
  const std::string range = "an integer from " + std::to_string(low) + " to " + std::to_string(high);
  if (!v->is_number()) return refuse(name, "is " + std::string(kind_name(*v)) + "; it must be " + range);
  std::optional<std::int64_t> value;
  if (const auto* i = v->if_int64()) {
    value = *i;
  } else if (const auto* d = v->if_double(); d && *d == std::trunc(*d) && std::abs(*d) <= 0x1p53) {
    value = static_cast<std::int64_t>(*d);  // 4.0 is the integer 4, as in JSON Schema
  }
  if (!value || *value < low || *value > high) return refuse(name, "is " + shown(*v) + "; it must be " + range);
  return value;
}

std::optional<double> ObjectReader::real(std::string_view name, double low, double high) {
  const json::value* v = find(name);
  if (!v || error_) return std::nullopt;
  const std::string range = "a number from " + number_text(low) + " to " + number_text(high);
  if (!v->is_number()) return refuse(name, "is " + std::string(kind_name(*v)) + "; it must be " + range);
  const double value = v->to_number<double>();
  if (!std::isfinite(value) || value < low || value > high)
    return refuse(name, "is " + shown(*v) + "; it must be " + range);
  return value;
}

std::optional<double> ObjectReader::cache(const FieldRow& row) {
  const json::value* v = find(row.name);
  if (!v || error_) return std::nullopt;
  if (!v->is_object())
    return refuse(row.name, "is " + std::string(kind_name(*v)) +
                                R"(; it must be {"mode": "first_block", "threshold": NUMBER} or {"mode": "off"})");
  ObjectReader entry(v->get_object(), prefix_ + std::string(row.name) + ".");
  entry.refuse_unknown({"mode", "threshold"});
  const auto mode = entry.text("mode", kMaxNameBytes);
  const bool on = mode == "first_block";
  if (!on && mode != "off")
    entry.fail("mode", (mode ? "is '" + excerpt(*mode, 64) + "'" : "is missing") + "; it must be first_block or off");
  const auto threshold = entry.real("threshold", kLeastCacheThreshold, static_cast<double>(row.high));
  if (on && !threshold)
    entry.fail("threshold", "is missing; it must be a number from " + number_text(kLeastCacheThreshold) + " to " +
                                std::to_string(row.high));
  if (!on && threshold) entry.fail("threshold", "belongs to mode first_block; leave it out");
  if (!entry.ok()) {
    fail(*entry.error());
    return std::nullopt;
  }
  return threshold.value_or(0);
}

std::optional<FieldValues::Value> ObjectReader::value(Field field) {
  const FieldRow& row = field.row();
  switch (row.type) {
    case FieldType::kInteger: return integer(row.name, row.low, row.high);
    case FieldType::kReal: return real(row.name, static_cast<double>(row.low), static_cast<double>(row.high));
    case FieldType::kCache: return cache(row);
    case FieldType::kFlag: {
      const json::value* v = find(row.name);
      if (!v || error_) return std::nullopt;
      if (!v->is_bool()) return refuse(row.name, "is " + std::string(kind_name(*v)) + "; it must be true or false");
      return std::int64_t{v->get_bool()};
    }
    case FieldType::kImage: return image(*this, row.name);
    case FieldType::kImages: return images(row);
    default: return text(row.name, static_cast<std::size_t>(row.high));
  }
}

std::optional<std::string> ObjectReader::images(const FieldRow& row) {
  const json::value* v = find(row.name);
  if (!v || error_) return std::nullopt;
  const std::string count = std::to_string(row.low) + " to " + std::to_string(row.high) + " images";
  if (!v->is_array()) return refuse(row.name, "is " + std::string(kind_name(*v)) + "; it must be an array of " + count);
  const json::array& list = v->get_array();
  if (list.empty() || list.size() > static_cast<std::size_t>(row.high))
    return refuse(row.name, "has " + std::to_string(list.size()) + " entries; it must have " + count);
  std::string all;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string name = std::string(row.name) + "[" + std::to_string(i) + "]";
    if (list[i].is_null()) return refuse(name, "is null; it must be an image");
    const json::object entry{{name, list[i]}};
    ObjectReader reader(entry, prefix_);
    const auto digest = image(reader, name);
    if (!digest) {
      fail(*reader.error());
      return std::nullopt;
    }
    all += (i == 0 ? "" : ",") + *digest;
  }
  return all;
}

void ObjectReader::refuse_unknown(const std::vector<std::string>& known) {
  for (const auto& member : object_) {
    const std::string name(member.key());
    bool is_known = false;
    for (const std::string& k : known) is_known |= k == name;
    if (is_known || error_) continue;
    const std::string shown = excerpt(name, 64);
    error_ = invalid_argument("unknown field '" + prefix_ + shown + "'" + suggestion(name, known), prefix_ + shown);
  }
}

}  // namespace ditfleet::job
