// AWS Signature Version 4 for S3:
// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html and sigv4-query-string-auth.html.
// Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

namespace ditfleet::s3 {

struct Credentials {
  std::string id, secret;
  std::string token;            // of temporary ones; else empty
  std::int64_t expires_ms = 0;  // since 1970; 0: never
};

struct SignedParts {
  std::string method, host, path;                   // path: encoded, with the slash at its beginning
  std::map<std::string, std::string> query;         // names and values, not encoded
  std::map<std::string, std::string> headers = {};  // besides host, by name in lower case
  std::string payload_sha256 = "UNSIGNED-PAYLOAD";
};

// Everything but letters, digits, '-', '.', '_' and '~' as %XX; with `path`, slashes stay.
std::string uri_encoded(std::string_view text, bool path = false);
// "a=1&b=%20"
std::string canonical_query(const std::map<std::string, std::string>& query);
// "20130524T000000Z"
std::string amz_date(std::int64_t unix_s);

// The value of the Authorization header. The request must have all `headers`, among them x-amz-date, which is
// amz_date(at_s), x-amz-content-sha256, and x-amz-security-token for credentials with a token.
std::string authorization(const SignedParts& parts, const Credentials& credentials, const std::string& region,
                          std::int64_t at_s);

// The query of a URL that permits this request for `life_s` seconds, to everybody who has it.
std::string presigned_query(SignedParts parts, const Credentials& credentials, const std::string& region,
                            std::int64_t at_s, std::int64_t life_s);

}  // namespace ditfleet::s3
