// The command line's view of a gateway: plain requests and event streams, blocking, through libcurl.
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

// Not thread safe; all calls block.
class HttpClient {
 public:
  explicit HttpClient(const Target& target);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // `path` starts at the service ("/v1/jobs") or is a whole URL. Any status is a response. kUnavailable: no
  // answer, with the address; kDeadlineExceeded; kCanceled: interrupted() was true.
  Result<HttpResponse> request(const std::string& method, const std::string& path, const std::string& body = {},
                               std::chrono::milliseconds timeout = std::chrono::seconds(30),
                               const std::vector<std::string>& headers = {});
  // The same where an answer in JSON is expected: a status from 400 on is an Error with the service's
  // message, its code from the status.
  Result<json::value> json(const std::string& method, const std::string& path, const std::string& body = {},
                           const std::vector<std::string>& headers = {});

  // Sends a file as it is (application/octet-stream), of any size, with more headers ("Name: value"); errors as json().
  // One that cannot be read: kNotFound, kUnavailable; kInvalidArgument for a pipe or a device. Gives up when nothing
  // moves for a minute.
  Result<json::value> send_file(const std::string& method, const std::string& path, const std::string& file,
                                const std::vector<std::string>& headers = {});

  enum class Next { kGoOn, kStop };
  // Follows an event stream from after `last_event_id` (empty: the beginning) until it ends, `on_event` says
  // kStop, or nothing came for `silence` (0: whatever it takes). Errors as above, and the service's own.
  Result<void> events(const std::string& path, std::string& last_event_id, std::chrono::milliseconds silence,
                      const std::function<Next(const ServerEvent&)>& on_event);

 private:
  Result<json::value> json_of(const HttpResponse& response, const std::string& method, const std::string& path) const;
  struct Handle;
  std::unique_ptr<Handle> handle_;
  Target target_;
};

// SIGINT sets a flag instead of ending the process while one of these lives; requests then return kCanceled.
class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  static bool interrupted();
  static void clear();
};

// The message and param of {"error": {"message": …, "param": …}}, else of the status alone.
Error error_of(const HttpResponse& response, const std::string& what);

// For one segment of a path, or one value of a query.
std::string percent_encoded(std::string_view text);

}  // namespace ditfleet::cli
