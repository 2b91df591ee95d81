#include "shared/families/family.h"

#include <algorithm>
#include <vector>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/job/object_reader.h"
#include "shared/job/spec_json.h"

namespace ditfleet::families {
namespace {

constexpr std::size_t kMostPresets = 32;

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

// Reads the fields that apply to the model, and nothing but these and `known`.
job::FieldValues read_fields(job::ObjectReader& reader, const job::ModelEntry& entry, std::vector<std::string> known) {
  for (const auto& [field, limits] : entry.fields) known.emplace_back(field.name());
  reader.refuse_unknown(known);
  job::FieldValues fields;
  for (const auto& [field, limits] : entry.fields) {
    auto value = reader.value(field);
    if (!value) continue;
    if (const auto error = job::check_value(entry, field, *value)) reader.fail(*error);
    fields.set(field, std::move(*value));
  }
  return fields;
}

void read_presets(job::ObjectReader& reader, job::ModelEntry& entry) {
  const json::value* presets = reader.find("presets");
  if (!presets) return;
  if (!presets->is_object() || presets->get_object().size() > kMostPresets)
    return reader.fail("presets", "must be an object with at most " + std::to_string(kMostPresets) +
                                      " presets, each with fields and loras");
  for (const auto& [key, value] : presets->get_object()) {
    const std::string name(key);
    if (name.empty() || name.size() > static_cast<std::size_t>(job::kMaxNameBytes) || !value.is_object())
      return reader.fail("presets", "has '" + excerpt(name, 60) + "'; it must be an object, with a name of 1 to " +
                                        std::to_string(job::kMaxNameBytes) + " bytes");
    job::ObjectReader own(value.get_object(), "");
    job::Preset preset;
    preset.fields = read_fields(own, entry, {"loras"});
    preset.loras = job::read_loras(own);
    for (const job::LoraUse& use : preset.loras)
      if (use.expert != job::Expert::kBoth && !entry.experts)
        own.fail("loras", "has an expert, but the model has one transformer; leave expert out");
    if (!own.ok()) return reader.fail("presets", "has '" + excerpt(name, 60) + "': " + own.error()->message);
    entry.presets.emplace(name, std::move(preset));
  }
}

// ditfleet.json sets defaults of the fields that apply to the model, presets, and the positions of pictures.
Result<void> read_own_file(const std::string& path, const json::object& object, job::ModelEntry& entry) {
  job::ObjectReader reader(object, "");
  std::vector<std::string> more{"presets"};
  if (entry.grid_positions) more.emplace_back("picture_positions");
  const job::FieldValues fields = read_fields(reader, entry, std::move(more));
  for (const auto& [field, limits] : entry.fields)
    if (const auto* value = fields.find(field)) entry.defaults.set(field, *value);
  read_presets(reader, entry);
  if (const auto positions = reader.text("picture_positions", job::kMaxNameBytes)) {
    if (*positions != "sequence" && *positions != "grid")
      reader.fail("picture_positions", "must be \"sequence\" or \"grid\"");
    entry.grid_positions = *positions == "grid";
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

bool flag_of(const json::object& object, std::string_view name) {
  const json::value* v = object.if_contains(name);
  return v && v->is_bool() && v->get_bool();
}

Result<std::int64_t> read_vae_factor(const std::string& dir) {
  const std::string path = dir + "/vae/config.json";
  const auto vae = read_json_object(path);
  if (!vae) return vae.error();
  const json::value* channels = vae->if_contains("block_out_channels");
  if (!channels) channels = vae->if_contains("dim_mult");  // of a video VAE, relative to base_dim
  if (!channels || !channels->is_array() || channels->get_array().empty() || channels->get_array().size() > 8)
    return corrupt(path, "has no valid block_out_channels; it must be an array of 1 to 8 channel counts");
  return std::int64_t{1} << (channels->get_array().size() - 1);
}

void describe_sides(job::ModelEntry& entry, std::int64_t factor, std::int64_t largest_side, std::int64_t default_side) {
  largest_side = largest_side / (2 * factor) * (2 * factor);
  entry.max_pixels = largest_side * largest_side;
  entry.pixels_per_token = 4 * factor * factor;
  for (const job::Field side : {job::Field("width"), job::Field("height")}) {
    entry.apply(side) = {.low = 2 * factor, .high = largest_side, .multiple_of = 2 * factor};
    entry.defaults.set(side, std::min(default_side, largest_side));
  }
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
  if (auto read = read_own_file(own_path, *own, entry); !read) return read.error();
  if (entry.free_width > 0) {  // an image's size keeps to the area of the model's own default size
    const auto side = [&](job::Field field, int otherwise) {
      return static_cast<int>(entry.defaults.integer(field).value_or(otherwise));
    };
    entry.free_width = side(job::Field("width"), entry.free_width);
    entry.free_height = side(job::Field("height"), entry.free_height);
  }
  return entry;
}

}  // namespace ditfleet::families
