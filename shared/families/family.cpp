#include "shared/families/family.h"

#include <algorithm>
#include <vector>

#include "shared/core/bytes.h"
#include "shared/job/object_reader.h"

namespace ditfleet::families {
namespace {

Result<const Family*> find_family(const std::string& index_path, const json::object& index, Families families) {
  const json::value* class_name = index.if_contains("_class_name");
  std::string supported;
  for (const Family* family : families) {
    for (const std::string_view served : family->class_names) {
      if (class_name && class_name->is_string() && class_name->get_string() == served) return family;
      supported += (supported.empty() ? "" : ", ") + std::string(served);
    }
  }
  return corrupt(index_path, "has _class_name " + (class_name ? json::serialize(*class_name) : "missing") +
                                 "; supported: " + supported);
}

// ditfleet.json sets defaults of the fields that apply to the model.
Result<void> read_defaults(const std::string& path, const json::object& object, job::ModelEntry& entry) {
  job::ObjectReader reader(object, "");
  std::vector<std::string> known;
  for (const auto& [field, limits] : entry.fields) known.emplace_back(field.name());
  reader.refuse_unknown(known);
  for (const auto& [field, limits] : entry.fields) {
    auto value = reader.value(field);
    if (!value) continue;
    if (const auto error = job::check_value(entry, field, *value)) reader.fail(*error);
    entry.defaults.set(field, std::move(*value));
  }
  if (!reader.ok()) return corrupt(path, "is wrong: " + reader.error()->message);
  return {};
}

}  // namespace

Error corrupt(const std::string& path, const std::string& message) {
  return {Code::kDataCorrupt, "'" + path + "' " + message, {}};
}

Result<json::object> read_json_object(const std::string& path) {
  auto text = read_file(path);
  if (!text) return text.error();
  auto value = parse_json(*text);
  if (!value) return corrupt(path, "is " + value.error().message);
  if (!value->is_object()) return corrupt(path, "must contain a JSON object");
  return std::move(value->get_object());
}

Result<job::ModelEntry> read_model_entry(const std::string& name, const std::string& dir, Families families) {
  const std::string index_path = dir + "/model_index.json";
  const auto index = read_json_object(index_path);
  if (!index) {
    if (index.error().code != Code::kNotFound) return index.error();
    return not_found("model '" + name + "': " + index.error().message +
                     "; its path must be a folder in diffusers' layout");
  }
  const auto family = find_family(index_path, *index, families);
  if (!family) return family.error();
  job::ModelEntry entry;
  entry.name = name;
  entry.dir = dir;
  entry.kind = (*family)->name;
  if (auto read = (*family)->read(entry); !read) return read.error();

  const std::string own_path = dir + "/ditfleet.json";
  const auto own = read_json_object(own_path);
  if (!own) {
    if (own.error().code == Code::kNotFound) return entry;
    return own.error();
  }
  if (auto read = read_defaults(own_path, *own, entry); !read) return read.error();
  return entry;
}

}  // namespace ditfleet::families
