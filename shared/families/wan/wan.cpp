#include "shared/families/wan/wan.h"

#include <algorithm>

namespace ditfleet::families {
namespace {

using job::Field;

constexpr std::string_view kImageToVideo = "WanImageToVideoPipeline";
constexpr std::string_view kClassNames[] = {"WanPipeline", kImageToVideo};
constexpr std::string_view kAdapterParts[] = {"self_attn", "cross_attn", "attn1", "attn2"};
constexpr int kFramesPerLatent = 4;
constexpr std::int64_t kLargestSide = 2048, kMostFrames = 257, kMostSteps = 200, kMostTextTokens = 512;
constexpr int kMostClipRatio = 200;  // CLIP resizes a picture's shorter side to its own before it crops the longer

// WanPipeline runs classifier-free guidance whenever the first scale is above one; the negative prompt is "" by
// default.
job::GuidanceKind guidance_of(const job::FieldValues& fields) {
  return fields.real("guidance_scale").value_or(1.0) > 1.0 ? job::GuidanceKind::kTrueCfg : job::GuidanceKind::kNone;
}

Result<void> read(job::ModelEntry& entry) {
  const std::string index_path = entry.dir + "/model_index.json";
  const auto index = read_json_object(index_path);
  if (!index) return index.error();
  const bool expand = flag_of(*index, "expand_timesteps");  // Wan 2.2 TI2V-5B
  const json::value* boundary = index->if_contains("boundary_ratio");
  const bool experts = boundary && !boundary->is_null();
  const json::value* class_name = index->if_contains("_class_name");
  const bool from_image = !expand && class_name && class_name->is_string() && class_name->get_string() == kImageToVideo;

  std::int64_t clip_images = 0;  // that CLIP reads (Wan 2.1 image to video)
  if (const json::value* encoder = index->if_contains("image_encoder"); from_image && encoder && encoder->is_array() &&
                                                                        encoder->get_array().size() == 2 &&
                                                                        encoder->get_array()[1].is_string()) {
    const auto transformer = read_json_object(entry.dir + "/transformer/config.json");
    if (!transformer) return transformer.error();
    const auto has = [&](const char* field) {
      const json::value* value = transformer->if_contains(field);
      return value && !value->is_null();
    };
    if (has("image_dim")) clip_images = has("pos_embed_seq_len") ? 2 : 1;
  }

  const std::int64_t side_multiple = expand ? 32 : 16;  // the VAE's factor times the patch
  const int width = expand ? 1280 : 832, height = expand ? 704 : 480;

  entry.media = job::MediaKind::kVideo;
  entry.experts = experts;
  entry.guidance = guidance_of;
  entry.max_pixels = kLargestSide * kLargestSide;
  entry.pixels_per_token = side_multiple * side_multiple;
  for (const Field side : {Field("width"), Field("height")})
    entry.apply(side) = {.low = side_multiple, .high = kLargestSide, .multiple_of = side_multiple};
  entry.apply("negative_prompt");
  // The first latent frame is one frame, each later one four.
  entry.apply("frames") = {.low = 1, .high = kMostFrames, .multiple_of = kFramesPerLatent, .remainder = 1};
  entry.apply("fps");
  entry.apply("num_inference_steps").high = kMostSteps;
  entry.apply("guidance_scale");
  if (experts) entry.apply("guidance_scale_2");
  for (const Field field : {Field("flow_shift"), Field("sampler"), Field("sigmas")}) entry.apply(field);
  entry.apply("cache");
  // In diffusers, blocks with CLIP find the text by this number of tokens.
  entry.apply("max_sequence_length") = {.low = clip_images > 0 ? kMostTextTokens : 1, .high = kMostTextTokens};
  // The pipelines' defaults, and Wan's frame rate; those of TI2V-5B are its authors'. An image gives the size, within
  // the default area.
  if (from_image || expand) {
    // The first frame and, in models of image to video, the last one. A model with CLIP takes one or needs both.
    entry.apply("image") = {.low = std::max<std::int64_t>(clip_images, 1),
                            .high = clip_images > 0 ? clip_images
                                    : from_image    ? 2
                                                    : 1,
                            .required = from_image};
    entry.free_width = width;
    entry.free_height = height;
    if (clip_images > 0) entry.most_image_ratio = kMostClipRatio;
  }
  if (!from_image) {
    entry.defaults.set("width", std::int64_t{width});
    entry.defaults.set("height", std::int64_t{height});
  }
  entry.defaults.set("frames", std::int64_t{expand ? 121 : 81});
  entry.defaults.set("fps", expand ? 24.0 : 16.0);
  entry.defaults.set("num_inference_steps", std::int64_t{50});
  entry.defaults.set("guidance_scale", 5.0);
  entry.defaults.set("max_sequence_length", kMostTextTokens);
  return {};
}

}  // namespace

const Family kWan = {.name = "wan", .class_names = kClassNames, .adapter_parts = kAdapterParts, .read = read};

}  // namespace ditfleet::families
