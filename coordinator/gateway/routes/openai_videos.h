// OpenAI's video API in terms of DiTFleet's jobs (https://platform.openai.com/docs/api-reference/videos). A video is a
// job of a model that generates videos. Pure functions, thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/http/http.h"
#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"
#include "shared/queue/types.h"

namespace ditfleet::gateway {

// The body of POST /v1/videos.
struct VideoCall {
  job::JobSpec spec;           // parsed, not completed; has a model
  bool has_reference = false;  // input_reference, the image to begin with
  std::string reference = {};  // an uploaded input_reference
};

// Whether a video request may also have this field of a job: all fields except those that `size` and the file format
// of a video replace, and `n`.
bool is_video_field(job::Field field);

// Accepts OpenAI's fields and those of is_video_field(), as JSON or as multipart/form-data. `seconds` sets `frames` to
// the nearest number that the model accepts. A null field counts as absent. kInvalidArgument, with the client's field
// as param; kNotFound: there is no such model.
Result<VideoCall> parse_video_call(const Request& request, const job::Catalogue& catalogue);

// The video that a job generates. Nothing if its model is unknown or generates images.
struct VideoJob {
  const queue::JobRecord& record;
  const job::ModelEntry& model;
  job::JobSpec spec;  // with the model's defaults
};
std::optional<VideoJob> video_of(const queue::JobRecord& record, const job::Catalogue& catalogue);

// OpenAI's video object. `retention_ms`: how long a job is kept after its end.
json::object video_json(const VideoJob& video, std::int64_t retention_ms);

}  // namespace ditfleet::gateway
