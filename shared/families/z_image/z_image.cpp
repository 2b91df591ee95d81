#include "shared/families/z_image/z_image.h"

#include <algorithm>
#include <cmath>

namespace ditfleet::families {
namespace {

constexpr std::string_view kClassNames[] = {"ZImagePipeline"};
constexpr std::string_view kAdapterParts[] = {"attention_to_",  "attention_qkv",   "attention_out",   "feed_forward_w",
                                              "noise_refiner_", "context_refiner", "adaLN_modulation"};
constexpr std::int64_t kLargestSide = 2048, kDefaultSide = 1024;
constexpr std::int64_t kMostSteps = 200, kTextTokens = 512, kMostTextTokens = 1024;
constexpr double kTurboShift = 3;  // of the published scheduler; Z-Image's own is larger

// Above 0, not above 1.
job::GuidanceKind guidance_of(const job::FieldValues& fields) {
  return fields.real("guidance_scale").value_or(0) > 0 ? job::GuidanceKind::kTrueCfg : job::GuidanceKind::kNone;
}

// Entry `axis` of the transformer's axes_lens: positions along it.
std::int64_t positions(const json::object& transformer, std::size_t axis) {
  constexpr std::int64_t kDefaults[] = {1024, 512, 512};
  const json::value* lengths = transformer.if_contains("axes_lens");
  if (!lengths || !lengths->is_array() || lengths->get_array().size() != 3) return kDefaults[axis];
  const json::value& length = lengths->get_array()[axis];
  return length.is_int64() ? length.get_int64() : kDefaults[axis];
}

Result<void> read(job::ModelEntry& entry) {
  const auto factor = read_vae_factor(entry.dir);
  if (!factor) return factor.error();
  const auto transformer = read_json_object(entry.dir + "/transformer/config.json");
  if (!transformer) return transformer.error();
  const auto scheduler = read_json_object(entry.dir + "/scheduler/scheduler_config.json");
  if (!scheduler) return scheduler.error();
  const json::value* shift = scheduler->if_contains("shift");
  const bool turbo = shift && shift->is_number() && std::abs(shift->to_number<double>() - kTurboShift) < 1e-9 &&
                     !flag_of(*scheduler, "use_dynamic_shifting");

  entry.guidance = guidance_of;
  describe_sides(entry, *factor, kLargestSide, kDefaultSide);
  for (const auto& [field, axis] : {std::pair(job::Field("height"), 1), {job::Field("width"), 2}}) {
    std::int64_t& most = entry.fields.at(field).high;
    most = std::min(most, positions(*transformer, static_cast<std::size_t>(axis)) * 2 * *factor);
    entry.defaults.set(field, std::min(kDefaultSide, most));
  }
  entry.apply("negative_prompt");
  entry.apply("num_inference_steps").high = kMostSteps;
  entry.apply("guidance_scale");
  entry.apply("cfg_normalization");
  entry.apply("cfg_truncation");
  entry.apply("max_sequence_length").high = kMostTextTokens;
  entry.defaults.set("num_inference_steps", turbo ? 8 : 50);
  entry.defaults.set("guidance_scale", turbo ? 0.0 : 5.0);
  entry.defaults.set("cfg_normalization", 0.0);
  entry.defaults.set("cfg_truncation", 1.0);
  entry.defaults.set("max_sequence_length", kTextTokens);
  return {};
}

}  // namespace

const Family kZImage = {.name = "z_image", .class_names = kClassNames, .adapter_parts = kAdapterParts, .read = read};

}  // namespace ditfleet::families
