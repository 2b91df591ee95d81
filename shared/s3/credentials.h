// Finds credentials as AWS' programs do: in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
// AWS_SESSION_TOKEN), in the file AWS_SHARED_CREDENTIALS_FILE or ~/.aws/credentials (profile AWS_PROFILE), from the
// container's role (AWS_CONTAINER_CREDENTIALS_FULL_URI or _RELATIVE_URI) or the instance's (IMDSv2).
#pragma once

#include "shared/core/http_client.h"
#include "shared/core/result.h"
#include "shared/s3/signature.h"

namespace ditfleet::s3 {

// Not thread-safe.
class CredentialChain {
 public:
  explicit CredentialChain(HttpClient& client) : client_(client) {}

  // Those in use, renewed five minutes before they expire; those of a file every minute. Waits at most some seconds.
  // kUnavailable: there are none; the message says where they were looked for.
  asio::awaitable<Result<Credentials>> get();
  // The store has refused them: the next get() asks for new ones.
  void renew() { renew_ms_ = 0; }
  // Those in use; without an id before the first get().
  const Credentials& known() const { return known_; }

 private:
  asio::awaitable<Result<Credentials>> find();
  asio::awaitable<Result<Credentials>> of_container();
  asio::awaitable<Result<Credentials>> of_instance();

  HttpClient& client_;
  Credentials known_;
  std::int64_t renew_ms_ = 0;
};

// The profile's part of a credentials file: lines `name = value` after [profile], comments after # and ;. kNotFound: it
// has no such profile. kInvalidArgument: the profile lacks a key. For tests.
Result<Credentials> credentials_in(std::string_view file, const std::string& profile);
// The answer of a metadata service. kUnavailable: it is none. For tests.
Result<Credentials> credentials_of_answer(const std::string& json);

}  // namespace ditfleet::s3
