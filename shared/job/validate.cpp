#include "shared/job/validate.h"

#include <sodium.h>

#include <limits>
#include <optional>
#include <string>
#include <utility>

namespace ditfleet::job {
namespace {

constexpr std::int64_t kMaxSeed = std::numeric_limits<std::int64_t>::max();

std::string known_models(const Catalogue& catalogue) {
  std::string list;
  for (const auto& [name, entry] : catalogue.models) list += (list.empty() ? "" : ", ") + name;
  return list.empty() ? "none is configured" : "known are " + list;
}

Result<const ModelEntry*> find_model(JobSpec& spec, const Catalogue& catalogue) {
  if (spec.model.empty()) {
    spec.model = catalogue.default_model;
    if (spec.model.empty() && catalogue.models.size() == 1) spec.model = catalogue.models.begin()->first;
    if (spec.model.empty()) {
      return invalid_argument("model is missing and there is no default model; " + known_models(catalogue), "model");
    }
  }
  const auto found = catalogue.models.find(spec.model);
  if (found != catalogue.models.end()) return &found->second;
  return Error{Code::kNotFound, "there is no model '" + spec.model + "'; " + known_models(catalogue), "model"};
}

std::optional<Error> check_side(const char* name, std::int64_t side, const ModelEntry& entry) {
  if (side < entry.min_side || side > entry.max_side) {
    return invalid_argument(std::string(name) + " is " + std::to_string(side) + "; model '" + entry.name + "' takes " +
                                std::to_string(entry.min_side) + " to " + std::to_string(entry.max_side) + " pixels",
                            name);
  }
  const int multiple = entry.size_multiple;
  if (side % multiple == 0) return std::nullopt;
  const int below = side / multiple * multiple, above = below + multiple;
  std::string near = std::to_string(above);
  if (below >= entry.min_side)
    near = above <= entry.max_side ? std::to_string(below) + " or " + near : std::to_string(below);
  return invalid_argument(std::string(name) + " is " + std::to_string(side) + ", which is not a multiple of " +
                              std::to_string(multiple) + " as model '" + entry.name + "' needs; " + near + " would do",
                          name);
}

std::optional<Error> check_against(const JobSpec& spec, const ModelEntry& entry) {
  if (auto error = check_side("width", *spec.fields.integer("width"), entry)) return error;
  if (auto error = check_side("height", *spec.fields.integer("height"), entry)) return error;
  const long pixels = static_cast<long>(*spec.fields.integer("width")) * *spec.fields.integer("height");
  if (pixels > entry.max_pixels) {
    return invalid_argument("width × height is " + std::to_string(pixels) + " pixels; model '" + entry.name +
                                "' makes at most " + std::to_string(entry.max_pixels),
                            "width");
  }
  if (*spec.fields.integer("num_inference_steps") > entry.max_steps) {
    return invalid_argument("num_inference_steps is " + std::to_string(*spec.fields.integer("num_inference_steps")) +
                                "; model '" + entry.name + "' takes 1 to " + std::to_string(entry.max_steps),
                            "num_inference_steps");
  }
  if (*spec.fields.integer("max_sequence_length") > entry.max_sequence_length_limit) {
    return invalid_argument("max_sequence_length is " + std::to_string(*spec.fields.integer("max_sequence_length")) +
                                "; model '" + entry.name + "' takes 1 to " +
                                std::to_string(entry.max_sequence_length_limit),
                            "max_sequence_length");
  }
  if (*spec.seed > kMaxSeed - (*spec.n - 1)) {
    return invalid_argument("seed is " + std::to_string(*spec.seed) + " and n is " + std::to_string(*spec.n) +
                                ", but image i is drawn with seed + i, which must not exceed " +
                                std::to_string(kMaxSeed),
                            "seed");
  }
  return std::nullopt;
}

std::optional<Error> pin_adapters(JobSpec& spec, const ModelEntry& entry, const AdapterResolver& resolve) {
  for (std::size_t i = 0; i < spec.loras.size(); ++i) {
    LoraUse& use = spec.loras[i];
    const std::string at = "loras[" + std::to_string(i) + "].";
    if (!resolve) {
      if (!use.sha256.empty()) continue;
      return invalid_argument(at + "sha256 is missing; a spec that reaches a worker names each adapter by its digest",
                              at + "sha256");
    }
    auto digest = resolve(use, entry);
    if (!digest) {
      Error error = digest.error();
      error.param = at + (error.param.empty() ? "name" : error.param);
      return error;
    }
    use.sha256 = std::move(*digest);
  }
  return std::nullopt;
}

// Random seeds stay below 2^48, so that a reader in JavaScript gets them exactly.
std::int64_t random_seed() {
  std::uint64_t bits = 0;
  randombytes_buf(&bits, sizeof bits);
  return static_cast<std::int64_t>(bits >> 16);
}

}  // namespace

Result<JobSpec> complete_spec(JobSpec spec, const Catalogue& catalogue, const AdapterResolver& resolve) {
  const auto found = find_model(spec, catalogue);
  if (!found) return found.error();
  const ModelEntry& entry = **found;
  if (!spec.n) spec.n = 1;
  if (!spec.fields.has("width")) spec.fields.set("width", entry.width);
  if (!spec.fields.has("height")) spec.fields.set("height", entry.height);
  if (!spec.fields.has("num_inference_steps")) spec.fields.set("num_inference_steps", entry.num_inference_steps);
  if (!spec.fields.has("guidance_scale")) spec.fields.set("guidance_scale", entry.guidance_scale);
  if (!spec.fields.has("true_cfg_scale")) spec.fields.set("true_cfg_scale", entry.true_cfg_scale);
  // Stays unset without a default: to diffusers an absent negative prompt and "" differ (true CFG).
  if (!spec.fields.has("negative_prompt") && entry.has_negative_prompt)
    spec.fields.set("negative_prompt", entry.negative_prompt);
  if (!spec.fields.has("max_sequence_length")) spec.fields.set("max_sequence_length", entry.max_sequence_length);
  if (!spec.seed) spec.seed = random_seed();
  if (!spec.output_compression) spec.output_compression = 100;
  if (auto error = check_against(spec, entry)) return *error;
  if (auto error = pin_adapters(spec, entry, resolve)) return *error;
  return spec;
}

}  // namespace ditfleet::job
