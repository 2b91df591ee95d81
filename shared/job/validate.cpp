#include "shared/job/validate.h"

#include <sodium.h>

#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/sha256.h"
#include "shared/job/lora_flag.h"
#include "shared/job/spec_fields.h"

namespace ditfleet::job {
namespace {

// The service's absolute limits; a model's own (catalogue.h) are narrower.
constexpr std::int64_t kMaxImages = 64;
constexpr std::int64_t kMaxSide = 16384;
constexpr std::int64_t kMaxSteps = 1000;
constexpr std::int64_t kMaxSequenceLength = 512;  // T5's, as diffusers' FluxPipeline has it
constexpr double kMaxScale = 100.0;               // of guidance
constexpr std::int64_t kMaxDeadlineMs = 7LL * 24 * 3600 * 1000;
constexpr std::size_t kMaxLoras = 16;
constexpr std::size_t kMaxNameBytes = 128;
constexpr std::size_t kMaxUserBytes = 512;
constexpr std::int64_t kMaxSeed = std::numeric_limits<std::int64_t>::max();

const std::vector<std::string> kFields = {"model",
                                          "prompt",
                                          "negative_prompt",
                                          "n",
                                          "width",
                                          "height",
                                          "size",
                                          "seed",
                                          "num_inference_steps",
                                          "priority",
                                          "guidance_scale",
                                          "true_cfg_scale",
                                          "max_sequence_length",
                                          "loras",
                                          "deadline_ms",
                                          "user",
                                          "output_format",
                                          "output_compression",
                                          "partial_images"};

constexpr std::array<std::string_view, 3> kFormats = {"png", "jpeg", "webp"};

template <class Int>
std::optional<Int> narrow(std::optional<std::int64_t> value) {
  if (!value) return std::nullopt;
  return static_cast<Int>(*value);
}

void read_size(Fields& fields, JobSpec& spec) {
  const auto size = fields.text("size", 32);
  if (!size || *size == "auto") return;
  if (spec.width || spec.height) {
    fields.fail("size", "is given beside width or height; give one or the other");
    return;
  }
  int width = 0, height = 0;
  const char* end = size->data() + size->size();
  const auto w = std::from_chars(size->data(), end, width);
  const bool middle = w.ec == std::errc() && w.ptr != end && *w.ptr == 'x';
  const auto h = middle ? std::from_chars(w.ptr + 1, end, height) : w;
  if (!middle || h.ec != std::errc() || h.ptr != end || width < 1 || height < 1 || width > kMaxSide ||
      height > kMaxSide) {
    fields.fail("size", "is '" + *size + "'; it must be WIDTHxHEIGHT in pixels, as 1024x1024, each from 1 to " +
                            std::to_string(kMaxSide));
    return;
  }
  spec.width = width;
  spec.height = height;
}

void read_loras(Fields& fields, JobSpec& spec) {
  const json::value* v = fields.find("loras");
  if (!v || !fields.ok()) return;
  if (!v->is_array())
    return fields.fail("loras", "is " + std::string(kind_name(*v)) + "; it must be an array of {\"name\", \"scale\"}");
  const json::array& list = v->get_array();
  if (list.size() > kMaxLoras)
    return fields.fail("loras", "has " + std::to_string(list.size()) + " entries; at most " +
                                    std::to_string(kMaxLoras) + " are allowed");
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string at = "loras[" + std::to_string(i) + "]";
    if (!list[i].is_object())
      return fields.fail(at, "is " + std::string(kind_name(list[i])) + "; it must be {\"name\", \"scale\"}");
    Fields entry(list[i].get_object(), at + ".");
    LoraUse use;
    entry.refuse_unknown(std::vector<std::string>{"name", "scale", "sha256"});
    use.name = entry.text("name", kMaxNameBytes).value_or("");
    if (entry.ok() && use.name.empty()) entry.fail("name", "is missing; it names the adapter");
    use.scale = entry.real("scale", -kMaxLoraScale, kMaxLoraScale).value_or(1.0);
    use.sha256 = entry.text("sha256", kMaxNameBytes).value_or("");
    if (entry.ok() && !use.sha256.empty() && !is_sha256_hex(use.sha256)) {
      entry.fail("sha256", "is '" + use.sha256 + "'; it must be 64 lower-case hexadecimal digits, or left out");
    }
    if (!entry.ok()) return fields.fail(*entry.error());
    spec.loras.push_back(std::move(use));
  }
}

void read_format(Fields& fields, JobSpec& spec) {
  const auto format = fields.text("output_format", kMaxNameBytes);
  if (!format) return;
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    if (*format == kFormats[i]) {
      spec.output_format = static_cast<OutputFormat>(i);
      return;
    }
  }
  fields.fail("output_format", "is '" + *format + "'; it must be png, jpeg or webp");
}

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

