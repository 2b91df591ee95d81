// A request's body of any size, read piece by piece by the handler.
#pragma once

#include <boost/beast/http/buffer_body.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "coordinator/gateway/http/connection.h"
#include "coordinator/gateway/http/http.h"

namespace ditfleet::gateway {

inline constexpr std::int64_t kSlowestBody = 16 << 10;  // bytes per second that a client must send on average

class StreamedBody final : public BodyReader {
 public:
  // `head`: the parsed part of the request. `patience`: the time limit for each piece. `grace`: what all waits together
  // may take longer than at kSlowestBody.
  StreamedBody(std::shared_ptr<Connection> connection,
               boost::beast::http::request_parser<boost::beast::http::empty_body>&& head,
               std::chrono::milliseconds patience, std::chrono::milliseconds grace);

  std::optional<std::uint64_t> length() const override { return length_; }
  asio::awaitable<Result<std::string>> read() override;
  bool done() const { return parser_.is_done(); }

 private:
  static constexpr std::size_t kPieceBytes = 256 << 10;
  std::shared_ptr<Connection> connection_;
  boost::beast::http::request_parser<boost::beast::http::buffer_body> parser_;
  std::chrono::milliseconds patience_;
  std::chrono::milliseconds left_;  // until the client is too slow
  std::optional<std::uint64_t> length_;
  bool expects_, failed_ = false;
};

}  // namespace ditfleet::gateway
