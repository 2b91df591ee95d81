// Feed: subscribes to the shard's channels on a connection of its own. Messages are missed only while that connection
// is down or not yet subscribed. Its generation shows that, and the next batch has a gap.
#include <algorithm>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>
#include <vector>

#include "shared/queue/calls.h"
#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {
constexpr std::chrono::milliseconds kSlice{100};
constexpr std::chrono::seconds kLeastWait{2};
constexpr std::size_t kMostWaiting = 200'000;  // events that were not fetched; more are dropped, which is a gap
}  // namespace

class Feed::Impl {
 public:
  Impl(const std::shared_ptr<redis::Connection>& like, int shard, bool with_steps)
      : keys_(shard),
        with_steps_(with_steps),
        connection_(redis::Connection::create(like->executor(), like->options())) {
    connection_->on_push([state = state_](redis::Reply push) { state->take(push); });
    connection_->start();
  }
  ~Impl() { connection_->stop(); }

  asio::awaitable<Result<Batch>> next(std::chrono::milliseconds block) {
    const Deadline deadline = Deadline::after(block);
    const auto state = state_;
    for (;;) {
      if (subscribed_ == 0 || connection_->generation() != subscribed_) {
        // Also the first time: the follower must read what happened before.
        auto subscribed =
            co_await subscribe(Deadline::after(std::max<Deadline::Clock::duration>(deadline.left(), kLeastWait)));
        if (!subscribed) co_return subscribed.error();
        state->gap = true;
      }
      if (!state->events.empty() || state->gap) break;
      if (deadline.passed()) {
        if (connection_->connected()) break;
        co_return unavailable("[queue] the feed lost its connection to " + connection_->options().endpoint.display());
      }
      // Wakes up regularly to notice a reconnect.
      asio::steady_timer timer(connection_->executor(),
                               std::min(deadline.time_point(), Deadline::Clock::now() + kSlice));
      state->alarm = &timer;
      boost::system::error_code ignored;
      co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
      state->alarm = nullptr;
    }
    Batch batch;
    batch.gap = std::exchange(state->gap, false);
    batch.events = std::exchange(state->events, {});
    co_return batch;
  }

 private:
  // Shared with the connection's handler.
  struct State {
    std::vector<Event> events;
    bool gap = false;
    asio::steady_timer* alarm = nullptr;

    // The third element of a message is the entry's id and its events, one per line.
    void take(const redis::Reply& push) {
      if (push.elements.size() < 3) return;
      std::string_view lines = push.elements[2].text;
      if (events.size() > kMostWaiting) {
        events.clear();
        gap = true;
      }
      const std::string id(take_part(lines, '\n'));
      while (!lines.empty()) {
        if (auto event = parse_feed_line(id, take_part(lines, '\n'))) {
          append_events(std::move(*event), events);
        } else {
          gap = true;
        }
      }
      if (alarm != nullptr) alarm->cancel();
    }
  };

  asio::awaitable<Result<void>> subscribe(Deadline deadline) {
    const auto feed = co_await connection_->execute(redis::Command("SUBSCRIBE") << keys_.feed_channel(), deadline);
    if (!feed) co_return feed.error();
    const std::uint64_t generation = connection_->generation();
    if (with_steps_) {
      const auto steps = co_await connection_->execute(redis::Command("SUBSCRIBE") << keys_.steps_channel(), deadline);
      if (!steps) co_return steps.error();
    }
    subscribed_ = connection_->generation() == generation ? generation : 0;
    if (subscribed_ == 0) co_return unavailable("[queue] the feed lost its connection while it subscribed");
    co_return Result<void>();
  }

  Keys keys_;
  bool with_steps_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::shared_ptr<redis::Connection> connection_;
  std::uint64_t subscribed_ = 0;
};

Feed::Feed(std::shared_ptr<redis::Connection> like, int shard, bool with_steps)
    : impl_(std::make_shared<Impl>(like, shard, with_steps)) {}
Feed::~Feed() = default;

asio::awaitable<Result<Feed::Batch>> Feed::next(std::chrono::milliseconds block) {
  const auto impl = impl_;
  co_return co_await impl->next(block);
}

}  // namespace ditfleet::queue
