#include "worker/units/request.h"

namespace ditfleet::worker {
namespace {

// What OpenAI's API takes where output_compression is not given.
constexpr int kDefaultQuality = 100;

}  // namespace

pipeline::ImageRequest request_of(const job::JobSpec& spec, int unit) {
  pipeline::ImageRequest request;
  request.prompt = spec.prompt;
  if (const auto* negative = spec.fields.text("negative_prompt")) request.negative_prompt = *negative;
  request.width = static_cast<int>(spec.fields.integer("width").value());
  request.height = static_cast<int>(spec.fields.integer("height").value());
  request.num_inference_steps = static_cast<int>(spec.fields.integer("num_inference_steps").value());
  request.guidance_scale = spec.fields.real("guidance_scale").value();
  request.true_cfg_scale = spec.fields.real("true_cfg_scale").value();
  request.max_sequence_length = static_cast<int>(spec.fields.integer("max_sequence_length").value());
  request.seed =
      static_cast<std::int64_t>(static_cast<std::uint64_t>(spec.seed.value()) + static_cast<std::uint64_t>(unit));
  return request;
}

pipeline::ImageFormat format_of(job::OutputFormat format) {
  switch (format) {
    case job::OutputFormat::kJpeg: return pipeline::ImageFormat::kJpeg;
    case job::OutputFormat::kWebp: return pipeline::ImageFormat::kWebp;
    case job::OutputFormat::kPng: break;
  }
  return pipeline::ImageFormat::kPng;
}

int quality_of(const job::JobSpec& spec) { return spec.output_compression.value_or(kDefaultQuality); }

std::vector<int> preview_steps(int total, int count) {
  std::vector<int> steps;
  for (int i = 1; i <= count; ++i) {
    const int step = static_cast<int>(static_cast<long>(total) * i / (count + 1));
    if (step >= 1 && step < total && (steps.empty() || step > steps.back())) steps.push_back(step);
  }
  return steps;
}

}  // namespace ditfleet::worker
