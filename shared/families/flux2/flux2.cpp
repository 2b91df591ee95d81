#include "shared/families/flux2/flux2.h"

#include "shared/media/sizes.h"

namespace ditfleet::families {
namespace {

// Flux2Pipeline's folders (FLUX.2 dev) are refused with the reason.
constexpr std::string_view kClassNames[] = {"Flux2KleinPipeline", "Flux2KleinKVPipeline", "Flux2Pipeline"};
constexpr std::string_view kAdapterParts[] = {"double_blocks", "single_blocks",      "attn_to_",         "attn_add_",
                                              "ff_linear_",    "ff_context_linear_", "stream_modulation"};
constexpr std::int64_t kLargestSide = 2048, kDefaultLatentSide = 128, kMostSteps = 200, kMostTextTokens = 512;

job::GuidanceKind guidance_of(const job::FieldValues& fields) {
  return fields.real("guidance_scale").value_or(0) > 1 ? job::GuidanceKind::kTrueCfg : job::GuidanceKind::kNone;
}

// The first picture's own size, at most a megapixel.
std::pair<int, int> size_of_image(int width, int height, int multiple_of) {
  const media::Size size = media::klein_sizes({width, height}, multiple_of).cropped;
  return {size.width, size.height};
}

Result<void> read(job::ModelEntry& entry) {
  const std::string path = entry.dir + "/model_index.json";
  const auto index = read_json_object(path);
  if (!index) return index.error();
  const auto text_of = [&](const char* key) {
    const json::value* value = index->if_contains(key);
    return value ? json::serialize(*value) : std::string("missing");
  };
  if (const std::string encoder = text_of("text_encoder");
      encoder.find("\"Qwen3") == std::string::npos || !text_of("_class_name").starts_with("\"Flux2Klein"))
    return corrupt(path, "has _class_name " + text_of("_class_name") + " and text_encoder " + encoder +
                             "; FLUX.2 dev, which reads prompts with Mistral, is not supported: it must be "
                             "Flux2KleinPipeline with Qwen3ForCausalLM");
  const auto factor = read_vae_factor(entry.dir);
  if (!factor) return factor.error();
  const bool distilled = flag_of(*index, "is_distilled") || text_of("_class_name") == "\"Flux2KleinKVPipeline\"";

  if (!distilled) entry.guidance = guidance_of;
  describe_sides(entry, *factor, kLargestSide, kDefaultLatentSide * *factor);
  entry.apply("num_inference_steps").high = kMostSteps;
  entry.apply("guidance_scale");  // accepted by a distilled model, too, without effect
  entry.apply("image");
  entry.free_width = entry.free_height = static_cast<int>(kDefaultLatentSide * *factor);
  entry.size_of_image = size_of_image;
  entry.least_image_side = media::kLeastKleinSide;
  entry.most_image_ratio = media::kMostKleinRatio;
  entry.pixels_per_image = media::kMegapixel;
  entry.apply("max_sequence_length").high = kMostTextTokens;
  entry.defaults.set("num_inference_steps", distilled ? 4 : 50);
  entry.defaults.set("guidance_scale", distilled ? 1.0 : 4.0);
  entry.defaults.set("max_sequence_length", kMostTextTokens);
  return {};
}

}  // namespace

bool caches_references(std::string_view class_name) { return class_name == "Flux2KleinKVPipeline"; }

const Family kFlux2 = {.name = "flux2", .class_names = kClassNames, .adapter_parts = kAdapterParts, .read = read};

}  // namespace ditfleet::families
