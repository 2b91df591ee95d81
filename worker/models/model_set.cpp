#include "worker/models/model_set.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>

#include "shared/job/shape_class.h"
#include "shared/job/validate.h"
#include "worker/models/model_timings.h"
#include "worker/models/request.h"

namespace ditfleet::worker {
namespace {

// Fills a picture that the model needs; generate() makes one in its place.
void add_picture(job::JobSpec& spec, const job::ModelEntry& entry) {
  if (const auto at = entry.fields.find("image"); at != entry.fields.end() && at->second.required)
    spec.fields.set("image", std::string(64, '0'));
}

// The smallest image of the model, in one step without true CFG.
job::JobSpec smallest(const job::ModelEntry& entry) {
  job::JobSpec spec;
  spec.model = entry.name;
  spec.prompt = "a";
  spec.n = 1;
  spec.seed = 0;
  for (const job::Field field : job::kFields) {
    const auto* value = entry.defaults.find(field);
    if (value && !job::belongs_to_image(field)) spec.fields.set(field, *value);
  }
  for (const job::Field field :
       {job::Field("width"), job::Field("height"), job::Field("frames"), job::Field("num_inference_steps")}) {
    const auto limits = entry.fields.find(field);
    if (limits == entry.fields.end()) continue;
    const auto least = limits->second.nearest(static_cast<double>(limits->second.low));
    spec.fields.set(field, least < limits->second.low ? least + limits->second.multiple_of : least);
  }
  add_picture(spec, entry);
  if (entry.applies("true_cfg_scale")) spec.fields.set("true_cfg_scale", 1.0);
  return spec;
}

// Generates and encodes one image, and returns the time of each part.
Result<PartTimes> generate(pipeline::Model& model, const job::JobSpec& spec, std::optional<bool> on_one,
                           const WriterOpener& open_writer) {
  using std::chrono::duration_cast, std::chrono::microseconds;
  pipeline::GenerationRequest request = request_of(spec, 0);
  request.alone = on_one;
  constexpr int kSide = 64;
  for (std::size_t i = 0; i < spec.fields.images("image").size(); ++i) {
    request.images.push_back(std::make_shared<const pipeline::Media>(
        pipeline::Media{kSide, kSide, 1, 0, std::vector<std::uint8_t>(kSide * kSide * 3, 128)}));
  }
  auto prepared = model.encode(request);
  if (!prepared) return prepared.error();
  PartTimes parts;
  StepTimer timer(spec.model);
  auto denoised = model.denoise(**prepared, [&](const pipeline::StepProgress& progress) {
    parts.emplace_back(progress.step == 1 ? "transformer_first_step" : "transformer_steady_step",
                       timer.ended(progress));
    timer.begin();
    return true;
  });
  if (!denoised) return denoised.error();
  auto image = model.decode(**prepared);
  if (!image) return image.error();
  for (const auto& [phase, us] : (*prepared)->phases_us()) {
    if (phase == "text") parts.emplace(parts.begin(), "text_encoders", us);
    if (phase == "vae") parts.emplace_back("vae", us);
  }
  const auto begun = std::chrono::steady_clock::now();
  auto bytes = open_writer(job::default_format(image->frames > 1), 100)->finish(*image, "");
  if (!bytes) return bytes.error();
  parts.emplace_back("encode", duration_cast<microseconds>(std::chrono::steady_clock::now() - begun));
  return parts;
}

// A job of the configured class for this model. A class for all models says nothing about fields that a model lacks.
Result<job::JobSpec> spec_of(const WarmupClass& one, const std::string& model, const ModelSet& set) {
  const job::ModelEntry& entry = set.catalogue.models.at(model);
  const auto takes = [&](job::Field field) { return !one.model.empty() || entry.applies(field); };
  job::JobSpec spec;
  spec.model = model;
  spec.prompt = "a";
  spec.n = 1;
  spec.fields.set("width", one.width);
  spec.fields.set("height", one.height);
  spec.fields.set("num_inference_steps", set.gpus > 1 ? 4 : 2);
  if (one.frames && takes("frames")) spec.fields.set("frames", *one.frames);
  if (one.max_sequence_length && takes("max_sequence_length"))
    spec.fields.set("max_sequence_length", *one.max_sequence_length);
  spec.seed = 0;
  add_picture(spec, entry);
  if (one.true_cfg && entry.guidance && !entry.applies("true_cfg_scale")) {
    spec.fields.set("guidance_scale", 2.0);
  } else if (one.true_cfg && takes("true_cfg_scale")) {
    spec.fields.set("negative_prompt", "");
    spec.fields.set("true_cfg_scale", 2.0);
  }
  auto complete = job::complete_spec(std::move(spec), set.catalogue);
  if (!complete)
    return Error{Code::kInvalidArgument, "worker.warmup_classes: " + complete.error().message, "worker.warmup_classes"};
  return complete;
}

std::string label_of(const job::JobSpec& spec) {
  const auto frames = spec.fields.integer("frames");
  return std::to_string(spec.fields.integer("width").value()) + "x" +
         std::to_string(spec.fields.integer("height").value()) + (frames ? "x" + std::to_string(*frames) : "");
}

}  // namespace

Result<std::vector<std::string>> warm_up(const ModelSet& set, const WriterOpener& open_writer) {
  // Checks all classes before the first image.
  struct Run {
    job::JobSpec spec;
    std::optional<bool> on_one = {};  // GPU of several
  };
  std::vector<Run> runs;
  for (const auto& [name, model] : set.models) {
    runs.push_back({smallest(set.catalogue.models.at(name))});
    for (const WarmupClass& one : set.warmup_classes) {
      if (!one.model.empty() && one.model != name) continue;
      auto spec = spec_of(one, name, set);
      if (!spec) return spec.error();
      if (set.gpus == 1) runs.push_back({*spec});
      for (const bool on_one : {false, true})
        if (set.gpus > 1 && (!one.gpus || (*one.gpus == 1) == on_one)) runs.push_back({*spec, on_one});
    }
  }
  std::vector<std::string> warm;
  for (const auto& [spec, on_one] : runs) {
    auto parts = generate(*set.models.at(spec.model), spec, on_one, open_writer);
    if (!parts) {
      return Error{
          parts.error().code,
          "the warm-up of model '" + spec.model + "' at " + label_of(spec) + " failed: " + parts.error().message,
          {}};
    }
    const std::string class_key = job::shape_class_of(spec, set.catalogue.models.at(spec.model), set.precision).key();
    record_warm_up(spec.model, class_key, *parts);
    spdlog::info("model '{}': warmed up {}{} in {}", spec.model, label_of(spec),
                 !on_one   ? ""
                 : *on_one ? " on one GPU"
                           : " on " + std::to_string(set.gpus) + " GPUs",
                 text_of(*parts));
    if (std::find(warm.begin(), warm.end(), class_key) == warm.end()) warm.push_back(class_key);
  }
  return warm;
}

}  // namespace ditfleet::worker
