// What can go wrong, in one enumeration for the whole service. A code decides three things for whoever
// receives it: the HTTP status, whether trying again can help, and the label in metrics.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace ditfleet {

enum class Code {
  kInvalidArgument,      // the caller's input is wrong and stays wrong
  kUnauthenticated,      // no key, or one that is not known
  kPermissionDenied,     // known, but not allowed
  kNotFound,             // no such job, model, route; also what belongs to another tenant
  kConflict,             // the state does not allow it (job ended, stale attempt)
  kIdempotencyMismatch,  // the same idempotency key with another body
  kPayloadTooLarge,
  kResourceExhausted,  // quota, queue bound, deadline that cannot be met
  kUnavailable,        // Redis or a worker is away; again later
  kDeadlineExceeded,
  kCanceled,
  kDataCorrupt,  // a file or a stored value does not hold what it claims
  kOutOfMemory,  // device or host memory; another try may fit
  kDeviceFault,  // the device failed; the process must end
  kInternal,     // a bug
};

// Who reported an error. Most errors are kHere.
enum class Source : unsigned char {
  kHere,
  kRedisConnection,  // Redis did not answer: not connected, connection lost, deadline passed. The command may have run.
  kRedis,            // Redis or one of our Functions answered with an error
};

// A failure: the code and one sentence that says what was wrong and what would be right. Decisions depend on the other
// members, never on the text of `message`.
struct Error {
  Code code = Code::kInternal;
  std::string message;
  std::string param;  // the request field at fault, if one is; empty otherwise
  Source source = Source::kHere;
  std::string kind = {};  // of kRedis: the first word of Redis' reply ("OOM", "WRONGTYPE"), or "NOFUNCTION"
  // When a retry is likely to succeed; 0 if unknown.
  std::chrono::seconds retry_after{0};
};

std::string_view code_name(Code code);       // "invalid_argument": metric label, stored in Redis
Code code_from_name(std::string_view name);  // kInternal for what is not known
int http_status(Code code);
Code code_from_http_status(int status);  // of several codes the general one; kInternal for what is not known
bool is_retryable(Code code);

Error invalid_argument(std::string message, std::string param = {});
Error unavailable(std::string message);
Error internal_error(std::string message);

}  // namespace ditfleet
