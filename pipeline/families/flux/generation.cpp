#include "pipeline/families/flux/generation.h"

#include <cmath>

#include "pipeline/device/failure.h"
#include "pipeline/engine/dump.h"
#include "shared/core/bytes.h"

namespace ditfleet::pipeline {
namespace {

constexpr int kMaxSide = 16384, kMaxSteps = 1000;
constexpr int kMaxSequenceLength = 512;  // as in diffusers
constexpr std::size_t kMaxLoras = 16;    // of one request

void refuse(const std::string& field, const std::string& message) {
  fail(Code::kInvalidArgument, field + " " + message, field);
}

void check_range(const std::string& field, int value, int least, int most) {
  if (value < least || value > most)
    refuse(field, "is " + std::to_string(value) + "; it must be from " + std::to_string(least) + " to " +
                      std::to_string(most));
}

void check(const FluxRequest& r, int size_multiple) {
  for (const auto& [field, value] : {std::pair("width", r.width), std::pair("height", r.height)}) {
    check_range(field, value, size_multiple, kMaxSide);
    if (value % size_multiple != 0)
      refuse(field, "is " + std::to_string(value) + "; it must be a multiple of " + std::to_string(size_multiple));
  }
  check_range("num_inference_steps", r.num_inference_steps, 1, kMaxSteps);
  check_range("max_sequence_length", r.max_sequence_length, 1, kMaxSequenceLength);
  if (!std::isfinite(r.guidance_scale)) refuse("guidance_scale", "must be a finite number");
  if (!std::isfinite(r.true_cfg_scale)) refuse("true_cfg_scale", "must be a finite number");
  if (!is_valid_utf8(r.prompt)) refuse("prompt", "is not valid UTF-8");
  if (r.negative_prompt && !is_valid_utf8(*r.negative_prompt)) refuse("negative_prompt", "is not valid UTF-8");
  if (r.loras.size() > kMaxLoras)
    refuse("loras",
           "has " + std::to_string(r.loras.size()) + " entries; at most " + std::to_string(kMaxLoras) + " are allowed");
  for (const LoraRequest& lora : r.loras)
    if (!(std::abs(lora.scale) <= job::kMaxLoraScale))
      refuse("loras", "gives " + lora.path + " a scale of " + std::to_string(lora.scale) +
                          "; it must be a finite number from -100 to 100");
}

int integer_of(const job::FieldValues& fields, job::Field field, int fallback) {
  return static_cast<int>(fields.integer(field).value_or(fallback));
}

}  // namespace

FluxRequest read_flux_request(const GenerationRequest& request, int size_multiple) {
  const job::FieldValues& fields = request.fields;
  FluxRequest r;
  r.prompt = request.prompt;
  if (const std::string* negative = fields.text("negative_prompt")) r.negative_prompt = *negative;
  r.width = integer_of(fields, "width", r.width);
  r.height = integer_of(fields, "height", r.height);
  r.num_inference_steps = integer_of(fields, "num_inference_steps", r.num_inference_steps);
  r.guidance_scale = fields.real("guidance_scale").value_or(r.guidance_scale);
  r.true_cfg_scale = fields.real("true_cfg_scale").value_or(r.true_cfg_scale);
  r.max_sequence_length = integer_of(fields, "max_sequence_length", r.max_sequence_length);
  r.seed = request.seed;
  r.loras = request.loras;
  r.alone = request.alone.value_or(false);
  check(r, size_multiple);
  return r;
}

Result<void> FluxGeneration::dump(const std::string& path) const {
  try {
    Dump out;
    out.add("clip_ids", prompt.clip_ids);
    out.add("t5_ids", prompt.t5_ids);
    out.add("pooled_prompt_embeds", prompt.pooled);
    out.add("prompt_embeds", prompt.tokens);
    if (negative) {
      out.add("negative_clip_ids", negative->clip_ids);
      out.add("negative_t5_ids", negative->t5_ids);
      out.add("negative_pooled_prompt_embeds", negative->pooled);
      out.add("negative_prompt_embeds", negative->tokens);
    }
    out.add("noise", noise);
    out.add("sigmas", schedule.sigmas);
    out.add("timesteps", schedule.timesteps);
    out.add("latents", latents);
    out.add("image", image);
    return out.write(path, {{"noise", "as drawn, [1, channels, height, width]"},
                            {"latents", "after the last step, packed: [1, tokens, 4 channels]"},
                            {"image", "decoded, in 0…1: [1, 3, height, width]"}});
  } catch (...) {
    return error_in_flight("dump");
  }
}

}  // namespace ditfleet::pipeline
