#include "coordinator/gateway/routes/errors.h"

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"

namespace ditfleet::gateway {
namespace {

// OpenAI's clients choose the exception by the status; the type is informative.
std::string_view error_type(int status) {
  if (status == 401) return "authentication_error";
  if (status == 403) return "permission_error";
  if (status == 429) return "rate_limit_error";
  if (status >= 500) return "server_error";
  return "invalid_request_error";
}

}  // namespace

Response error_response(const Error& error) {
  const int status = http_status(error.code);
  constexpr std::string_view kPart = "[queue] ";  // of interest in logs only
  std::string_view message = error.message;
  if (message.starts_with(kPart)) message.remove_prefix(kPart.size());
  Response response = status_response(status, message, code_name(error.code), error.param);
  if (status == 503 || status == 429)
    response.with("Retry-After", std::to_string(std::max<std::int64_t>(1, error.retry_after.count())));
  if (status == 401) response.with("WWW-Authenticate", "Bearer");
  return response;
}

Response status_response(int status, std::string_view message, std::string_view code, std::string_view param) {
  const json::object error{
      {"message", message}, {"type", error_type(status)}, {"param", text_or_null(param)}, {"code", code}};
  return json_response(status, {{"error", error}});
}

Result<Response> unread_body(const Error& error) {
  if (error.code != Code::kDeadlineExceeded) return error;
  return status_response(408, error.message, "request_timeout");
}

Error no_such_job(std::string_view id) {
  return {Code::kNotFound,
          "job '" + excerpt(id, 100) + "' not found: it never existed, has expired or belongs to another tenant",
          {}};
}

std::optional<Response> refuse_repeated_headers(const Request& request) {
  for (const char* name : {"Authorization", "Idempotency-Key", "Content-Type", "Last-Event-ID"}) {
    if (request.count_headers(name) < 2) continue;
    return status_response(400, "the request has more than one " + std::string(name) + " header; send exactly one",
                           "bad_request");
  }
  return std::nullopt;
}

bool is_json_type(std::string_view media_type) {
  return media_type == "application/json" || media_type.ends_with("+json");
}

std::optional<Response> refuse_compressed_body(const Request& request) {
  const auto coding = request.header("Content-Encoding");
  if (coding.empty() || media_type_of(coding) == "identity") return std::nullopt;
  return status_response(
      415, "the body is encoded as '" + excerpt(coding, 100) + "'; send it uncompressed, without Content-Encoding",
      "unsupported_media_type");
}

std::optional<Response> refuse_body_unless_json(const Request& request) {
  if (auto refused = refuse_compressed_body(request)) return refused;
  const std::string type = media_type_of(request.header("Content-Type"));
  if (!request.body.empty() && !is_json_type(type)) {
    return status_response(
        415,
        (type.empty() ? "the body has no Content-Type" : "the body is '" + excerpt(type, 100) + "'") +
            "; send JSON with 'Content-Type: application/json'",
        "unsupported_media_type");
  }
  if (!is_valid_utf8(request.body)) {
    return error_response(invalid_argument("the body is not valid UTF-8; send JSON encoded as UTF-8"));
  }
  return std::nullopt;
}

std::optional<Response> refuse_body_unless_json_or_form(const Request& request) {
  const std::string type = media_type_of(request.header("Content-Type"));
  if (type == "multipart/form-data") return refuse_compressed_body(request);
  if (!request.stream || is_json_type(type)) return refuse_body_unless_json(request);
  return status_response(415, "the body is '" + excerpt(type, 100) + "'; send application/json or multipart/form-data",
                         "unsupported_media_type");
}

}  // namespace ditfleet::gateway
