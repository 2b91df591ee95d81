#include "coordinator/gateway/http/reading.h"

#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/error.hpp>
#include <utility>

namespace ditfleet::gateway {

namespace beast = boost::beast;
namespace http = boost::beast::http;

namespace {

// Canceling misses a read that is between two operations on the socket, so it is repeated at this interval.
constexpr std::chrono::milliseconds kCancelAgain{20};

}  // namespace

struct ReadLimit::Timer : std::enable_shared_from_this<Timer> {
  explicit Timer(std::shared_ptr<Connection> c)
      : connection(std::move(c)), timer(connection->stream().get_executor()) {}
  void wait(std::chrono::milliseconds time) {
    timer.expires_after(time);
    timer.async_wait([self = shared_from_this()](const boost::system::error_code& ec) {
      if (ec || self->over) return;
      self->passed = true;
      boost::system::error_code ignored;
      self->connection->stream().socket().cancel(ignored);
      self->wait(kCancelAgain);
    });
  }
  std::shared_ptr<Connection> connection;
  asio::steady_timer timer;
  bool passed = false, over = false;
};

ReadLimit::ReadLimit(std::shared_ptr<Connection> connection, std::chrono::milliseconds limit)
    : timer_(std::make_shared<Timer>(std::move(connection))) {
  timer_->connection->stream().expires_never();
  timer_->wait(limit);
}

ReadLimit::~ReadLimit() {
  timer_->over = true;
  timer_->timer.cancel();
}

bool ReadLimit::passed() const { return timer_->passed; }

bool is_protocol_error(const boost::system::error_code& ec) {
  return ec.category() == make_error_code(http::error::end_of_stream).category() && ec != http::error::end_of_stream &&
         ec != http::error::partial_message;
}

ReadProblem describe(const boost::system::error_code& ec) {
  if (ec == http::error::header_limit) return {431, "the headers are larger than 16 KiB", "headers_too_large"};
  if (ec == http::error::buffer_overflow)
    return {431, "the chunk extensions or trailers are larger than 64 KiB; send none", "headers_too_large"};
  if (ec == http::error::bad_version) return {505, "unsupported HTTP version; use HTTP/1.0 or HTTP/1.1", "bad_version"};
  return {400, "this is not a valid HTTP/1.1 request", "bad_request"};
}

ReadProblem head_is_late() {
  return {408, "the request's headers did not arrive in time; send them without pauses", "request_timeout"};
}

ReadProblem body_is_late() {
  return {408, "the request's body did not arrive in time; send it without pauses", "request_timeout"};
}

std::optional<ReadProblem> problem_of(const http::request_header<>& head) {
  if (head.version() == 11 && head.count(http::field::host) != 1)
    return ReadProblem{400, "an HTTP/1.1 request must have exactly one Host header", "bad_request"};
  const auto coding = head.find(http::field::transfer_encoding);
  if (coding != head.end() &&
      (head.count(http::field::transfer_encoding) != 1 || !beast::iequals(coding->value(), "chunked"))) {
    return ReadProblem{501, "the only supported Transfer-Encoding is chunked", "not_implemented"};
  }
  if (coding != head.end() && head.version() < 11) {
    return ReadProblem{400, "HTTP/1.0 does not support Transfer-Encoding; send a Content-Length or use HTTP/1.1",
                       "bad_request"};
  }
  return std::nullopt;
}

Result<Request> request_of(const http::request_header<>& head) {
  Request request;
  request.method = std::string(head.method_string());
  for (const auto& field : head) request.headers.emplace_back(field.name_string(), field.value());
  if (auto target = parse_target(std::string_view(head.target().data(), head.target().size()), request); !target)
    return target.error();
  return request;
}

bool expects_continue(const http::request_header<>& head) {
  return head.version() >= 11 && beast::iequals(head[http::field::expect], "100-continue");
}

}  // namespace ditfleet::gateway
