#include "shared/job/validate.h"

#include <sodium.h>

#include <algorithm>
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

std::optional<Error> apply_preset(JobSpec& spec, const ModelEntry& entry) {
  if (spec.preset.empty()) return std::nullopt;
  const auto found = entry.presets.find(spec.preset);
  if (found == entry.presets.end()) {
    std::string list;
    for (const auto& [name, unused] : entry.presets) list += (list.empty() ? "; it has " : ", ") + name;
    return invalid_argument("preset is '" + spec.preset + "', which model '" + entry.name + "' does not have" +
                                (list.empty() ? "; it has no presets" : list),
                            "preset");
  }
  for (const Field field : kFields) {
    const auto* value = found->second.fields.find(field);
    if (value && !spec.fields.has(field)) spec.fields.set(field, *value);
  }
  const auto named = [uses = spec.loras](const std::string& name) {
    return std::any_of(uses.begin(), uses.end(), [&](const LoraUse& use) { return use.name == name; });
  };
  for (const LoraUse& use : found->second.loras) {
    if (!named(use.name)) spec.loras.push_back(use);
  }
  if (const auto most = static_cast<std::size_t>(Field("loras").row().high); spec.loras.size() > most) {
    return invalid_argument("loras has " + std::to_string(spec.loras.size()) + " entries with those of preset '" +
                                spec.preset + "'; at most " + std::to_string(most) + " are allowed",
                            "loras");
  }
  return std::nullopt;
}

std::optional<Error> check_experts(const JobSpec& spec, const ModelEntry& entry) {
  for (std::size_t i = 0; !entry.experts && i < spec.loras.size(); ++i) {
    if (spec.loras[i].expert == Expert::kBoth) continue;
    const std::string at = "loras[" + std::to_string(i) + "].expert";
    return invalid_argument(at + " is " + std::string(expert_name(spec.loras[i].expert)) + ", but model '" +
                                entry.name + "' has one transformer; leave expert out",
                            at);
  }
  return std::nullopt;
}

// Sets defaults, and checks every generation field against the model.
std::optional<Error> complete_fields(FieldValues& fields, const ModelEntry& entry) {
  const bool sized_by_image =
      entry.free_width > 0 && fields.has("image") && !fields.has("width") && !fields.has("height");
  for (const Field field : kFields) {
    if (field.row().use != FieldUse::kGeneration) continue;
    const auto* otherwise = belongs_to_image(field) && !fields.has("image") ? nullptr : entry.defaults.find(field);
    const bool side = field == Field("width") || field == Field("height");
    if (side && sized_by_image) continue;
    if (!fields.has(field) && otherwise) fields.set(field, *otherwise);
    const auto* value = fields.find(field);
    const auto applied = entry.fields.find(field);
    if (!value && applied != entry.fields.end() && applied->second.required) {
      const std::string name(field.name());
      return invalid_argument(name + " is missing; model '" + entry.name + "' needs it", name);
    }
    if (!value) continue;
    if (auto error = check_value(entry, field, *value)) return error;
  }
  if (auto error = check_images(fields, fields.has("image"))) return error;
  const std::int64_t pixels = fields.integer("width").value_or(0) * fields.integer("height").value_or(0);
  if (pixels <= entry.max_pixels) return std::nullopt;
  return invalid_argument("width × height is " + std::to_string(pixels) + " pixels; model '" + entry.name +
                              "' generates at most " + std::to_string(entry.max_pixels),
                          "width");
}

std::optional<Error> check_last_seed(const JobSpec& spec) {
  if (*spec.seed <= kMaxSeed - (*spec.n - 1)) return std::nullopt;
  return invalid_argument("seed is " + std::to_string(*spec.seed) + " and n is " + std::to_string(*spec.n) +
                              ", but image i has seed + i, which must not exceed " + std::to_string(kMaxSeed),
                          "seed");
}

