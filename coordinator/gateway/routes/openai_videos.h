// OpenAI's video API in terms of DiTFleet's jobs (https://platform.openai.com/docs/api-reference/videos). A video is a
// job of a model that generates videos. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "coordinator/gateway/routes/job_images.h"
#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"
#include "shared/queue/types.h"

namespace ditfleet::gateway {

// The body of POST /v1/videos.
struct VideoCall {
  job::JobSpec spec;           // parsed, not completed; has a model
  SentImages images;           // the spec's images that came with the request
  bool has_reference = false;  // input_reference, the image to begin with, became the field `image`
};

// Whether a video request may also have this field of a job: all fields except those that `size` and the file format
// of a video replace, `n` and `remixed_from`.
bool is_video_field(job::Field field);

// Accepts OpenAI's fields and those of is_video_field(), as JSON or, by the Content-Type, as multipart/form-data.
// `seconds` sets `frames` to the nearest number that the model accepts. A null field counts as absent.
// kInvalidArgument, with the client's field as param; kNotFound: there is no such model.
Result<VideoCall> parse_video_call(std::string_view content_type, std::string_view body,
                                   const job::Catalogue& catalogue);

// The error with the client's field as param, instead of the job's.
Error as_video_error(Error error, bool has_reference);

// The body of POST /v1/videos/{id}/remix, {"prompt"}: the spec of the former job, which is complete, with this prompt.
// So it has the same seed. kInvalidArgument: the former job has not succeeded, or the body is wrong.
Result<job::JobSpec> parse_remix(std::string_view body, const queue::JobRecord& former);

// The video that a job generates. Nothing if its model is unknown or generates images.
struct VideoJob {
  const queue::JobRecord& record;
  const job::ModelEntry& model;
  job::JobSpec spec;  // with the model's defaults
};
std::optional<VideoJob> video_of(const queue::JobRecord& record, const job::Catalogue& catalogue);

// OpenAI's video object. `retention_ms`: how long a job is kept after its end. `progress`: of the job, 0 … 1.
json::object video_json(const VideoJob& video, std::int64_t retention_ms, double progress);

}  // namespace ditfleet::gateway
