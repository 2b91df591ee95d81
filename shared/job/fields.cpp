#include "shared/job/fields.h"

#include <cassert>
#include <utility>

#include "shared/core/text.h"

namespace ditfleet::job {
namespace {

[[maybe_unused]] bool has_type(FieldType type, const FieldValues::Value& value) {
  switch (type) {
    case FieldType::kInteger:
    case FieldType::kFlag: return std::holds_alternative<std::int64_t>(value);
    case FieldType::kReal:
    case FieldType::kCache: return std::holds_alternative<double>(value);
    default: return std::holds_alternative<std::string>(value);
  }
}

}  // namespace

std::string_view expert_name(Expert expert) {
  return expert == Expert::kHigh ? "high" : expert == Expert::kLow ? "low" : "both";
}

std::optional<Expert> find_expert(std::string_view name) {
  for (const Expert expert : {Expert::kBoth, Expert::kHigh, Expert::kLow}) {
    if (expert_name(expert) == name) return expert;
  }
  return std::nullopt;
}

std::optional<Field> find_field(std::string_view name) {
  for (const Field field : kFields) {
    if (field.name() == name) return field;
  }
  return std::nullopt;
}

const FieldValues::Value* FieldValues::find(Field field) const {
  const auto found = values_.find(field);
  return found == values_.end() ? nullptr : &found->second;
}

std::optional<std::int64_t> FieldValues::integer(Field field) const {
  const Value* value = find(field);
  return value ? std::optional(std::get<std::int64_t>(*value)) : std::nullopt;
}

std::optional<double> FieldValues::real(Field field) const {
  const Value* value = find(field);
  return value ? std::optional(std::get<double>(*value)) : std::nullopt;
}

const std::string* FieldValues::text(Field field) const {
  const Value* value = find(field);
  return value ? &std::get<std::string>(*value) : nullptr;
}

std::vector<std::string> FieldValues::images(Field field) const {
  std::vector<std::string> all;
  if (const std::string* value = text(field))
    for (const std::string_view sha256 : split(*value, ',')) all.emplace_back(sha256);
  return all;
}

void FieldValues::set(Field field, Value value) {
  if (const auto* whole = std::get_if<std::int64_t>(&value); whole && field.row().type == FieldType::kReal)
    value = static_cast<double>(*whole);
  assert(field.row().use == FieldUse::kGeneration && has_type(field.row().type, value));
  values_.insert_or_assign(field, std::move(value));
}

}  // namespace ditfleet::job
