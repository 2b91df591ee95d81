// Parses bytes from Redis into Reply values with hiredis' incremental RESP2 parser.
#pragma once

#include <optional>
#include <string_view>

#include "shared/core/result.h"
#include "shared/redis/connection.h"

struct redisReader;

namespace ditfleet::redis {

// Not thread-safe. Use a new reader for each established connection; a protocol error is permanent.
class ReplyReader {
 public:
  ReplyReader();
  ~ReplyReader();
  ReplyReader(const ReplyReader&) = delete;
  ReplyReader& operator=(const ReplyReader&) = delete;

  // Feed at most 64 KiB at a time: the parser's time is quadratic in the size of a feed.
  void feed(std::string_view bytes);
  // Returns the next complete reply, or nothing if more bytes are needed. kDataCorrupt: the bytes are not RESP2.
  Result<std::optional<Reply>> next();

 private:
  redisReader* reader_;
};

// The Error for an error reply ("WRONGTYPE Operation against …"), with source kRedis and its kind. README.md lists the
// codes.
Error error_of_reply(std::string_view text);

}  // namespace ditfleet::redis
