// The error codes of the service. A code determines the HTTP status, whether a retry may help, and the label in
// metrics.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace ditfleet {

enum class Code {
  kInvalidArgument,      // the caller's input is invalid
  kUnauthenticated,      // no key, or an unknown one
  kPermissionDenied,     // the API key does not permit the request
  kNotFound,             // there is no such job, model or route, or it belongs to another tenant
  kConflict,             // the state does not allow the operation (job ended, outdated attempt)
  kIdempotencyMismatch,  // the same idempotency key with another body
  kPayloadTooLarge,
  kResourceExhausted,  // quota exceeded, queue full, or deadline that cannot be met
  kUnavailable,        // Redis or a worker is unavailable; retry later
  kDeadlineExceeded,
  kCanceled,
  kDataCorrupt,  // a file or a stored value is malformed or damaged
  kOutOfMemory,  // device or host memory; a retry may fit
  kDeviceFault,  // the device failed; the process must end
  kInternal,     // a bug
};

// Where an error comes from. Most errors are kHere.
enum class Source : unsigned char {
  kHere,
  kRedisConnection,  // no reply: not connected, connection lost, or deadline passed; the command may have run
  kRedis,            // an error reply from Redis or one of our Functions
  kObjectStore,      // the S3 store gave no answer, or cannot work for the moment
};

// An error: a code, and a sentence that says what is wrong and what would be right. Code must depend on the other
// members, never on the text of `message`.
struct Error {
  Code code = Code::kInternal;
  std::string message;
  std::string param;  // the invalid field of the request; empty if the error concerns no field
  Source source = Source::kHere;
  std::string kind = {};  // of kRedis: the first word of Redis' reply ("OOM", "WRONGTYPE"), or "NOFUNCTION"
  // After how long a retry is likely to succeed; 0: unknown.
  std::chrono::seconds retry_after{0};
};

std::string_view code_name(Code code);       // "invalid_argument": metric label, stored in Redis
Code code_from_name(std::string_view name);  // kInternal for an unknown name
int http_status(Code code);
Code code_from_http_status(int status);  // the most general code; kInternal for an unknown status
bool is_retryable(Code code);

Error invalid_argument(std::string message, std::string param = {});
Error not_found(std::string message);
Error unavailable(std::string message);
Error data_corrupt(std::string message);
Error internal_error(std::string message);

}  // namespace ditfleet
