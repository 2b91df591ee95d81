// Bytes from Redis → Reply values, by hiredis' incremental RESP2 parser.
#pragma once

#include <optional>
#include <string_view>

#include "shared/core/result.h"
#include "shared/redis/connection.h"

struct redisReader;

namespace ditfleet::redis {

// Not thread safe. One per established connection: a parser that saw a protocol error stays broken.
class ReplyReader {
 public:
  ReplyReader();
  ~ReplyReader();
  ReplyReader(const ReplyReader&) = delete;
  ReplyReader& operator=(const ReplyReader&) = delete;

  // Feed at most 64 KiB at a time: the parser's buffer handling is quadratic in what is fed at once.
  void feed(std::string_view bytes);
  // The next whole reply; nothing when more bytes are needed. kDataCorrupt: not RESP2.
  Result<std::optional<Reply>> next();

 private:
  redisReader* reader_;
};

// The Error that a server's error text ("WRONGTYPE Operation against …") stands for; see
// Connection::execute. Errors of DiTFleet's own Functions: EPOCH, CONFLICT → kConflict; NOTFOUND →
// kNotFound; BADARG → kInvalidArgument.
Error error_of_reply(std::string_view text);
// Whether that is where the error comes from, by one of the words that Redis or a Function of ours begins with: it was
// answered, and what was asked for was not done. False, too, for a connection that broke: what became of it is not
// known.
bool is_refusal(const Error& error);

}  // namespace ditfleet::redis
