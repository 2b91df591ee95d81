#include "coordinator/gateway/http/streamed_body.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http/error.hpp>
#include <boost/beast/http/read.hpp>
#include <tuple>

#include "coordinator/gateway/http/reading.h"

namespace ditfleet::gateway {

namespace http = boost::beast::http;
using boost::system::error_code;

StreamedBody::StreamedBody(std::shared_ptr<Connection> connection, http::request_parser<http::empty_body>&& head,
                           std::chrono::milliseconds patience, std::chrono::milliseconds grace)
    : connection_(std::move(connection)),
      parser_(std::move(head)),
      patience_(patience),
      left_(grace),
      expects_(expects_continue(parser_.get())) {
  parser_.body_limit(boost::none);
  if (const auto length = parser_.content_length()) length_ = *length;
  parser_.eager(false);
}

asio::awaitable<Result<std::string>> StreamedBody::read() {
  if (failed_) co_return unavailable("the client has disconnected or was too slow");
  std::string piece;
  if (parser_.is_done()) co_return piece;
  Connection::Stream& stream = connection_->stream();
  error_code ec;
  const ReadLimit limit(connection_, std::clamp(left_, std::chrono::milliseconds(1), patience_));
  // A stalled upload makes room for another connection, as an idle one does.
  const auto begun = std::chrono::steady_clock::now();
  connection_->uploading = true;
  connection_->waits_since = begun;
  if (expects_) {  // not earlier, so that a request refused by its headers sends no body
    expects_ = false;
    std::tie(ec, std::ignore) = co_await asio::async_write(stream, asio::buffer(kContinue), kTuple);
  }
  piece.resize(kPieceBytes);
  std::size_t got = 0;
  while (!ec && got == 0 && !parser_.is_done()) {
    parser_.get().body().data = piece.data();
    parser_.get().body().size = piece.size();
    std::tie(ec, std::ignore) = co_await http::async_read(stream, connection_->buffer(), parser_, kTuple);
    if (ec == http::error::need_buffer) ec = {};
    got = piece.size() - parser_.get().body().size;
  }
  connection_->uploading = false;
  connection_->waits_since.reset();
  left_ += std::chrono::milliseconds(static_cast<std::int64_t>(got) * 1000 / kSlowestBody);
  left_ -= std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun);
  if (ec) {
    failed_ = true;
    if (limit.passed())
      co_return Error{Code::kDeadlineExceeded, body_is_late().message + ", and at 16 KiB per second or more", {}};
    if (ec == http::error::buffer_overflow) co_return invalid_argument(describe(ec).message);
    if (is_protocol_error(ec)) co_return invalid_argument("the body is not valid HTTP/1.1: " + ec.message());
    co_return unavailable("the client disconnected before the end of the body");
  }
  piece.resize(got);
  co_return piece;
}

}  // namespace ditfleet::gateway
