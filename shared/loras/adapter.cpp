#include "shared/loras/adapter.h"

#include <algorithm>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/core/sha256.h"

namespace ditfleet::loras {
namespace {

bool is_alphanumeric(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9'); }

std::string text_of(const json::object& object, std::string_view name) {
  const json::value* v = object.if_contains(name);
  return v && v->is_string() ? std::string(v->get_string()) : std::string();
}

std::int64_t integer_of(const json::object& object, std::string_view name) {
  const json::value* v = object.if_contains(name);
  return v && v->is_int64() ? v->get_int64() : 0;
}

}  // namespace

bool Adapter::serves(std::string_view model) const {
  return models.empty() || std::find(models.begin(), models.end(), model) != models.end();
}

std::string Adapter::to_json() const {
  json::array names;
  for (const std::string& model : models) names.emplace_back(model);
  return json::serialize(json::object{{"tenant", tenant},
                                      {"name", name},
                                      {"sha256", sha256},
                                      {"bytes", bytes},
                                      {"path", path},
                                      {"models", std::move(names)},
                                      {"pinned", pinned},
                                      {"created_ms", created_ms},
                                      {"tensors", tensors},
                                      {"parameters", parameters},
                                      {"rank", rank},
                                      {"dtype", dtype}});
}

Result<Adapter> Adapter::parse(std::string_view json_text) {
  const auto value = parse_json(json_text);
  const auto corrupt = [](const std::string& what) { return data_corrupt("[loras] a record in Redis " + what); };
  if (!value || !value->is_object()) return corrupt("is not a JSON object");
  const json::object& object = value->get_object();
  Adapter out;
  out.tenant = text_of(object, "tenant");
  out.name = text_of(object, "name");
  out.sha256 = text_of(object, "sha256");
  out.bytes = integer_of(object, "bytes");
  out.path = text_of(object, "path");
  if (const json::value* list = object.if_contains("models"); list && list->is_array()) {
    for (const json::value& model : list->get_array()) {
      if (model.is_string()) out.models.emplace_back(model.get_string());
    }
  }
  const json::value* pinned = object.if_contains("pinned");
  out.pinned = pinned && pinned->is_bool() && pinned->get_bool();
  out.created_ms = integer_of(object, "created_ms");
  out.tensors = static_cast<int>(integer_of(object, "tensors"));
  out.parameters = integer_of(object, "parameters");
  out.rank = static_cast<int>(integer_of(object, "rank"));
  out.dtype = text_of(object, "dtype");
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
