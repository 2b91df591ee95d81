#include "shared/families/flux/flux.h"

namespace ditfleet::families {
namespace {

// Folders of all have the same parts. Image to image and inpainting work with any but Kontext's.
constexpr std::string_view kClassNames[] = {"FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline",
                                            "FluxKontextPipeline", "FluxKontextInpaintPipeline"};
constexpr std::string_view kAdapterParts[] = {"double_blocks", "single_blocks", "single_transformer_blocks",
                                              "attn_to_",      "attn_add_",     "norm1_context",
                                              "ff_net",        "ff_context_net"};
constexpr std::int64_t kLargestSide = 2048;
constexpr std::int64_t kMostSteps = 200, kMostTextTokens = 512;
constexpr std::int64_t kKontextPixels = 1 << 20;
constexpr std::int64_t kDefaultLatentSide = 128;  // FluxPipeline's default_sample_size

// FluxPipeline runs true CFG only with both a scale above one and a negative prompt.
job::GuidanceKind guidance_of(const job::FieldValues& fields) {
  const bool true_cfg = fields.real("true_cfg_scale").value_or(1.0) > 1.0 && fields.has("negative_prompt");
  if (true_cfg) return job::GuidanceKind::kTrueCfg;
  return fields.has("guidance_scale") ? job::GuidanceKind::kEmbedded : job::GuidanceKind::kNone;
}

Result<void> read(job::ModelEntry& entry) {
  const auto factor = read_vae_factor(entry.dir);
  if (!factor) return factor.error();
  const auto transformer = read_json_object(entry.dir + "/transformer/config.json");
  if (!transformer) return transformer.error();
  const auto scheduler = read_json_object(entry.dir + "/scheduler/scheduler_config.json");
  if (!scheduler) return scheduler.error();
  const auto index = read_json_object(entry.dir + "/model_index.json");
  if (!index) return index.error();
  const json::value* class_name = index->if_contains("_class_name");
  const bool kontext = class_name && class_name->is_string() && is_flux_kontext(class_name->get_string());
  const bool guidance_distilled = flag_of(*transformer, "guidance_embeds");
  const bool few_steps = !guidance_distilled && !flag_of(*scheduler, "use_dynamic_shifting");  // "schnell"

  entry.guidance = guidance_of;
  describe_sides(entry, *factor, kLargestSide, kDefaultLatentSide * *factor);
  entry.apply("negative_prompt");
  entry.apply("num_inference_steps").high = kMostSteps;
  entry.apply("guidance_scale");  // accepted by a model without guidance embeddings, too, without effect
  entry.apply("true_cfg_scale");
  entry.apply("cache");
  entry.apply("image") = {.low = 1, .high = 1};
  entry.free_width = entry.free_height = static_cast<int>(kDefaultLatentSide * *factor);
  if (kontext) {
    entry.apply("auto_resize");
    entry.pixels_per_image = kKontextPixels;
    entry.least_image_side = static_cast<int>(2 * *factor);
  } else {
    entry.apply("mask");
    entry.apply("strength");
    entry.defaults.set("strength", 0.6);
  }
  entry.apply("max_sequence_length").high = kMostTextTokens;
  entry.defaults.set("num_inference_steps", few_steps ? 4 : 28);
  entry.defaults.set("guidance_scale", guidance_distilled ? 3.5 : 0.0);
  entry.defaults.set("true_cfg_scale", 1.0);
  entry.defaults.set("max_sequence_length", few_steps ? 256 : 512);
  return {};
}

}  // namespace

bool is_flux_kontext(std::string_view class_name) {
  return class_name == "FluxKontextPipeline" || class_name == "FluxKontextInpaintPipeline";
}

const Family kFlux = {.name = "flux", .class_names = kClassNames, .adapter_parts = kAdapterParts, .read = read};

}  // namespace ditfleet::families
