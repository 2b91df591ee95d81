// Errors as clients see them (OpenAI's error object on every route), and the checks that all handlers share.
// Pure functions, thread-safe.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/http/http.h"
#include "shared/core/error.h"

namespace ditfleet::gateway {

// The response to a failed call: the status of its code, and Retry-After if a retry may succeed.
Response error_response(const Error& error);

// The same for errors of HTTP itself (404 for a route, 405, 408, 413, 415, 431 …):
// {"error":{"message","type","param","code"}}; an empty param is null.
Response status_response(int status, std::string_view message, std::string_view code, std::string_view param = {});

// The answer to a body that ApiContext::receive() has not read: 408 for one that came too slowly, else the error.
Result<Response> unread_body(const Error& error);

// kNotFound with the same message for missing jobs and jobs of other tenants, on every route.
Error no_such_job(std::string_view id);

// 400 for a second line of a header that must occur once (RFC 9110 §5.3): it is ambiguous which one is meant.
std::optional<Response> refuse_repeated_headers(const Request& request);
bool is_json_type(std::string_view media_type);
// 415 for a compressed body.
std::optional<Response> refuse_compressed_body(const Request& request);
// 415 for a body that is compressed or is not declared as JSON, 400 for invalid UTF-8.
std::optional<Response> refuse_body_unless_json(const Request& request);

// The same for a route that takes JSON or multipart/form-data.
std::optional<Response> refuse_body_unless_json_or_form(const Request& request);

}  // namespace ditfleet::gateway
