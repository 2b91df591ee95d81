// A model family: describes one kind of diffusers pipeline to the gateway, the scheduler and the command line. It reads
// only the JSON files of a model's folder, without LibTorch.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"

namespace ditfleet::families {

struct Family {
  std::string_view name;                            // the `kind` of its models in GET /v1/models
  std::span<const std::string_view> class_names;    // values of _class_name in model_index.json that belong to it
  std::span<const std::string_view> adapter_parts;  // see Catalogue
  // Sets the entry's media, fields, defaults, max_pixels, guidance and tokens from the folder entry.dir. kNotFound or
  // kDataCorrupt; the message contains the file's path. Blocks on the disk.
  Result<void> (*read)(job::ModelEntry& entry);
};

using Families = std::span<const Family* const>;

// Returns the entry of the model folder `dir`, with the defaults and presets of its ditfleet.json. kNotFound;
// kDataCorrupt, also if no family has the folder's _class_name. The message contains the file's path. Blocks on the
// disk.
Result<job::ModelEntry> read_model_entry(const std::string& name, const std::string& dir, Families families);

// Helpers for families. read_json_object() returns kNotFound or kDataCorrupt.
Result<json::object> read_json_object(const std::string& path);
// Whether the field is true; false if it is missing or has another type.
bool flag_of(const json::object& object, std::string_view name);
Error corrupt(const std::string& path, const std::string& message);
// The pixels per latent pixel of the folder's VAE, in each direction. kNotFound or kDataCorrupt.
Result<std::int64_t> read_vae_factor(const std::string& dir);
// Describes an image of tokens of 2 × 2 latent pixels.
void describe_sides(job::ModelEntry& entry, std::int64_t factor, std::int64_t largest_side, std::int64_t default_side);

}  // namespace ditfleet::families
