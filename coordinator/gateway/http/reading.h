// Helpers for reading a request: its time limit, and the problems that the server answers with an error status.
//
// Call every function on the server's executor (server.h).
#pragma once

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/system/error_code.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/http/connection.h"

namespace ditfleet::gateway {

// Cancels the connection's reads when the limit passes. The stream's expires_after() would close the socket; this class
// leaves the connection open for a response. Replaces any limit of the stream as long as it exists.
class ReadLimit {
 public:
  ReadLimit(std::shared_ptr<Connection> connection, std::chrono::milliseconds limit);
  ~ReadLimit();
  ReadLimit(const ReadLimit&) = delete;
  ReadLimit& operator=(const ReadLimit&) = delete;

  // Whether the limit is why a read failed with operation_aborted.
  bool passed() const;

 private:
  struct Timer;
  std::shared_ptr<Timer> timer_;  // shared with its handler
};

struct ReadProblem {
  int status;
  std::string message, code;
};

// Whether the client sent invalid HTTP, as opposed to disconnecting or timing out.
bool is_protocol_error(const boost::system::error_code& ec);
ReadProblem describe(const boost::system::error_code& ec);  // of a protocol error other than body_limit

// The problem of a request head, or body, that did not arrive within its limit.
ReadProblem head_is_late();
ReadProblem body_is_late();

// The problem of a request head that Beast accepts but the server rejects, if any.
std::optional<ReadProblem> problem_of(const boost::beast::http::request_header<>& head);

// The request without its body. Errors: those of parse_target().
Result<Request> request_of(const boost::beast::http::request_header<>& head);

// Whether the client waits for "100 Continue" before it sends the body. False for HTTP/1.0 clients, which would treat
// the interim response as the final one (RFC 9110 §10.1.1).
bool expects_continue(const boost::beast::http::request_header<>& head);
constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

}  // namespace ditfleet::gateway
