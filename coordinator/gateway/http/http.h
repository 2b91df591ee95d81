// HTTP messages as plain values for routes and handlers. Only the server depends on the HTTP library.
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

#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::gateway {

namespace asio = boost::asio;

using NameValues = std::vector<std::pair<std::string, std::string>>;

// A request body that the handler reads piece by piece, because it may not fit into memory.
class BodyReader {
 public:
  virtual ~BodyReader() = default;
  // The Content-Length; empty for a chunked body.
  virtual std::optional<std::uint64_t> length() const = 0;
  // The next bytes, at most 256 KiB; empty at the end.
  // Errors: kUnavailable (the client is gone), kDeadlineExceeded (the client is too slow; answer 408),
  // kInvalidArgument (not valid HTTP).
  virtual asio::awaitable<Result<std::string>> read() = 0;
};

struct Request {
  std::string method;                 // "GET", as sent
  std::vector<std::string> segments;  // of the path, percent-decoded; "/" has none
  bool trailing_slash = false;
  NameValues query;  // percent-decoded, in order
  NameValues headers;
  std::string body;
  bool from_loopback = false;               // the client, or a proxy, is on this host
  std::shared_ptr<BodyReader> stream = {};  // if set, the body is read from here and `body` is empty

  // The first header of that name, ignoring case; empty if absent.
  std::string_view header(std::string_view name) const;
  bool has_header(std::string_view name) const { return count_headers(name) > 0; }
  std::size_t count_headers(std::string_view name) const;
  std::optional<std::string> query_value(std::string_view name) const;
  std::string path() const;  // for messages
};

// Fills segments, trailing_slash and query from a request target ("/a/b?c=d").
// kInvalidArgument: not an absolute path, a broken percent escape, invalid UTF-8 or a NUL.
Result<void> parse_target(std::string_view target, Request& request);

// For ASCII letters.
std::string lower_case(std::string_view text);
bool same_name(std::string_view a, std::string_view b);  // ignores case

// The value of ?limit= for a list with at most `most` entries per page. `note` ends the error message.
Result<int> parse_limit(std::string_view text, int most, const std::string& note = {});

// The client of a response that is not available immediately.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual bool gone() const = 0;
  // Sets the callback that runs once, on the executor, when the client disconnects. An empty one removes it.
  virtual void when_gone(std::function<void()> callback) = 0;
  // For a stream only. False: the client is gone and nothing more will arrive.
  virtual asio::awaitable<bool> write(std::string bytes) = 0;
  // Closes the connection, so that the client sees an incomplete response.
  virtual void abort() = 0;
};

struct Response {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  NameValues headers;

  // At most one of these two is set. `later` returns the real response when it is available; the server watches the
  // connection meanwhile. `stream` writes the body piece by piece after this status and these headers. The function
  // must outlive the coroutine that it returns.
  std::function<asio::awaitable<Response>(Sink&)> later;
  std::function<asio::awaitable<void>(Sink&)> stream;
  std::optional<std::uint64_t> stream_bytes = {};  // that `stream` writes, if known; also the length that HEAD reports
  // Keep-alive bytes of a stream, which clients ignore. They detect half-closed clients that stopped reading.
  std::string filler = {};

  Response& with(std::string name, std::string value) {
    headers.emplace_back(std::move(name), std::move(value));
    return *this;
  }
};

// Whether an If-None-Match field matches the quoted tag: a list, weak tags or * (RFC 9110 §13.1.2). If-Match compares
// strongly: a weak tag never matches (§13.1.1).
bool names_etag(std::string_view field, std::string_view etag, bool strongly = false);

// Bytes that never change, which clients may keep for an hour; 304 if the request names the quoted tag.
Response bytes_response(const Request& request, std::string bytes, std::string media_type, const std::string& etag);

struct ByteRange {
  std::int64_t first = 0, size = 0;
};
// The part of `size` bytes that a Range field selects (RFC 9110 §14.2). Nothing for a field without exactly one valid
// range of bytes, which is to be ignored. A part of size 0 is one that cannot be served; answer 416.
std::optional<ByteRange> parse_range(std::string_view field, std::int64_t size);

// "Application/JSON ; charset=utf-8" → "application/json"
std::string media_type_of(std::string_view content_type);

Response json_response(int status, const json::object& body);
json::value text_or_null(std::string_view text);  // null for an empty text

}  // namespace ditfleet::gateway