std::optional<Error> check_pause(const JobSpec& spec) {
  const int steps = steps_of(spec.fields);
  if (spec.pause_after_steps.value_or(0) < steps || !spec.fields.has("num_inference_steps")) return std::nullopt;
  return invalid_argument("pause_after_steps is " + std::to_string(*spec.pause_after_steps) + ", but the job runs " +
                              std::to_string(steps) + " steps; it must be less",
                          "pause_after_steps");
}

std::optional<Error> check_format(const JobSpec& spec, const ModelEntry& entry) {
  const FormatRow& format = row_of(*spec.output_format);
  if (entry.media != MediaKind::kVideo && !format.holds_images) {
    return invalid_argument("output_format is " + std::string(format.name) + ", but model '" + entry.name +
                                "' generates images; use png, jpeg or webp",
                            "output_format");
  }
  if (format.holds_videos || spec.fields.integer("frames").value_or(1) == 1) return std::nullopt;
  return invalid_argument("output_format is " + std::string(format.name) +
                              ", which supports only one frame; use mp4 or webp, or set frames to 1",
                          "output_format");
}

std::optional<Error> pin_adapters(JobSpec& spec, const ModelEntry& entry, const AdapterResolver& resolve) {
  for (std::size_t i = 0; i < spec.loras.size(); ++i) {
    LoraUse& use = spec.loras[i];
    const std::string at = "loras[" + std::to_string(i) + "].";
    if (!resolve) {
      if (!use.sha256.empty()) continue;
      return invalid_argument(at + "sha256 is missing; a complete spec must have the digest of each adapter",
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

// Below 2^48: a reader in JavaScript gets the exact number.
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
  if (!spec.seed) spec.seed = random_seed();
  if (!spec.output_format) spec.output_format = default_format(entry.media == MediaKind::kVideo);
  if (!spec.output_compression) spec.output_compression = 100;
  if (auto error = apply_preset(spec, entry)) return *error;
  if (auto error = check_experts(spec, entry)) return *error;
  if (auto error = complete_fields(spec.fields, entry)) return *error;
  if (auto error = check_last_seed(spec)) return *error;
  if (auto error = check_pause(spec)) return *error;
  if (auto error = check_format(spec, entry)) return *error;
  if (auto error = pin_adapters(spec, entry, resolve)) return *error;
  return spec;
}

void inherit(JobSpec& spec, const JobSpec& from, int unit) {
  if (spec.model.empty()) spec.model = from.model;
  if (!spec.seed) spec.seed = *from.seed + unit;
  if (spec.loras.empty()) spec.loras = from.loras;
  for (const Field field : kFields) {
    if (field.row().use != FieldUse::kGeneration || spec.fields.has(field)) continue;
    if (const auto* value = from.fields.find(field)) spec.fields.set(field, *value);
  }
}

std::optional<Error> check_branch(const JobSpec& spec, const JobSpec& from) {
  static constexpr Field kFree[] = {"negative_prompt", "guidance_scale",    "guidance_scale_2",
                                    "true_cfg_scale",  "cfg_normalization", "cfg_truncation"};
  const auto differs = [&](std::string_view name) {
    return invalid_argument(std::string(name) + " differs from that of job '" + spec.resume_from +
                                "'; only the prompts, scales of guidance and adapters of a job with resume_from may",
                            std::string(name));
  };
  if (*spec.n != 1)
    return invalid_argument("n is " + std::to_string(*spec.n) + "; a job with resume_from draws 1 image or video", "n");
  if (!spec.preset.empty())
    return invalid_argument("preset cannot be combined with resume_from; name the fields that differ", "preset");
  for (const Field field : kFields) {
    if (field.row().use != FieldUse::kGeneration || std::ranges::find(kFree, field) != std::end(kFree)) continue;
    const auto *here = spec.fields.find(field), *there = from.fields.find(field);
    if ((here == nullptr) != (there == nullptr) || (here && *here != *there)) return differs(field.name());
  }
  if (from.fields.real("cache").value_or(0) > 0)
    return invalid_argument("job '" + spec.resume_from +
                                "' skips blocks (cache), and its checkpoint fits its own prompt only; pause a job "
                                "whose cache is off",
                            "resume_from");
  return std::nullopt;
}

}  // namespace ditfleet::job
