// What a client asks for: the native job body of POST /v1/jobs, of the Functions and of XADD.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shared/job/output_format.h"

namespace ditfleet::job {

// A LoRA adapter on the request, of those that the tenant has registered.
struct LoraUse {
  std::string name;
  double scale = 1.0;
  // The digest of its file, 64 lower-case hexadecimal digits: which adapter it is, whatever becomes of the name. A
  // client may leave it out; a complete spec has it.
  std::string sha256 = {};
};

// Fields a client left out stay unset until `complete_spec` (validate.h) fills them with the model's
// defaults; a spec that reached a worker has every one of them.
struct JobSpec {
  std::string model;
  std::string prompt;                          // UTF-8, may be empty
  std::optional<std::string> negative_prompt;  // "" counts as given (true CFG is on if the scale > 1)
  std::optional<int> n;                        // images; unit i is drawn with seed + i
  std::optional<int> width, height;            // pixels
  std::optional<int> num_inference_steps;
  std::optional<double> guidance_scale;  // the embedded guidance of guidance-distilled models
  std::optional<double> true_cfg_scale;
  std::optional<int> max_sequence_length;  // T5 tokens, padded to exactly this
  std::optional<std::int64_t> seed;        // 0 … 2^63-1; unset: drawn at random on admission
  std::vector<LoraUse> loras;
  int priority = 0;                         // -100 … 100, higher first within a tenant
  std::optional<std::int64_t> deadline_ms;  // from submission, milliseconds
  OutputFormat output_format = OutputFormat::kPng;
  std::optional<int> output_compression;  // 0–100: JPEG and WebP quality; PNG ignores it
  int partial_images = 0;                 // 0–3 previews while it denoises
  std::string user;                       // an opaque end-user label, only stored
};

}  // namespace ditfleet::job
