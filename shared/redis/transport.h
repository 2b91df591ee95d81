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

// Not thread-safe. Can be opened only once.
class Transport {
 public:
  static std::unique_ptr<Transport> create(asio::any_io_executor executor, const Endpoint& endpoint);
  virtual ~Transport() = default;

  // Resolves and connects. With TLS, also verifies the certificate and the host name.
  virtual asio::awaitable<boost::system::error_code> open() = 0;
  // Waits for bytes. Returns asio::error::eof at the end of the stream.
  virtual asio::awaitable<std::pair<boost::system::error_code, std::size_t>> read_some(asio::mutable_buffer buffer) = 0;
  // Writes the whole buffer, which must stay valid until `done` is called. Only one write may be outstanding.
  virtual void write(asio::const_buffer buffer, std::function<void(boost::system::error_code)> done) = 0;
  // Cancels pending operations with operation_aborted. May be called at any time and repeatedly.
  virtual void close() = 0;
};

}  // namespace ditfleet::redis
