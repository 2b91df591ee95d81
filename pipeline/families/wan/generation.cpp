#include "pipeline/families/wan/generation.h"

#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/engine/dump.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

constexpr int kMaxSide = 16384, kMaxFrames = 1024, kMaxSteps = 1000;
constexpr int kMaxSequenceLength = 512;

[[noreturn]] void refuse(const std::string& field, const std::string& message) {
  fail(Code::kInvalidArgument, field + " " + message, field);
}

void check_range(const std::string& field, int value, int least, int most) {
  if (value < least || value > most)
    refuse(field, "is " + std::to_string(value) + "; it must be from " + std::to_string(least) + " to " +
                      std::to_string(most));
}

}  // namespace

WanRequest read_wan_request(const GenerationRequest& request, int size_multiple, bool experts, bool from_image) {
  const job::FieldValues& fields = request.fields;
  const auto integer = [&](job::Field field, int fallback) {
    return static_cast<int>(fields.integer(field).value_or(fallback));
  };
  WanRequest r;
  r.prompt = request.prompt;
  if (const std::string* negative = fields.text("negative_prompt")) r.negative_prompt = *negative;
  r.width = integer("width", r.width);
  r.height = integer("height", r.height);
  r.num_frames = integer("frames", r.num_frames);
  r.frame_rate = fields.real("fps").value_or(r.frame_rate);
  r.num_inference_steps = integer("num_inference_steps", r.num_inference_steps);
  r.guidance_scale = fields.real("guidance_scale").value_or(r.guidance_scale);
  r.guidance_scale_2 = fields.real("guidance_scale_2");
  r.max_sequence_length = integer("max_sequence_length", r.max_sequence_length);
  r.seed = request.seed;

  if (from_image && !request.image) refuse("image", "is missing; this model makes a video from an image");
  if (!from_image && request.image)
    refuse("image", "does not apply to this model, which takes only text; leave it out");
  if (from_image && !fields.has("width") && !fields.has("height")) {
    // As in the example of diffusers' WanImageToVideoPipeline.
    const double aspect = static_cast<double>(request.image->height) / request.image->width, area = r.width * r.height;
    const auto side = [&](double length) {
      return std::max(size_multiple, static_cast<int>(std::nearbyint(length)) / size_multiple * size_multiple);
    };
    r.height = side(std::sqrt(area * aspect));
    r.width = side(std::sqrt(area / aspect));
  }
  for (const auto& [field, value] : {std::pair("width", r.width), std::pair("height", r.height)}) {
    check_range(field, value, size_multiple, kMaxSide);
    if (value % size_multiple != 0)
      refuse(field, "is " + std::to_string(value) + "; it must be a multiple of " + std::to_string(size_multiple));
  }
  check_range("frames", r.num_frames, 1, kMaxFrames);
  check_range("num_inference_steps", r.num_inference_steps, 1, kMaxSteps);
  check_range("max_sequence_length", r.max_sequence_length, 1, kMaxSequenceLength);
  if (!std::isfinite(r.guidance_scale)) refuse("guidance_scale", "must be a finite number");
  if (r.guidance_scale_2 && !experts)
    refuse("guidance_scale_2",
           "needs a model with two transformers and a boundary_ratio; this one has one transformer");
  if (r.guidance_scale_2 && !std::isfinite(*r.guidance_scale_2)) refuse("guidance_scale_2", "must be a finite number");
  if (!(r.frame_rate > 0) || !std::isfinite(r.frame_rate)) refuse("fps", "must be a number above 0");
  if (!is_valid_utf8(r.prompt)) refuse("prompt", "is not valid UTF-8");
  if (!is_valid_utf8(r.negative_prompt)) refuse("negative_prompt", "is not valid UTF-8");
  if (!request.loras.empty()) refuse("loras", "are not supported by Wan models yet");
  if (r.num_frames % 4 != 1) {
    const int frames = r.num_frames / 4 * 4 + 1;
    r.warnings.push_back("frames is " + std::to_string(r.num_frames) + "; Wan generates 4k + 1 frames, so it is " +
                         std::to_string(frames));
    r.num_frames = frames;
  }
  return r;
}

Result<void> WanGeneration::dump(const std::string& path) const {
  try {
    Dump out;
    out.add("prompt_ids", prompt.ids);
    out.add("prompt_embeds", prompt.embeds);
    if (negative) {
      out.add("negative_prompt_ids", negative->ids);
      out.add("negative_prompt_embeds", negative->embeds);
    }
    out.add("sigmas", schedule.sigmas);
    out.add("timesteps", schedule.timesteps);
    out.add("noise", noise);
    if (condition.defined()) out.add("condition", condition);
    out.add("latents", latents);
    return out.write(path, {{"noise", "as drawn, [1, channels, latent frames, rows, columns]"},
                            {"latents", "diffusers' output_type=\"latent\""}});
  } catch (...) {
    return error_in_flight("dump");
  }
}

}  // namespace ditfleet::pipeline
