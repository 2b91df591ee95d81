// A client's request: the body of POST /v1/jobs and the spec in submit and XADD. fields.h describes each field.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/job/fields.h"
#include "shared/job/output_format.h"

namespace ditfleet::job {

// A LoRA adapter that the tenant has registered.
struct LoraUse {
  std::string name;
  double scale = 1.0;
  // SHA-256 of the file, 64 lower-case hexadecimal digits. It identifies the adapter even if the name is reused. A
  // client may omit it; a complete spec has it.
  std::string sha256 = {};
  Expert expert = Expert::kBoth;  // kBoth in a model with one transformer
};

// Where events of a job are sent.
struct Webhook {
  std::string url;                  // empty: nowhere
  std::vector<std::string> events;  // of kWebhookEvents; empty: the ends

  bool wants(std::string_view event) const;
  bool operator==(const Webhook&) const = default;
};
inline constexpr std::string_view kWebhookEvents[] = {"job.started", "job.progress", "job.succeeded", "job.failed",
                                                      "job.canceled"};

// Fields that the client omitted are unset. `complete_spec` (validate.h) fills them with the model's defaults.
struct JobSpec {
  std::string model;
  std::string preset;  // empty: none. complete_spec applies it
  std::string prompt;
  FieldValues fields;                // generation fields
  std::optional<int> n;              // number of images
  std::optional<std::int64_t> seed;  // image i has seed + i
  std::vector<LoraUse> loras;
  int priority = 0;
  std::optional<std::int64_t> deadline_ms;
  std::optional<OutputFormat> output_format;
  std::optional<int> output_compression;
  int partial_images = 0;
  std::optional<int> pause_after_steps;
  std::string resume_from;  // empty: the beginning; complete_spec does not look at it
  Webhook webhook;
  std::string user;
  std::string remixed_from;  // empty: no remix
};

}  // namespace ditfleet::job
