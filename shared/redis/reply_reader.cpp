#include "shared/redis/reply_reader.h"

#include <hiredis/read.h>

#include <array>
#include <utility>

namespace ditfleet::redis {
namespace {

// hiredis calls these to build a Reply in place. An array allocates its elements at once.
Reply* place(const redisReadTask* task) {
  if (task->parent == nullptr) return new Reply;
  auto* parent = static_cast<Reply*>(task->parent->obj);
  return &parent->elements[static_cast<std::size_t>(task->idx)];
}

void* create_string(const redisReadTask* task, char* text, size_t size) {
  Reply* reply = place(task);
  reply->type = task->type == REDIS_REPLY_ERROR    ? Reply::Type::kError
                : task->type == REDIS_REPLY_STATUS ? Reply::Type::kStatus
                                                   : Reply::Type::kString;
  reply->text.assign(text, size);
  return reply;
}

void* create_array(const redisReadTask* task, int size) {
  Reply* reply = place(task);
  reply->type = Reply::Type::kArray;
  reply->elements.resize(static_cast<std::size_t>(size));
  return reply;
}

void* create_integer(const redisReadTask* task, long long value) {
  Reply* reply = place(task);
  reply->type = Reply::Type::kInteger;
  reply->integer = value;
  return reply;
}

void* create_nil(const redisReadTask* task) { return place(task); }

// hiredis frees only roots, which own their elements.
void free_object(void* reply) { delete static_cast<Reply*>(reply); }

redisReplyObjectFunctions kFunctions = {create_string, create_array, create_integer, create_nil, free_object};

// The code for the first word of an error reply.
Code code_of(std::string_view word) {
  static constexpr std::array<std::pair<std::string_view, Code>, 18> kCodes = {{
      {"LOADING", Code::kUnavailable},
      {"MASTERDOWN", Code::kUnavailable},
      {"READONLY", Code::kUnavailable},
      {"CLUSTERDOWN", Code::kUnavailable},
      {"BUSY", Code::kUnavailable},
      {"MISCONF", Code::kUnavailable},     // its disk is full
      {"NOREPLICAS", Code::kUnavailable},  // fewer than min-replicas-to-write
      {"TRYAGAIN", Code::kUnavailable},
      {"MOVED", Code::kUnavailable},  // a cluster that was split
      {"ASK", Code::kUnavailable},
      {"OOM", Code::kResourceExhausted},
      {"NOAUTH", Code::kPermissionDenied},
      {"NOPERM", Code::kPermissionDenied},
      {"WRONGPASS", Code::kPermissionDenied},
      {"EPOCH", Code::kConflict},
      {"CONFLICT", Code::kConflict},
      {"NOTFOUND", Code::kNotFound},
      {"BADARG", Code::kInvalidArgument},
  }};
  for (const auto& [known, code] : kCodes) {
    if (word == known) return code;
  }
  return Code::kInternal;
}

}  // namespace

ReplyReader::ReplyReader() : reader_(redisReaderCreateWithFunctions(&kFunctions)) {
  // Keeps an empty buffer up to this size. With the default of 16 KB each larger reply allocates again.
  reader_->maxbuf = 256 * 1024;
}
ReplyReader::~ReplyReader() { redisReaderFree(reader_); }

void ReplyReader::feed(std::string_view bytes) { redisReaderFeed(reader_, bytes.data(), bytes.size()); }

Result<std::optional<Reply>> ReplyReader::next() {
  void* raw = nullptr;
  if (redisReaderGetReply(reader_, &raw) != REDIS_OK) {
    return data_corrupt(std::string("[redis] the reply is not RESP2: ") + reader_->errstr +
                        "; is this a Redis, and TLS on both sides or neither?");
  }
  if (raw == nullptr) return std::optional<Reply>();
  const std::unique_ptr<Reply> reply(static_cast<Reply*>(raw));
  return std::optional<Reply>(std::move(*reply));
}

Error error_of_reply(std::string_view text) {
  // Redis has no words of its own for these.
  const bool no_function = text == "ERR Function not found";
  const bool no_permission = text.find("The user executing the script can't ") != std::string_view::npos;
  const std::string_view word = no_function ? "NOFUNCTION" : no_permission ? "NOPERM" : text.substr(0, text.find(' '));
  return {.code = code_of(word),
          .message = "[redis] " + std::string(text),
          .source = Source::kRedis,
          .kind = std::string(word)};
}

}  // namespace ditfleet::redis
