// What a client is told whose bytes are no request that the server takes.
#pragma once

#include <boost/beast/http/message.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/system/error_code.hpp>
#include <optional>

namespace ditfleet::gateway {

struct ReadProblem {
  int status;
  const char* message;
  const char* code;
};

// The client sent what is no HTTP, in contrast to: it went away, or took too long.
bool is_protocol_error(const boost::system::error_code& ec);
ReadProblem describe(const boost::system::error_code& ec);  // of a protocol error

// A head that began did not come in time, or came and its body did not.
ReadProblem head_is_late();
ReadProblem body_is_late();

// What is wrong with a head that Beast takes.
std::optional<ReadProblem> problem_of(const boost::beast::http::request_header<>& head);

// Whether the client holds its body back until it is told to go on. HTTP/1.0 knows nothing of that, whatever it sends:
// the interim answer would be taken for the answer (RFC 9110 §10.1.1).
bool expects_continue(const boost::beast::http::request_header<>& head);

}  // namespace ditfleet::gateway
