// One client of the server: its socket, and what is watched on it while a response takes its time.
//
// Threads: those of the server (server.h).
#pragma once

#include <boost/asio/as_tuple.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core/basic_stream.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/rate_policy.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "coordinator/gateway/http/http.h"

namespace ditfleet::gateway {

constexpr auto kTuple = asio::as_tuple(asio::use_awaitable);

// What may lie in a connection's buffer: more than the headers may take. It bounds the lines in a body as well (a
// chunk's extensions, the trailers), of which the parser takes none before its end.
constexpr std::size_t kBufferBytes = 64u << 10;

class Connection final : public Sink {
 public:
  using tcp = asio::ip::tcp;
  using Stream = boost::beast::basic_stream<tcp, asio::any_io_executor, boost::beast::unlimited_rate_policy>;

  // write_timeout: of one write().
  Connection(tcp::socket socket, std::chrono::milliseconds write_timeout)
      : stream_(std::move(socket)), write_timeout_(write_timeout) {}

  Stream& stream() { return stream_; }
  boost::beast::flat_buffer& buffer() { return buffer_; }
  bool idle = false;  // between two requests
  // Of the answer that is being written, and since when it is.
  std::size_t unread_bytes = 0;
  std::chrono::steady_clock::time_point writes_since;
  // Since when it has owed a request's head: the end of the request before, or its beginning. Empty while one is
  // served.
  std::optional<std::chrono::steady_clock::time_point> waits_since;

  // --- Sink ---
  bool gone() const override { return gone_; }
  void when_gone(std::function<void()> callback) override;
  asio::awaitable<bool> write(std::string bytes) override;
  void set_chunked(bool chunked) { chunked_ = chunked; }

  // Watches for the client to go while nothing is read from it. One that has sent the next request already is not
  // watched any more. One that only sends no more (it shut that side down, or closed: TCP says the same) is sent
  // `probe`, which its reader passes over; if it is gone its reset follows. With an empty probe that has to wait for
  // the next write.
  void watch(const std::shared_ptr<Connection>& self, std::string_view probe);
  void unwatch();
  void close();

 private:
  void wait_for_end_of_requests(const std::shared_ptr<Connection>& self, unsigned watch);
  void wait_for_reset(const std::shared_ptr<Connection>& self, unsigned watch);
  void leave();
  void send_probe();

  Stream stream_;
  std::chrono::milliseconds write_timeout_;
  boost::beast::flat_buffer buffer_{kBufferBytes};
  std::function<void()> when_gone_;
  std::string probe_;
  bool gone_ = false, chunked_ = false, writing_ = false;
  unsigned watch_ = 0;      // which one: one that has ended changes nothing any more
  bool probe_due_ = false;  // behind the write in progress
};

}  // namespace ditfleet::gateway
