#include "pipeline/families/flux/folder.h"

#include <array>
#include <chrono>
#include <utility>

#include "pipeline/device/failure.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

// The folder's parts that this pipeline reads, with the classes that it computes as.
constexpr std::array<std::pair<const char*, const char*>, 5> kParts{{{"scheduler", "FlowMatchEulerDiscreteScheduler"},
                                                                     {"text_encoder", "CLIPTextModel"},
                                                                     {"text_encoder_2", "T5EncoderModel"},
                                                                     {"transformer", "FluxTransformer2DModel"},
                                                                     {"vae", "AutoencoderKL"}}};

void check_index(const ConfigFile& index) {
  const std::string kind = index.text("_class_name", "");
  if (kind != "FluxPipeline") index.refuse("_class_name is \"" + kind + "\"; it must be FluxPipeline");
  for (const auto& [part, wanted] : kParts) {
    const json::value* entry = index.fields().if_contains(part);
    if (!entry) index.refuse(std::string(part) + " is missing; it must be [LIBRARY, \"" + wanted + "\"]");
    const json::array* pair = entry->if_array();
    const json::string* name = pair && pair->size() == 2 ? (*pair)[1].if_string() : nullptr;
    if (!name || *name != wanted)
      index.refuse(std::string(part) + " is " + excerpt(json::serialize(*entry), 100) + "; it must be [LIBRARY, \"" +
                   wanted + "\"]");
  }
}

void must_match(const std::string& dir, std::string_view what, std::int64_t a, std::string_view other, std::int64_t b) {
  if (a != b)
    fail(Code::kDataCorrupt, dir + ": " + std::string(what) + " is " + std::to_string(a) + ", but " +
                                 std::string(other) + " is " + std::to_string(b) +
                                 "; they must be equal in the parts of one model");
}

}  // namespace

void check_quantize(const ModelSource& source) {
  check_quantize(source, {{"transformer", {"fp8", "nf4"}}, {"text_encoder", {"nf4"}}, {"text_encoder_2", {"nf4"}}});
}

bool has_quantized_linears(const ModelSource& source) {
  check_quantize(source);
  const Placement host{c10::kCPU, c10::ScalarType::Float};
  bool found = !source.quantize.empty();
  const auto look = [&](const std::string& component, const std::string& file, auto open) {
    try {
      const Parameters parameters = open(source.dir + "/" + component);
      found = found || parameters.has_quantized();
      if (!quantize_of(source, component).empty()) parameters.check_quantize_on_load();
    } catch (const Failure& failure) {
      if (failure.error().code != Code::kNotFound || !file.empty()) throw;
    }
  };
  look("transformer", source.transformer,
       [&](const std::string& dir) { return Transformer::open(dir, source.transformer, host); });
  for (const char* component : {"text_encoder", "text_encoder_2"})
    look(component, "", [&](const std::string& dir) { return Parameters::open(dir, Library::kTransformers, host); });
  return found;
}

std::string not_finite_weight(const ModelSource& source) {
  const auto look = [](const std::string& what, Result<Checkpoint> checkpoint) {
    const std::string name = unwrap(unwrap(std::move(checkpoint)).not_finite());
    return name.empty() ? name : "weight " + name + " of " + what + " is not finite";
  };
  std::string found = source.transformer.empty()
                          ? look("transformer", Checkpoint::open(source.dir + "/transformer", Library::kDiffusers))
                          : look(source.transformer, Checkpoint::open_file(source.transformer, {}));
  for (const char* component : {"text_encoder", "text_encoder_2"})
    if (found.empty()) found = look(component, Checkpoint::open(source.dir + "/" + component, Library::kTransformers));
  if (found.empty()) found = look("vae", Checkpoint::open(source.dir + "/vae", Library::kDiffusers));
  return found.empty() ? "all stored weights are finite" : found;
}

FluxFolder load_flux_folder(const ModelSource& source, Placement placement, std::shared_ptr<region::RegionHost> regions,
                            std::int64_t adapter_rank) {
  const std::string& dir = source.dir;
  const auto quantize = [&](const char* component) { return quantize_of(source, component); };
  check_quantize(source);
  if (!source.vae_dtype.empty())
    fail(Code::kInvalidArgument, "this family's VAE has the precision of the other parts; leave vae_dtype out",
         "vae_dtype");
  check_index(ConfigFile(dir + "/model_index.json"));
  const auto scheduler = read_scheduler_config(ConfigFile(dir + "/scheduler/scheduler_config.json"));
  const auto clip = read_clip_config(ConfigFile(dir + "/text_encoder/config.json"));
  const auto t5 = read_t5_config(ConfigFile(dir + "/text_encoder_2/config.json"));
  const auto flux = read_flux_config(ConfigFile(dir + "/transformer/config.json"));
  const auto vae = read_vae_config(ConfigFile(dir + "/vae/config.json"));
  must_match(dir, "transformer's pooled_projection_dim", flux.pooled_projection_dim, "text_encoder's hidden_size",
             clip.hidden_size);
  must_match(dir, "transformer's joint_attention_dim", flux.joint_attention_dim, "text_encoder_2's d_model",
             t5.d_model);
  must_match(dir, "a quarter of transformer's in_channels", flux.in_channels / 4, "vae's latent_channels",
             vae.latent_channels);
  has_quantized_linears(source);  // reports wrong files before weights are read
  auto last = std::chrono::steady_clock::now();
  const auto lap = [&] {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration_cast<std::chrono::microseconds>(now - std::exchange(last, now));
  };
  auto text_encoder = ClipEncoder::load(dir + "/text_encoder", placement, regions, quantize("text_encoder"));
  auto text_encoder_2 = T5Encoder::load(dir + "/text_encoder_2", placement, regions, quantize("text_encoder_2"));
  const auto text_time = lap();
  auto transformer = FluxTransformer::load({.dir = dir + "/transformer",
                                            .file = source.transformer,
                                            .quantize = quantize("transformer"),
                                            .adapter_rank = adapter_rank,
                                            .regions = regions},
                                           placement);
  const auto transformer_time = lap(), compile_time = transformer.compile_time();
  auto decoder = VaeDecoder::load(dir + "/vae", placement, std::move(regions));
  const auto vae_time = lap();
  return {scheduler,
          std::move(text_encoder),
          std::move(text_encoder_2),
          std::move(transformer),
          std::move(decoder),
          {{"text_encoders", text_time},
           {"transformer", transformer_time - compile_time},
           {"compile", compile_time},
           {"vae", vae_time}},
          source};
}

}  // namespace ditfleet::pipeline
