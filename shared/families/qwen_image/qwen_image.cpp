#include "shared/families/qwen_image/qwen_image.h"

#include <algorithm>
#include <iterator>

#include "shared/media/sizes.h"

namespace ditfleet::families {
namespace {

// In the order of QwenImageKind.
constexpr std::string_view kClassNames[] = {"QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"};
constexpr std::string_view kAdapterParts[] = {"attn_to_",    "attn_add_", "img_mlp_net",
                                              "txt_mlp_net", "img_mod_1", "txt_mod_1"};
constexpr std::int64_t kLargestSide = 2048, kDefaultSide = 1024;
constexpr std::int64_t kMostSteps = 200, kTextTokens = 512, kMostTextTokens = 1024;

// QwenImagePipeline runs true CFG only with both a scale above one and a negative prompt.
job::GuidanceKind guidance_of(const job::FieldValues& fields) {
  const bool on = fields.real("true_cfg_scale").value_or(1) > 1 && fields.has("negative_prompt");
  return on ? job::GuidanceKind::kTrueCfg : job::GuidanceKind::kNone;
}

// A megapixel in the last picture's aspect ratio.
std::pair<int, int> size_of_image(int width, int height, int multiple_of) {
  const media::Size size = media::floored(media::qwen_size({width, height}), multiple_of);
  return {size.width, size.height};
}

Result<void> read(job::ModelEntry& entry) {
  const auto factor = read_vae_factor(entry.dir);
  if (!factor) return factor.error();
  const auto scheduler = read_json_object(entry.dir + "/scheduler/scheduler_config.json");
  if (!scheduler) return scheduler.error();
  const auto index = read_json_object(entry.dir + "/model_index.json");
  if (!index) return index.error();
  const json::value* class_name = index->if_contains("_class_name");
  const QwenImageKind kind =
      qwen_image_kind(class_name && class_name->is_string() ? std::string_view(class_name->get_string()) : "");
  const json::value* terminal = scheduler->if_contains("shift_terminal");

  entry.guidance = guidance_of;
  describe_sides(entry, *factor, kLargestSide, kDefaultSide);
  entry.apply("negative_prompt");
  // One step would divide 0 by 0.
  entry.apply("num_inference_steps") = {.low = terminal && !terminal->is_null() ? 2 : 1, .high = kMostSteps};
  entry.apply("guidance_scale");  // without effect, as in diffusers
  entry.apply("true_cfg_scale");
  entry.apply("flow_shift");
  entry.defaults.set("num_inference_steps", 50);
  entry.defaults.set("true_cfg_scale", 4.0);
  if (kind == QwenImageKind::kText) {
    entry.apply("max_sequence_length").high = kMostTextTokens;
    entry.defaults.set("max_sequence_length", kTextTokens);
    return {};
  }
  entry.apply("image") = {.low = 1, .high = kind == QwenImageKind::kEdit ? 1 : kMostQwenPictures, .required = true};
  entry.free_width = entry.free_height = static_cast<int>(kDefaultSide);
  entry.size_of_image = size_of_image;
  entry.sized_by_last_image = true;
  entry.grid_positions = false;
  entry.pixels_per_image = media::kMegapixel;
  return {};
}

}  // namespace

QwenImageKind qwen_image_kind(std::string_view class_name) {
  const auto found = std::find(std::begin(kClassNames), std::end(kClassNames), class_name);
  return found == std::end(kClassNames) ? QwenImageKind::kText
                                        : static_cast<QwenImageKind>(found - std::begin(kClassNames));
}

const Family kQwenImage = {
    .name = "qwen_image", .class_names = kClassNames, .adapter_parts = kAdapterParts, .read = read};

}  // namespace ditfleet::families
