#include "coordinator/gateway/http/read_problem.h"

#include <boost/beast/core/string.hpp>
#include <boost/beast/http/error.hpp>

namespace ditfleet::gateway {

namespace beast = boost::beast;
namespace http = boost::beast::http;

bool is_protocol_error(const boost::system::error_code& ec) {
  return ec.category() == make_error_code(http::error::end_of_stream).category() && ec != http::error::end_of_stream &&
         ec != http::error::partial_message;
}

ReadProblem describe(const boost::system::error_code& ec) {
  if (ec == http::error::body_limit)
    return {413, "the body is larger than this service takes (gateway.max_body_bytes)", "payload_too_large"};
  if (ec == http::error::header_limit) return {431, "the headers are larger than 16 KiB", "headers_too_large"};
  if (ec == http::error::buffer_overflow)
    return {431, "a chunk's extensions, or the trailers, are larger than 64 KiB; send none", "headers_too_large"};
  if (ec == http::error::bad_version) return {505, "this is not HTTP/1.0 or HTTP/1.1", "bad_version"};
  return {400, "this is not a valid HTTP/1.1 request", "bad_request"};
}

ReadProblem head_is_late() {
  return {408, "the request's headers did not arrive in time; send them at once", "request_timeout"};
}

ReadProblem body_is_late() {
  return {408, "the request's body did not arrive in time; send it again, without pauses", "request_timeout"};
}

std::optional<ReadProblem> problem_of(const http::request_header<>& head) {
  if (head.version() == 11 && head.count(http::field::host) != 1)
    return ReadProblem{400, "an HTTP/1.1 request has one Host header", "bad_request"};
  const auto coding = head.find(http::field::transfer_encoding);
  if (coding != head.end() &&
      (head.count(http::field::transfer_encoding) != 1 || !beast::iequals(coding->value(), "chunked"))) {
    return ReadProblem{501, "the only Transfer-Encoding that is understood is chunked", "not_implemented"};
  }
  if (coding != head.end() && head.version() < 11) {
    return ReadProblem{400, "HTTP/1.0 has no Transfer-Encoding; send the body with a Content-Length, or HTTP/1.1",
                       "bad_request"};
  }
  return std::nullopt;
}

bool expects_continue(const http::request_header<>& head) {
  return head.version() >= 11 && beast::iequals(head[http::field::expect], "100-continue");
}

}  // namespace ditfleet::gateway
