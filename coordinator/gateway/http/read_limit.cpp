#include "coordinator/gateway/http/read_limit.h"

#include <boost/asio/steady_timer.hpp>
#include <utility>

namespace ditfleet::gateway {
namespace {

// A read that is between two operations on the socket is not hit: it is once more.
constexpr std::chrono::milliseconds kOnceMore{20};

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
      self->wait(kOnceMore);
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

}  // namespace ditfleet::gateway
