#include "coordinator/gateway/routes/batch_lines.h"

#include <utility>

#include "coordinator/gateway/routes/api_context.h"
#include "shared/core/text.h"
#include "shared/job/object_reader.h"
#include "shared/job/spec_json.h"

namespace ditfleet::gateway {
namespace {

constexpr std::size_t kMostLines = 100'000, kMostCustomId = 128;

// A job's spec, or {"custom_id", "method", "url", "body"} as in OpenAI's batches.
Result<void> parse_line(std::string_view text, BatchLine& line) {
  auto parsed = parse_json(text);
  if (!parsed) return parsed.error();
  const json::object* object = parsed->if_object();
  const json::value* body = object ? object->if_contains("body") : nullptr;
  if (!body) {
    auto spec = job::parse_spec(*parsed);
    if (!spec) return spec.error();
    line.call.spec = std::move(*spec);
    return {};
  }
  job::ObjectReader reader(*object, "");
  reader.refuse_unknown({"custom_id", "method", "url", "body"});
  line.custom_id = reader.text("custom_id", kMostCustomId).value_or("");
  const std::string method = reader.text("method", 16).value_or("POST"), url = reader.text("url", 64).value_or("");
  if (reader.ok() && method != "POST") reader.fail("method", "is '" + method + "'; it must be POST");
  line.image = url == "/v1/images/generations";
  if (reader.ok() && !url.empty() && !line.image && url != "/v1/jobs")
    reader.fail("url", "is '" + url + "'; it must be /v1/jobs or /v1/images/generations");
  if (!reader.ok()) return *reader.error();
  if (!line.image) {
    auto spec = job::parse_spec(*body);
    if (!spec) return spec.error();
    line.call.spec = std::move(*spec);
    return {};
  }
  auto call = parse_image_call("application/json", json::serialize(*body), /*edit=*/false);
  if (!call) return call.error();
  if (call->stream) return invalid_argument("stream does not apply to a batch", "stream");
  if (!call->images.empty()) return invalid_argument("a batch takes pictures by the id of POST /v1/uploads", "image");
  line.call = std::move(*call);
  return {};
}

}  // namespace

json::object bad_json(const BadLine& bad) {
  return {{"line", bad.number},
          {"custom_id", text_or_null(bad.custom_id)},
          {"message", bad.error.message},
          {"param", text_or_null(bad.error.param)}};
}

Result<ParsedBatch> parse_batch(std::string_view text) {
  ParsedBatch out;
  for (const std::string_view one : split(text, '\n')) {
    ++out.total;
    if (one.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (out.lines.size() + out.bad.size() == kMostLines)
      return Error{
          Code::kPayloadTooLarge, "the batch has more than " + std::to_string(kMostLines) + " lines; split it", {}};
    BatchLine line{.number = out.total, .custom_id = {}, .call = {}};
    if (auto done = parse_line(one, line))
      out.lines.push_back(std::move(line));
    else
      out.bad.push_back({line.number, line.custom_id, done.error()});
  }
  if (out.lines.empty() && out.bad.empty())
    return invalid_argument("the batch is empty; send a JSON object such as {\"prompt\": \"a red circle\"} per line");
  return out;
}

}  // namespace ditfleet::gateway
