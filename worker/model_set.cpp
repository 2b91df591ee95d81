#include "worker/model_set.h"

#include <spdlog/spdlog.h>

#include <chrono>

#include "shared/job/shape_class.h"
#include "worker/request.h"

namespace ditfleet::worker {
namespace {

job::JobSpec smallest(const job::ModelEntry& entry) {
  const int multiple = std::max(1, entry.size_multiple);
  const int side = (std::max(entry.min_side, multiple) + multiple - 1) / multiple * multiple;
  job::JobSpec spec;
  spec.model = entry.name;
  spec.prompt = "a";
  spec.n = 1;
  spec.width = spec.height = side;
  spec.num_inference_steps = 1;
  spec.guidance_scale = entry.guidance_scale;
  spec.true_cfg_scale = 1.0;
  spec.max_sequence_length = entry.max_sequence_length;
  spec.seed = 0;
  return spec;
}

Result<void> draw(pipeline::Model& model, const job::JobSpec& spec, const ImageEncoder& encode_image) {
  auto prepared = model.encode(request_of(spec, 0));
  if (!prepared) return prepared.error();
  auto denoised = model.denoise(**prepared, [](const pipeline::StepProgress&) { return true; });
  if (!denoised) return denoised;
  auto image = model.decode(**prepared);
  if (!image) return image.error();
  auto bytes = encode_image(*image, pipeline::ImageFormat::kPng, 100);
  if (!bytes) return bytes.error();
  return {};
}

}  // namespace

Result<std::vector<std::string>> warm_up(const ModelSet& set, const ImageEncoder& encode_image) {
  std::vector<std::string> warm;
  for (const auto& [name, model] : set.models) {
    const job::JobSpec spec = smallest(set.catalogue.models.at(name));
    const auto begun = std::chrono::steady_clock::now();
    if (auto drawn = draw(*model, spec, encode_image); !drawn) {
      return Error{drawn.error().code,
                   "the model '" + name + "' failed to draw its warm-up picture: " + drawn.error().message, {}};
    }
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun);
    spdlog::info("model '{}' is warm: drew {}x{} in one step, {} ms", name, *spec.width, *spec.height, took.count());
    warm.push_back(job::shape_class_of(spec, set.precision).key());
  }
  return warm;
}

}  // namespace ditfleet::worker
