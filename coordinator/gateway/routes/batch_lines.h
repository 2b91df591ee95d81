// The JSON lines of a batch.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "coordinator/gateway/routes/openai_images.h"
#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

struct BatchLine {
  int number = 0;  // from 1
  std::string custom_id;
  bool image = false;  // OpenAI's images/generations
  ImageCall call;      // with the spec
};

struct BadLine {
  int number = 0;
  std::string custom_id;
  Error error;
};

struct ParsedBatch {
  std::vector<BatchLine> lines;
  std::vector<BadLine> bad;
  int total = 0;  // the number of the last line
};

json::object bad_json(const BadLine& bad);

// Checks the form of each line, not what depends on models and tenants. kInvalidArgument: there is no line.
// kPayloadTooLarge: more than 100,000. Takes about a second for 64 MiB. Pure, thread-safe.
Result<ParsedBatch> parse_batch(std::string_view text);

}  // namespace ditfleet::gateway
