// OpenAI's image API in terms of DiTFleet's jobs (https://platform.openai.com/docs/api-reference/images). Pure
// functions, thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/gateway/routes/job_images.h"
#include "shared/core/json.h"
#include "shared/core/result.h"
#include "shared/job/catalogue.h"
#include "shared/job/spec.h"
#include "shared/results/store.h"

namespace ditfleet::gateway {

// The body of POST /v1/images/generations or /v1/images/edits: the job, and the form of the response.
struct ImageCall {
  job::JobSpec spec;  // parsed, not completed
  SentImages images = {};
  bool b64_json = false;          // else URLs
  bool stream = false;            // server-sent events
  std::string quality;            // echoed; empty: not given
  std::string safety_identifier;  // echoed; replaces the spec's user, as OpenAI documents
  std::string size = "auto";      // echoed in partial images: WIDTHxHEIGHT once it is known
  bool edit = false;
  std::string image_name;  // "image" or "images", as the client calls its images; empty: it sends none

  // Sets `size` if the fields have a width and a height.
  void take_size(const job::FieldValues& fields);
  // Takes what the request leaves out from the model: the size, unless the image gives it; of a model that generates
  // videos, one frame as PNG.
  void complete_for(const job::ModelEntry& model);
};

// Whether an image request may also have this field of a job: all fields except those that `size` replaces and
// that of remixed videos.
bool is_image_field(job::Field field);

// Accepts OpenAI's fields and those of is_image_field(), as JSON or, by the Content-Type, as multipart/form-data. An
// image is a string or has the form of image_value(), and `image` may be an array. A null field counts as absent.
// `edit`: the request must have an image. kInvalidArgument, as as_image_error() names the param.
Result<ImageCall> parse_image_call(std::string_view content_type, std::string_view body, bool edit);

// The error with the client's field as param ("size", not "width"), instead of the job's.
Error as_image_error(Error error, const ImageCall& call);

// One image of a response.
struct ImagePart {
  int unit = 0;
  std::string url;
  results::Manifest manifest = {};
};

// The body of the 200. With b64_json, every "b64_json" is empty: the picture goes there.
json::object images_json(const ImageCall& call, const std::string& job, std::int64_t created_s,
                         const std::vector<ImagePart>& parts);

// The types of events and their data; that of the latter has an empty "b64_json".
std::string partial_image_event(const ImageCall& call);  // "image_generation.partial_image"
std::string completed_event(const ImageCall& call);      // "image_edit.completed" of an edit
std::string partial_image_json(const ImageCall& call, std::int64_t created_s, int partial_index, int unit,
                               std::string_view bytes);
std::string completed_json(const ImageCall& call, std::int64_t created_s, const ImagePart& part);

// From the first bytes: image/png, image/jpeg, image/webp, else application/octet-stream.
std::string_view sniff_media_type(std::string_view bytes);

}  // namespace ditfleet::gateway
