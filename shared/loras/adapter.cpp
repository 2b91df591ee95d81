#include "shared/loras/adapter.h"

#include <algorithm>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/core/sha256.h"

namespace ditfleet::loras {
namespace {

bool is_alphanumeric(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

// Calls `visit` with the name and the member of each field of a stored record.
template <class Record, class Visit>
void each_field(Record& record, const Visit& visit) {
  visit("tenant", record.tenant);
  visit("name", record.name);
  visit("sha256", record.sha256);
  visit("bytes", record.bytes);
  visit("path", record.path);
  visit("models", record.models);
  visit("pinned", record.pinned);
  visit("created_ms", record.created_ms);
  visit("tensors", record.tensors);
  visit("parameters", record.parameters);
  visit("rank", record.rank);
  visit("dtype", record.dtype);
  visit("layers", record.layers);
  visit("families", record.families);
}

}  // namespace

bool Adapter::serves(std::string_view model) const {
  return models.empty() || std::find(models.begin(), models.end(), model) != models.end();
}

std::string Adapter::to_json() const {
  json::object out;
  each_field(*this, [&](const char* field, const auto& value) { out[field] = json::value_from(value); });
  return json::serialize(out);
}

Result<Adapter> Adapter::parse(std::string_view json_text) {
  const auto value = parse_json(json_text);
  const auto corrupt = [](const std::string& what) { return data_corrupt("[loras] a record in Redis " + what); };
  if (!value || !value->is_object()) return corrupt("is not a JSON object");
  Adapter out;
  each_field(out, [&](const char* field, auto& member) { read_field(value->get_object(), field, member); });
  if (!check_name(out.name) || !is_sha256_hex(out.sha256) || out.bytes <= 0)
    return corrupt("has no valid name, sha256 or bytes");
  return out;
}

Result<void> check_name(std::string_view name) {
  constexpr std::size_t kMostBytes = 128;
  const bool good = !name.empty() && name.size() <= kMostBytes && is_alphanumeric(name.front()) &&
                    std::all_of(name.begin(), name.end(),
                                [](char c) { return is_alphanumeric(c) || c == '.' || c == '_' || c == '-'; });
  if (good) return {};
  return invalid_argument(
      "'" + excerpt(name, kMostBytes) +
          "' is not a valid adapter name; it must have 1 to 128 letters, digits, '.', '_' and '-' and start with a "
          "letter or a digit",
      "name");
}

}  // namespace ditfleet::loras
