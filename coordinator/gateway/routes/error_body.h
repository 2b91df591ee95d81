// Errors as clients see them: OpenAI's error object on every route. Pure, thread safe.
#pragma once

#include <string>
#include <string_view>

#include "coordinator/gateway/http/http.h"
#include "shared/core/error.h"

namespace ditfleet::gateway {

// {"error":{"message","type","param","code"}}; an empty param or code is null.
std::string error_json(std::string_view message, std::string_view type, std::string_view param, std::string_view code);

// The response of a failed call: the status of its code, Retry-After where another try can help.
Response error_response(const Error& error);

// The same for what is wrong with the HTTP itself (404 of a route, 405, 408, 413, 415, 431 …).
Response status_response(int status, std::string_view message, std::string_view code);

// kNotFound in the same words for every route, whoever's job it may be.
Error no_such_job(std::string_view id);

}  // namespace ditfleet::gateway