std::optional<Error> check_side(const char* name, int side, const ModelEntry& entry) {
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
  if (auto error = check_side("width", *spec.width, entry)) return error;
  if (auto error = check_side("height", *spec.height, entry)) return error;
  const long pixels = static_cast<long>(*spec.width) * *spec.height;
  if (pixels > entry.max_pixels) {
    return invalid_argument("width × height is " + std::to_string(pixels) + " pixels; model '" + entry.name +
                                "' makes at most " + std::to_string(entry.max_pixels),
                            "width");
  }
  if (*spec.num_inference_steps > entry.max_steps) {
    return invalid_argument("num_inference_steps is " + std::to_string(*spec.num_inference_steps) + "; model '" +
                                entry.name + "' takes 1 to " + std::to_string(entry.max_steps),
                            "num_inference_steps");
  }
  if (*spec.max_sequence_length > entry.max_sequence_length_limit) {
    return invalid_argument("max_sequence_length is " + std::to_string(*spec.max_sequence_length) + "; model '" +
                                entry.name + "' takes 1 to " + std::to_string(entry.max_sequence_length_limit),
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

Result<JobSpec> parse_spec(std::string_view json_text) {
  if (json_text.size() > kMaxStoredSpecBytes) {
    return Error{Code::kPayloadTooLarge,
                 "the job has " + std::to_string(json_text.size()) + " bytes; at most " +
                     std::to_string(kMaxStoredSpecBytes) + " are allowed",
                 {}};
  }
  const Result<json::value> body = parse_json(json_text);
  if (!body) return body.error();
  return parse_spec(*body);
}

Result<JobSpec> parse_spec(const json::value& body) {
  if (!body.is_object()) {
    return invalid_argument("the job is " + std::string(kind_name(body)) +
                            "; it must be a JSON object such as {\"prompt\": \"a red circle\"}");
  }
  Fields fields(body.get_object(), "");
  JobSpec spec;
  fields.refuse_unknown(kFields);
  spec.model = fields.text("model", kMaxNameBytes).value_or("");
  auto prompt = fields.text("prompt");
  if (fields.ok() && !prompt) fields.fail("prompt", "is missing; it may be empty, but must be there");
  spec.prompt = prompt.value_or("");
  spec.negative_prompt = fields.text("negative_prompt");
  spec.n = narrow<int>(fields.integer("n", 1, kMaxImages));
  spec.width = narrow<int>(fields.integer("width", 1, kMaxSide));
  spec.height = narrow<int>(fields.integer("height", 1, kMaxSide));
  read_size(fields, spec);
  spec.num_inference_steps = narrow<int>(fields.integer("num_inference_steps", 1, kMaxSteps));
  spec.guidance_scale = fields.real("guidance_scale", 0.0, kMaxScale);
  spec.true_cfg_scale = fields.real("true_cfg_scale", 0.0, kMaxScale);
  spec.max_sequence_length = narrow<int>(fields.integer("max_sequence_length", 1, kMaxSequenceLength));
  spec.seed = fields.integer("seed", 0, kMaxSeed);
  read_loras(fields, spec);
  spec.priority = narrow<int>(fields.integer("priority", -100, 100)).value_or(0);
  spec.deadline_ms = fields.integer("deadline_ms", 1, kMaxDeadlineMs);
  read_format(fields, spec);
  spec.output_compression = narrow<int>(fields.integer("output_compression", 0, 100));
  spec.partial_images = narrow<int>(fields.integer("partial_images", 0, 3)).value_or(0);
  spec.user = fields.text("user", kMaxUserBytes).value_or("");
  if (!fields.ok()) return *fields.error();
  return spec;
}

Result<JobSpec> complete_spec(JobSpec spec, const Catalogue& catalogue, const AdapterResolver& resolve) {
  const auto found = find_model(spec, catalogue);
  if (!found) return found.error();
  const ModelEntry& entry = **found;
  if (!spec.n) spec.n = 1;
  if (!spec.width) spec.width = entry.width;
  if (!spec.height) spec.height = entry.height;
  if (!spec.num_inference_steps) spec.num_inference_steps = entry.num_inference_steps;
  if (!spec.guidance_scale) spec.guidance_scale = entry.guidance_scale;
  if (!spec.true_cfg_scale) spec.true_cfg_scale = entry.true_cfg_scale;
  // Stays unset without a default: to diffusers an absent negative prompt and "" differ (true CFG).
  if (!spec.negative_prompt && entry.has_negative_prompt) spec.negative_prompt = entry.negative_prompt;
  if (!spec.max_sequence_length) spec.max_sequence_length = entry.max_sequence_length;
  if (!spec.seed) spec.seed = random_seed();
  if (!spec.output_compression) spec.output_compression = 100;
  if (auto error = check_against(spec, entry)) return *error;
  if (auto error = pin_adapters(spec, entry, resolve)) return *error;
  return spec;
}

std::string to_json(const JobSpec& spec) {
  std::string out = "{";
  const auto add = [&](std::string_view name, const std::string& value) {
    if (out.size() > 1) out += ',';
    out.append("\"").append(name).append("\":").append(value);
  };
  const auto quoted = [](std::string_view text) {
    return json::serialize(json::string_view(text.data(), text.size()));
  };
  const auto add_integer = [&](std::string_view name, const auto& value) {
    if (value) add(name, std::to_string(*value));
  };
  const auto add_real = [&](std::string_view name, const std::optional<double>& value) {
    if (value) add(name, number_text(*value));
  };
  if (!spec.model.empty()) add("model", quoted(spec.model));
  add("prompt", quoted(spec.prompt));
  if (spec.negative_prompt) add("negative_prompt", quoted(*spec.negative_prompt));
  add_integer("n", spec.n);
  add_integer("width", spec.width);
  add_integer("height", spec.height);
  add_integer("num_inference_steps", spec.num_inference_steps);
  add_real("guidance_scale", spec.guidance_scale);
  add_real("true_cfg_scale", spec.true_cfg_scale);
  add_integer("max_sequence_length", spec.max_sequence_length);
  add_integer("seed", spec.seed);
  if (!spec.loras.empty()) {
    std::string list;
    for (const LoraUse& use : spec.loras) {
      list += (list.empty() ? "" : ",") +
              ("{\"name\":" + quoted(use.name) + ",\"scale\":" + number_text(use.scale) +
               (use.sha256.empty() ? std::string() : ",\"sha256\":" + quoted(use.sha256)) + "}");
    }
    add("loras", "[" + list + "]");
  }
  add("priority", std::to_string(spec.priority));
  add_integer("deadline_ms", spec.deadline_ms);
  add("output_format", quoted(kFormats[static_cast<std::size_t>(spec.output_format)]));
  add_integer("output_compression", spec.output_compression);
  add("partial_images", std::to_string(spec.partial_images));
  if (!spec.user.empty()) add("user", quoted(spec.user));
  return out + "}";
}

}  // namespace ditfleet::job
