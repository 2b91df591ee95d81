#include "coordinator/gateway/routes/error_body.h"

#include "shared/core/excerpt.h"
#include "shared/core/json.h"

namespace ditfleet::gateway {
namespace {

// The types OpenAI's clients know; they map the status, not the type, to their exceptions.
std::string_view error_type(int status) {
  if (status == 401) return "authentication_error";
  if (status == 403) return "permission_error";
  if (status == 429) return "rate_limit_error";
  if (status >= 500) return "server_error";
  return "invalid_request_error";
}

json::value text_or_null(std::string_view text) { return text.empty() ? json::value(nullptr) : json::value(text); }

}  // namespace

std::string error_json(std::string_view message, std::string_view type, std::string_view param, std::string_view code) {
  return json::serialize(json::object{
      {"error",
       json::object{
           {"message", message}, {"type", type}, {"param", text_or_null(param)}, {"code", text_or_null(code)}}}});
}

Response error_response(const Error& error) {
  const int status = http_status(error.code);
  Response response =
      json_response(status, error_json(error.message, error_type(status), error.param, code_name(error.code)));
  if (status == 503 || status == 429) response.with("Retry-After", "1");
  if (status == 401) response.with("WWW-Authenticate", "Bearer");
  return response;
}

Response status_response(int status, std::string_view message, std::string_view code) {
  return json_response(status, error_json(message, error_type(status), {}, code));
}

Error no_such_job(std::string_view id) {
  return {Code::kNotFound,
          "there is no job '" + excerpt(id, 100) + "'; it never was, has expired, or is another tenant's",
          {}};
}

}  // namespace ditfleet::gateway
