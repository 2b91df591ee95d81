// Feed: subscribes to the shard's channels on a connection of its own. Messages are missed only while that connection
// is down or not yet subscribed. Its generation shows that, and the next batch has a gap. A subscription may also be
// dead while its connection looks well: a firewall has dropped the flow, or it leads to an earlier primary. A probe, a
// message of one line on the feed's channel, shows that. It tests the whole way of an event.
#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <utility>
#include <vector>

#include "shared/core/ids.h"
#include "shared/core/task_group.h"
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
  Impl(const std::shared_ptr<redis::Connection>& like, int shard, bool with_steps,
       std::chrono::milliseconds probe_every)
      : keys_(shard),
        with_steps_(with_steps),
        probe_every_(probe_every),
        publisher_(like),
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
      probe();
      if (!state->events.empty() || state->gap) break;
      if (deadline.passed()) {
        if (connection_->connected()) break;
        co_return unavailable("[queue] the feed lost its connection to " + connection_->options().endpoint.display());
      }
      // Wakes up regularly to notice a reconnect.
      // Shared: a canceled caller leaves by an exception, and the next message still finds the timer.
      state->alarm = std::make_shared<asio::steady_timer>(
          connection_->executor(), std::min(deadline.time_point(), Deadline::Clock::now() + kSlice));
      boost::system::error_code ignored;
      co_await state->alarm->async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
    Batch batch;
    batch.gap = std::exchange(state->gap, false);
    batch.events = std::exchange(state->events, {});
    co_return batch;
  }

  bool hears() const {
    return connection_->connected() && subscribed_ != 0 && connection_->generation() == subscribed_ && !deaf_;
  }

 private:
  // Shared with the connection's handler.
  struct State {
    std::vector<Event> events;
    bool gap = false;
    std::shared_ptr<asio::steady_timer> alarm;
    const std::string probe = "probe " + new_nonce() + " ";
    std::int64_t probes = 0, published = 0, heard = 0;  // the latest that was made, was accepted, came back

    // The third element of a message is the entry's id and its events, one per line.
    void take(const redis::Reply& push) {
      if (push.elements.size() < 3) return;
      std::string_view lines = push.elements[2].text;
      heard = std::max(heard, lines.starts_with(probe) ? to_int(lines.substr(probe.size())) : published);
      if (lines.starts_with("probe ")) return;
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

  void probe() {
    const auto now = Deadline::Clock::now();
    if (now < next_probe_) return;
    next_probe_ = now + probe_every_;
    const std::int64_t missing = state_->published - state_->heard;
    deaf_ = missing > 0;
    if (missing > 1) {
      connection_->drop("the messages that this process publishes do not come back");
    } else {
      asio::co_spawn(publisher_->executor(), publish(publisher_, keys_.feed_channel(), state_),
                     end_process_on_exception("feed probe"));
    }
  }
  // A probe that Redis did not accept says nothing about the subscription.
  static asio::awaitable<void> publish(std::shared_ptr<redis::Connection> publisher, std::string channel,
                                       std::shared_ptr<State> state) {
    const std::int64_t number = ++state->probes;
    const auto done = co_await publisher->execute(
        redis::Command("PUBLISH") << channel << state->probe + std::to_string(number), Deadline::after(kLeastWait));
    (done ? state->published : state->heard) = number;
  }

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
    state_->heard = state_->probes;
    deaf_ = false;
    co_return Result<void>();
  }

  Keys keys_;
  bool with_steps_, deaf_ = false;
  std::chrono::milliseconds probe_every_;
  Deadline::Clock::time_point next_probe_{};
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::shared_ptr<redis::Connection> publisher_, connection_;
  std::uint64_t subscribed_ = 0;
};

Feed::Feed(std::shared_ptr<redis::Connection> like, int shard, bool with_steps, std::chrono::milliseconds probe_every)
    : impl_(std::make_shared<Impl>(like, shard, with_steps, probe_every)) {}
Feed::~Feed() = default;
bool Feed::hears() const { return impl_->hears(); }

asio::awaitable<Result<Feed::Batch>> Feed::next(std::chrono::milliseconds block) {
  const auto impl = impl_;
  co_return co_await impl->next(block);
}

}  // namespace ditfleet::queue
