#include "pipeline/families/wan/generation.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "pipeline/device/failure.h"
#include "pipeline/engine/dump.h"
#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/text.h"

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

// "1, 0.75, 0.5": from at most 1, falling, above 0.
std::vector<double> read_sigmas(std::string_view text) {
  std::vector<double> sigmas;
  for (std::string_view part : split(text, ',')) {
    part.remove_prefix(std::min(part.find_first_not_of(' '), part.size()));
    part = part.substr(0, part.find_last_not_of(' ') + 1);
    const auto sigma = number_of<double>(part, 0, 1);
    if (!sigma || *sigma == 0 || (!sigmas.empty() && *sigma >= sigmas.back()))
      refuse("sigmas", "must be falling numbers from 1 to above 0, separated by commas, such as 1, 0.75, 0.5, 0.25");
    sigmas.push_back(*sigma);
  }
  return sigmas;
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
  r.loras = request.loras;
  r.alone = request.alone.value_or(false);
  r.flow_shift = fields.real("flow_shift");

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
  if (r.flow_shift && !(*r.flow_shift > 0 && std::isfinite(*r.flow_shift)))
    refuse("flow_shift", "must be a number above 0");
  if (const std::string* sampler = fields.text("sampler")) {
    if (*sampler != "euler" && *sampler != "unipc")
      refuse("sampler", "is \"" + excerpt(*sampler, 40) + "\"; it must be euler or unipc");
    r.euler = *sampler == "euler";
  }
  if (const std::string* sigmas = fields.text("sigmas")) {
    r.sigmas = read_sigmas(*sigmas);
    if (static_cast<int>(r.sigmas.size()) != r.num_inference_steps)
      refuse("sigmas", "has " + std::to_string(r.sigmas.size()) + " numbers, but num_inference_steps is " +
                           std::to_string(r.num_inference_steps) + "; they must agree");
  }
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
