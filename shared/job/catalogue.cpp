#include "shared/job/catalogue.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/nearest_name.h"

namespace ditfleet::job {
namespace {

Error corrupt(const std::string& path, const std::string& message) {
  return {Code::kDataCorrupt, "'" + path + "' " + message, {}};
}

Result<json::object> read_object(const std::string& path) {
  auto text = read_file(path);
  if (!text) return text.error();
  auto value = parse_json(*text);
  if (!value) return corrupt(path, "is " + value.error().message);
  if (!value->is_object()) return corrupt(path, "must hold a JSON object");
  return std::move(value->get_object());
}

bool flag_of(const json::object& object, std::string_view name) {
  const json::value* v = object.if_contains(name);
  return v && v->is_bool() && v->get_bool();
}

// Applies ditfleet.json: what this model's requests get where they say nothing.
class Defaults {
 public:
  Defaults(std::string path, const json::object& object) : path_(std::move(path)), object_(object) {}

  Result<void> apply(ModelEntry& entry) {
    static const std::vector<std::string> kKnown = {"num_inference_steps", "guidance_scale", "true_cfg_scale",
                                                    "negative_prompt",     "width",          "height",
                                                    "max_sequence_length"};
    for (const auto& member : object_) {
      const std::string name(member.key());
      bool known = false;
      for (const std::string& k : kKnown) known |= k == name;
      if (!known) return corrupt(path_, "has an unknown key '" + name + "'" + suggestion(name, kKnown));
    }
    if (auto r = integer("num_inference_steps", 1, entry.max_steps, entry.num_inference_steps); !r) return r;
    if (auto r = real("guidance_scale", entry.guidance_scale); !r) return r;
    if (auto r = real("true_cfg_scale", entry.true_cfg_scale); !r) return r;
    if (auto r = side("width", entry, entry.width); !r) return r;
    if (auto r = side("height", entry, entry.height); !r) return r;
    if (auto r = integer("max_sequence_length", 1, entry.max_sequence_length_limit, entry.max_sequence_length); !r)
      return r;
    const json::value* negative = object_.if_contains("negative_prompt");
    if (!negative || negative->is_null()) return {};
    if (!negative->is_string()) return corrupt(path_, "has a negative_prompt that is not a string");
    entry.has_negative_prompt = true;
    entry.negative_prompt = std::string(negative->get_string());
    return {};
  }

 private:
  Result<void> integer(std::string_view name, std::int64_t low, std::int64_t high, int& out) {
    const json::value* v = object_.if_contains(name);
    if (!v) return {};
    const auto* i = v->if_int64();
    if (!i || *i < low || *i > high) {
      return corrupt(path_, "has " + std::string(name) + " " + json::serialize(*v) + "; it must be an integer from " +
                                std::to_string(low) + " to " + std::to_string(high));
    }
    out = static_cast<int>(*i);
    return {};
  }

  Result<void> side(std::string_view name, const ModelEntry& entry, int& out) {
    if (auto r = integer(name, entry.min_side, entry.max_side, out); !r) return r;
    if (out % entry.size_multiple == 0) return {};
    return corrupt(path_, "has " + std::string(name) + " " + std::to_string(out) + ", which is not a multiple of " +
                              std::to_string(entry.size_multiple) + " as this model's VAE needs");
  }

  Result<void> real(std::string_view name, double& out) {
    const json::value* v = object_.if_contains(name);
    if (!v) return {};
    const double value = v->is_number() ? v->to_number<double>() : NAN;
    if (!(value >= 0.0 && value <= 100.0)) {
      return corrupt(path_,
                     "has " + std::string(name) + " " + json::serialize(*v) + "; it must be a number from 0 to 100");
    }
    out = value;
    return {};
  }

  std::string path_;
  const json::object& object_;
};

}  // namespace

Result<ModelEntry> read_model_entry(const std::string& name, const std::string& dir) {
  ModelEntry entry;
  entry.name = name;
  entry.dir = dir;

  const std::string index_path = dir + "/model_index.json";
  const auto index = read_object(index_path);
  if (!index) {
    if (index.error().code != Code::kNotFound) return index.error();
    return Error{Code::kNotFound,
                 "model '" + name + "': " + index.error().message + "; its path must be a folder in diffusers' layout",
                 {}};
  }
  const json::value* kind = index->if_contains("_class_name");
  if (!kind || !kind->is_string() || kind->get_string() != "FluxPipeline") {
    return corrupt(index_path, "has _class_name " + (kind ? json::serialize(*kind) : std::string("missing")) +
                                   "; \"FluxPipeline\" is what can be served");
  }

  const std::string vae_path = dir + "/vae/config.json";
  const auto vae = read_object(vae_path);
  if (!vae) return vae.error();
  const json::value* channels = vae->if_contains("block_out_channels");
  if (!channels || !channels->is_array() || channels->get_array().empty() || channels->get_array().size() > 8) {
    return corrupt(vae_path, "lacks block_out_channels, an array of 1 to 8 channel counts");
  }
  const int factor = 1 << (channels->get_array().size() - 1);
  entry.size_multiple = factor * 2;
  entry.min_side = entry.size_multiple;

  const auto transformer = read_object(dir + "/transformer/config.json");
  if (!transformer) return transformer.error();
  const auto scheduler = read_object(dir + "/scheduler/scheduler_config.json");
  if (!scheduler) return scheduler.error();

  // FluxPipeline's own defaults: 128 latents a side, and those of the two published kinds of model.
  entry.width = entry.height = std::min(128 * factor, entry.max_side);
  entry.guidance_embeds = flag_of(*transformer, "guidance_embeds");
  if (!entry.guidance_embeds) entry.guidance_scale = 0.0;
  if (!entry.guidance_embeds && !flag_of(*scheduler, "use_dynamic_shifting")) {
    entry.num_inference_steps = 4;
    entry.max_sequence_length = 256;
  }

  const std::string own_path = dir + "/ditfleet.json";
  const auto own = read_object(own_path);
  if (!own) {
    if (own.error().code == Code::kNotFound) return entry;
    return own.error();
  }
  if (auto applied = Defaults(own_path, *own).apply(entry); !applied) return applied.error();
  return entry;
}

}  // namespace ditfleet::job
