// HTTP client of the command line: requests and event streams, through libcurl.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/cli/command.h"
#include "coordinator/cli/sse_parser.h"
#include "shared/core/json.h"
#include "shared/core/result.h"

namespace ditfleet::cli {

struct HttpResponse {
  long status = 0;
  std::string content_type, body;
};

// Not thread-safe; all calls block.
class HttpClient {
 public:
  explicit HttpClient(const Target& target);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // `path` is relative to the service ("/v1/jobs") or an absolute URL. Returns a response of any status.
  // Errors: kUnavailable (no connection), kDeadlineExceeded, kCanceled (interrupted() was true).
  Result<HttpResponse> request(const std::string& method, const std::string& path, const std::string& body = {},
                               std::chrono::milliseconds timeout = std::chrono::seconds(30),
                               const std::vector<std::string>& headers = {});
  // As request(), but parses a JSON response. A status of 400 or more is an error with the service's message and a code
  // that matches the status.
  Result<json::value> json(const std::string& method, const std::string& path, const std::string& body = {},
                           const std::vector<std::string>& headers = {});

  // What is sent before a file, and where the file begins.
  struct Head {
    std::string bytes;
    std::uint64_t skip = 0;
  };
  // Sends a file of any size as application/octet-stream. `headers` are of the form "Name: value".
  // Errors: those of json(); kNotFound or kUnavailable (the file cannot be read), kInvalidArgument (a pipe or device).
  // Gives up after a minute without progress.
  Result<json::value> send_file(const std::string& method, const std::string& path, const std::string& file,
                                const std::vector<std::string>& headers = {}, const Head& head = {"", 0});

  enum class Next { kGoOn, kStop };
  // Follows an event stream from the event after `last_event_id` (empty: from the beginning) until it ends, `on_event`
  // returns kStop, or no event arrives for `silence` (0: no limit). Errors: those of json().
  Result<void> events(const std::string& path, std::string& last_event_id, std::chrono::milliseconds silence,
                      const std::function<Next(const ServerEvent&)>& on_event);

 private:
  Result<json::value> json_of(const HttpResponse& response, const std::string& method, const std::string& path) const;
  struct Handle;
  std::unique_ptr<Handle> handle_;
  Target target_;
};

// As long as an object of this class exists, SIGINT sets a flag instead of ending the process. Requests then return
// kCanceled.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  static bool interrupted();
  static void clear();
};

// The message and param of {"error": {"message": …, "param": …}}, or the status if the body has none.
Error error_of(const HttpResponse& response, const std::string& what);

// Encodes one path segment or one query value.
std::string percent_encoded(const std::string& text);

}  // namespace ditfleet::cli
