#include "shared/core/error.h"

#include <array>
#include <utility>

namespace ditfleet {
namespace {

struct Row {
  Code code;
  std::string_view name;
  int status;
  bool retryable;
};

// Of the codes that share a status, the most general one comes first.
constexpr Row kInternalRow{Code::kInternal, "internal", 500, false};
constexpr std::array kRows = {
    kInternalRow,
    Row{Code::kInvalidArgument, "invalid_argument", 400, false},
    Row{Code::kUnauthenticated, "unauthenticated", 401, false},
    Row{Code::kPermissionDenied, "permission_denied", 403, false},
    Row{Code::kNotFound, "not_found", 404, false},
    Row{Code::kConflict, "conflict", 409, false},
    Row{Code::kIdempotencyMismatch, "idempotency_mismatch", 422, false},
    Row{Code::kPayloadTooLarge, "payload_too_large", 413, false},
    Row{Code::kResourceExhausted, "resource_exhausted", 429, true},
    Row{Code::kUnavailable, "unavailable", 503, true},
    Row{Code::kDeadlineExceeded, "deadline_exceeded", 504, true},
    Row{Code::kCanceled, "canceled", 499, false},
    Row{Code::kDataCorrupt, "data_corrupt", 500, false},
    Row{Code::kOutOfMemory, "out_of_memory", 503, true},
    Row{Code::kDeviceFault, "device_fault", 503, true},
};

const Row& row(Code code) {
  for (const Row& r : kRows) {
    if (r.code == code) return r;
  }
  return kInternalRow;
}

}  // namespace

std::string_view code_name(Code code) { return row(code).name; }
int http_status(Code code) { return row(code).status; }
bool is_retryable(Code code) { return row(code).retryable; }

Code code_from_name(std::string_view name) {
  for (const Row& r : kRows) {
    if (r.name == name) return r.code;
  }
  return Code::kInternal;
}

Code code_from_http_status(int status) {
  for (const Row& r : kRows) {
    if (r.status == status) return r.code;
  }
  return Code::kInternal;
}

Error invalid_argument(std::string message, std::string param) {
  return {Code::kInvalidArgument, std::move(message), std::move(param)};
}
Error not_found(std::string message) { return {Code::kNotFound, std::move(message)}; }
Error unavailable(std::string message) { return {Code::kUnavailable, std::move(message)}; }
Error data_corrupt(std::string message) { return {Code::kDataCorrupt, std::move(message)}; }
Error internal_error(std::string message) { return {Code::kInternal, std::move(message)}; }

}  // namespace ditfleet
