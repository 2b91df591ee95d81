// Measures how long each turn of an event loop takes: ditfleet_event_loop_stall_seconds, and a warning with the name of
// a task or route whose turn took 50 ms or more, because everything else waits meanwhile.
#pragma once

#include <boost/asio/execution.hpp>
#include <boost/asio/prefer.hpp>
#include <boost/asio/query.hpp>
#include <boost/asio/require.hpp>
#include <chrono>
#include <string_view>
#include <utility>

namespace ditfleet::telemetry {

// A handler that runs, on the loop's thread. Handlers may nest; the outermost one is the turn.
class Turn {
 public:
  // The text that `kind` and `name` view must be permanent. `name` may be empty.
  Turn(std::string_view kind, std::string_view name);
  ~Turn();
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::string_view kind_, name_;
  std::chrono::steady_clock::time_point began_;
};

// An executor that runs every handler as a Turn of the same name.
template <class Inner>
class TimedExecutor {
 public:
  TimedExecutor(Inner inner, std::string_view kind, std::string_view name)
      : inner_(std::move(inner)), kind_(kind), name_(name) {}

  template <class Handler>
  void execute(Handler&& handler) const {
    inner_.execute([kind = kind_, name = name_, handler = std::forward<Handler>(handler)]() mutable {
      const Turn turn(kind, name);
      std::move(handler)();
    });
  }

  bool operator==(const TimedExecutor&) const noexcept = default;

  template <class Property>
  requires boost::asio::can_query<const Inner&, Property>::value auto query(const Property& property) const
      -> decltype(boost::asio::query(std::declval<const Inner&>(), property)) {
    return boost::asio::query(inner_, property);
  }
  template <class Property>
  requires boost::asio::can_require<const Inner&, Property>::value auto require(const Property& property) const {
    return timed(boost::asio::require(inner_, property));
  }
  template <class Property>
  requires boost::asio::can_prefer<const Inner&, Property>::value auto prefer(const Property& property) const {
    return timed(boost::asio::prefer(inner_, property));
  }

 private:
  template <class Other>
  TimedExecutor<Other> timed(Other other) const {
    return {std::move(other), kind_, name_};
  }

  Inner inner_;
  std::string_view kind_, name_;
};

}  // namespace ditfleet::telemetry
