#include "coordinator/gateway/backend/redis_error.h"

namespace ditfleet::gateway {

Error redis_error(const Error& error, const std::string& server, std::string_view unanswered, std::string_view full) {
  constexpr std::string_view kPart = "[redis] ";
  const std::string_view told = error.message;
  const std::string why = " (" + std::string(told.starts_with(kPart) ? told.substr(kPart.size()) : told) + ")";
  switch (error.code) {
    case Code::kUnavailable:
    case Code::kDeadlineExceeded:
      if (error.source == Source::kRedis)
        return unavailable(server + " rejects commands at the moment; nothing was changed, try again shortly" + why);
      if (error.code == Code::kUnavailable && error.source == Source::kHere) return error;
      return unavailable(server + " does not answer; " + std::string(unanswered));  // the log says why
    case Code::kPermissionDenied:
      return unavailable(server + " denies access; redis.url needs a user and password with sufficient permissions" +
                         why);
    case Code::kResourceExhausted:
      if (error.source == Source::kHere) return error;  // a quota
      return Error{error.code, server + " has reached its memory limit; " + std::string(full) + why, {}};
    default: return error;
  }
}

}  // namespace ditfleet::gateway
