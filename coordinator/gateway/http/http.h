// HTTP messages as plain values: what routes and handlers speak. Only server.cpp knows the library that reads
// and writes them.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::gateway {

namespace asio = boost::asio;

using Fields = std::vector<std::pair<std::string, std::string>>;

// A body that is read piece by piece by whoever handles the request, for what is too large to hold.
class BodyReader {
 public:
  virtual ~BodyReader() = default;
  // As the request announces it; nothing for a chunked body.
  virtual std::optional<std::uint64_t> length() const = 0;
  // The next bytes, at most 256 KiB; empty: the end. kUnavailable: the client is gone. kDeadlineExceeded: it is too
  // slow; to be answered 408. kInvalidArgument: what it sends is no HTTP.
  virtual asio::awaitable<Result<std::string>> read() = 0;
};

struct Request {
  std::string method;                 // "GET", as sent
  std::vector<std::string> segments;  // of the path, percent-decoded; "/" has none
  bool trailing_slash = false;
  Fields query;  // percent-decoded, in order
  Fields headers;
  std::string body;
  std::shared_ptr<BodyReader> stream = {};  // set: `body` is empty, and this has it

  // The first header of that name, whatever its case; empty if absent.
  std::string_view header(std::string_view name) const;
  bool has_header(std::string_view name) const { return count_headers(name) > 0; }
  std::size_t count_headers(std::string_view name) const;  // lines with that name
  std::optional<std::string> query_value(std::string_view name) const;
  std::string path() const;  // for messages
};

// Fills segments, trailing_slash and query from a request target ("/a/b?c=d").
// kInvalidArgument: not an absolute path, a broken percent escape, invalid UTF-8 or a NUL.
Result<void> parse_target(std::string_view target, Request& request);

// The client of a response that takes its time.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual bool gone() const = 0;
  // Called once, from the executor, when the client closes its connection. Replaces an earlier callback;
  // an empty one removes it.
  virtual void when_gone(std::function<void()> callback) = 0;
};

// Where a stream's bytes go. False: the client is gone and nothing more will arrive.
class Sink : public Peer {
 public:
  virtual asio::awaitable<bool> write(std::string bytes) = 0;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  Fields headers;
  bool close = false;  // the connection ends with this response

  // At most one of these two is set. `later` gives the real response when it is there (the connection is
  // watched meanwhile); `stream` writes the body piece by piece under this status and these headers.
  std::function<asio::awaitable<Response>(Peer&)> later;
  std::function<asio::awaitable<void>(Sink&)> stream;
  std::string filler =
      {};  // of a stream: bytes that its reader passes over; shows whether one that sends no more still reads

  Response& with(std::string name, std::string value) {
    headers.emplace_back(std::move(name), std::move(value));
    return *this;
  }
};

// Whether an If-None-Match field names the quoted tag: a list, weak tags, or * (RFC 9110 §13.1.2). An If-Match field
// must name it itself, `strongly`: what was made weak on its way is not it (§13.1.1).
bool names_etag(std::string_view field, std::string_view etag, bool strongly = false);

// "Application/JSON ; charset=utf-8" → "application/json"
std::string media_type_of(std::string_view content_type);

Response json_response(int status, std::string body);

}  // namespace ditfleet::gateway
