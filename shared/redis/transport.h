// The socket of a connection: TCP, TLS over TCP, or a unix socket.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/buffer.hpp>
#include <boost/system/error_code.hpp>
#include <functional>
#include <memory>

#include "shared/redis/connection.h"

namespace ditfleet::redis {

// Not thread safe. Opened once and closed once.
class Transport {
 public:
  static std::unique_ptr<Transport> create(asio::any_io_executor executor, const Endpoint& endpoint);
  virtual ~Transport() = default;

  // Resolves and connects. With TLS, also verifies the certificate and the host name.
  virtual asio::awaitable<boost::system::error_code> open() = 0;
  // Waits for some bytes. At the end of the stream: asio::error::eof.
  virtual asio::awaitable<std::pair<boost::system::error_code, std::size_t>> read_some(asio::mutable_buffer buffer) = 0;
  // Writes all of it. One write at a time; `buffer` must live until `done` is called.
  virtual void write(asio::const_buffer buffer, std::function<void(boost::system::error_code)> done) = 0;
  // Ends pending operations with operation_aborted. May be called at any time and more than once.
  virtual void close() = 0;
};

}  // namespace ditfleet::redis
