#include "pipeline/families/wan/folder.h"

#include <chrono>
#include <utility>

#include "pipeline/device/failure.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

// Checks that a part has the class that this pipeline computes. Returns false if an optional part is missing or
// [null, null].
bool has_part(const ConfigFile& index, const char* part, std::string_view wanted, bool optional = false) {
  const json::value* entry = index.fields().if_contains(part);
  const json::array* pair = entry ? entry->if_array() : nullptr;
  if (optional && (!entry || entry->is_null() || (pair && pair->size() == 2 && (*pair)[1].is_null()))) return false;
  const json::string* name = pair && pair->size() == 2 ? (*pair)[1].if_string() : nullptr;
  if (!name || *name != wanted)
    index.refuse(std::string(part) + " is " + (entry ? excerpt(json::serialize(*entry), 100) : "missing") +
                 "; it must be [LIBRARY, \"" + std::string(wanted) + "\"]");
  return true;
}

void must_match(const std::string& dir, std::string_view what, std::int64_t a, std::string_view other, std::int64_t b) {
  if (a != b)
    fail(Code::kDataCorrupt, dir + ": " + std::string(what) + " is " + std::to_string(a) + ", but " +
                                 std::string(other) + " is " + std::to_string(b) +
                                 "; they must be equal in the parts of one model");
}

}  // namespace

int WanFolder::size_multiple() const { return static_cast<int>(vae.config().spatial_factor() * 2); }

std::map<std::string, std::map<std::string, int>> WanFolder::linears() const {
  std::map<std::string, std::map<std::string, int>> all{{"transformer", transformer.linears()},
                                                        {"text_encoder", text.linears()}};
  if (transformer_2) all["transformer_2"] = transformer_2->linears();
  return all;
}

void check_wan_quantize(const ModelSource& source) {
  check_quantize(source, {{"transformer", {"fp8", "nf4"}}, {"text_encoder", {"nf4"}}});
}

WanFolder load_wan_folder(const ModelSource& source, Placement placement, std::shared_ptr<region::RegionHost> regions,
                          std::int64_t adapter_rank) {
  const std::string& dir = source.dir;
  if (!source.transformer.empty())
    fail(Code::kInvalidArgument, "a Wan model takes no other file for its transformer; leave transformer out",
         "transformer");
  if (source.vae_dtype != "" && source.vae_dtype != "fp32" && source.vae_dtype != "bf16")
    fail(Code::kInvalidArgument, "vae_dtype is \"" + source.vae_dtype + "\"; it must be fp32 or bf16", "vae_dtype");
  check_wan_quantize(source);
  const ConfigFile index(dir + "/model_index.json");
  const bool from_image = index.text("_class_name", "") == "WanImageToVideoPipeline";
  if (index.boolean("expand_timesteps", false))
    index.refuse("expand_timesteps is true (Wan 2.2 TI2V-5B), which is not supported yet");
  if (has_part(index, "image_encoder", "CLIPVisionModel", /*optional=*/true))
    index.refuse("image_encoder is set, but models conditioned on CLIP (Wan 2.1 image to video) are not supported");
  has_part(index, "text_encoder", "UMT5EncoderModel");
  has_part(index, "transformer", "WanTransformer3DModel");
  has_part(index, "vae", "AutoencoderKLWan");
  std::optional<WanConfig> first;
  const bool second = has_part(index, "transformer_2", "WanTransformer3DModel", /*optional=*/true);
  const std::optional<double> boundary = index.optional_number("boundary_ratio");
  if (second != boundary.has_value())
    index.refuse(second ? "transformer_2 needs a boundary_ratio, such as 0.875"
                        : "boundary_ratio needs a transformer_2; set it to null for a model with one transformer");
  if (boundary && !(*boundary > 0 && *boundary < 1)) index.refuse("boundary_ratio must be between 0 and 1");

  const auto scheduler = read_flow_scheduler_config(ConfigFile(dir + "/scheduler/scheduler_config.json"));
  const auto umt5 = read_t5_config(ConfigFile(dir + "/text_encoder/config.json"));
  const auto vae = read_video_vae_config(ConfigFile(dir + "/vae/config.json"));
  for (const char* name : {"transformer", "transformer_2"}) {
    if (!second && std::string_view(name) == "transformer_2") continue;
    const auto wan = read_wan_config(ConfigFile(dir + "/" + name + "/config.json"));
    must_match(dir, std::string(name) + "'s text_dim", wan.text_dim, "text_encoder's d_model", umt5.d_model);
    if (from_image)
      must_match(dir, std::string(name) + "'s in_channels", wan.in_channels, "twice vae's z_dim plus 4",
                 2 * vae.z_dim + VideoVaeConfig::kTemporalFactor);
    else
      must_match(dir, std::string(name) + "'s in_channels", wan.in_channels, "vae's z_dim", vae.z_dim);
    must_match(dir, std::string(name) + "'s out_channels", wan.out_channels, "vae's z_dim", vae.z_dim);
    if (!first) first = wan;
    // Adapters are read for both transformers at once.
    must_match(dir, std::string(name) + "'s num_layers", wan.num_layers, "transformer's", first->num_layers);
    must_match(dir, std::string(name) + "'s width", wan.width(), "transformer's", first->width());
    must_match(dir, std::string(name) + "'s ffn_dim", wan.ffn_dim, "transformer's", first->ffn_dim);
    must_match(dir, std::string(name) + "'s freq_dim", wan.freq_dim, "transformer's", first->freq_dim);
  }
  auto last = std::chrono::steady_clock::now();
  const auto lap = [&] {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::microseconds>(now - std::exchange(last, now));
  };
  auto text = T5Encoder::load(dir + "/text_encoder", placement, regions, quantize_of(source, "text_encoder"));
  const auto text_time = lap();
  const std::string format = quantize_of(source, "transformer");
  const auto load = [&](const std::string& name) {
    return WanTransformer::load(
        {.dir = dir + "/" + name, .quantize = format, .name = name, .adapter_rank = adapter_rank, .regions = regions},
        placement);
  };
  auto transformer = load("transformer");
  std::optional<WanTransformer> transformer_2;
  if (second) transformer_2 = load("transformer_2");
  const auto transformer_time = lap();
  WanTransformer::compile(transformer, transformer_2 ? &*transformer_2 : nullptr, regions);
  const auto compile_time = lap();
  Placement vae_placement = for_convolutions(placement);
  if (!source.vae_dtype.empty())
    vae_placement.dtype = source.vae_dtype == "bf16" ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
  auto decoder = VideoVae::load(dir + "/vae", vae_placement, /*with_encoder=*/from_image, regions);
  const auto vae_time = lap();
  return {
      scheduler,
      std::move(text),
      std::move(transformer),
      std::move(transformer_2),
      boundary.value_or(0),
      std::move(decoder),
      from_image,
      {{"text_encoders", text_time}, {"transformer", transformer_time}, {"compile", compile_time}, {"vae", vae_time}},
      source};
}

}  // namespace ditfleet::pipeline
