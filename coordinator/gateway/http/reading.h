// Reading a request: its time limit, and the answers to bytes that are not an acceptable request.
//
// Threads: the server's (server.h).
#pragma once

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/system/error_code.hpp>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "coordinator/gateway/http/connection.h"

namespace ditfleet::gateway {

// Cancels the connection's reads when the limit passes. Unlike the stream's expires_after(), which closes the socket,
// it leaves the connection open for an answer. Replaces any limit of the stream while it exists.
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
ReadProblem describe(const boost::system::error_code& ec);  // of a protocol error

// The answers to a head, or a body, that did not arrive within its limit.
ReadProblem head_is_late();
ReadProblem body_is_late();

// What is wrong with a head that Beast accepts.
std::optional<ReadProblem> problem_of(const boost::beast::http::request_header<>& head);

// Whether the client waits for "100 Continue" before it sends the body. False for HTTP/1.0, which would take the
// interim response for the final one (RFC 9110 §10.1.1).
bool expects_continue(const boost::beast::http::request_header<>& head);

}  // namespace ditfleet::gateway
