// The bodies of OpenAI's APIs: JSON or a form, whose images come in several ways. Pure functions, thread-safe.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "coordinator/gateway/routes/job_images.h"
#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct OpenAiBody {
  json::object fields;  // in place of a file, kUnknownSha256; what a form repeats, and its `images`, is an array
  SentImages files;     // of a form
};

// Reads a body as JSON or, by the Content-Type, as multipart/form-data. A form may repeat `image` and `images`, and
// what follows "[" in the name of a part does not count: image[] is image. `file_fields`: those that may be files.
// kInvalidArgument: the body is malformed, or (with the field as param) a field occurs twice or is a file.
Result<OpenAiBody> read_openai_body(std::string_view content_type, std::string_view body,
                                    std::span<const std::string_view> file_fields);

// An image that is a string, {"image_url": a data URL} or {"file_id": the id of an upload}, as that string.
// kInvalidArgument, with the field `name` as param.
Result<json::value> image_value(const json::value& value, const std::string& name);

}  // namespace ditfleet::gateway
