// Which connection goes where there is no room for all.
#include "coordinator/gateway/http/connection_set.h"

#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>
#include <vector>

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using tcp = asio::ip::tcp;

class Connections : public ::testing::Test {
 protected:
  enum State { kBusy, kHalfSent, kIdle };
  // A connection that has been in this state for some seconds.
  std::shared_ptr<Connection> connect(State state = kBusy, int seconds = 0, unsigned char peer = 1) {
    auto made = std::make_shared<Connection>(tcp::socket(context_, tcp::v4()), 1s);
    made->peer = asio::ip::address_v4({10, 0, 0, peer});
    set_.add(made);
    made->idle = state == kIdle;
    if (state != kBusy) made->waits_since = Clock::now() - std::chrono::seconds(seconds);
    return made;
  }
  static bool open(const std::shared_ptr<Connection>& connection) { return connection->stream().socket().is_open(); }

  asio::io_context context_;
  ConnectionSet set_{{.connections = 4, .connections_per_peer = 4, .unread_bytes = 100, .arriving_bytes = 100}};
};

TEST_F(Connections, HalfSentRequestsMakeRoomFirstThenIdleClients) {
  const auto busy = connect(), newer = connect(kHalfSent, 1), idle = connect(kIdle, 9), older = connect(kHalfSent, 2);
  const auto first = connect();
  EXPECT_FALSE(open(older));
  EXPECT_FALSE(older->waits_since) << "so that its coroutine knows";
  EXPECT_EQ(set_.size(), 4u);
  const auto second = connect();
  EXPECT_FALSE(open(newer));
  const auto third = connect();
  EXPECT_FALSE(open(idle));
  EXPECT_FALSE(first->guest || second->guest || third->guest);
  EXPECT_TRUE(open(busy));
}

TEST_F(Connections, WithoutRoomANewOneIsAGuest) {
  const std::vector<std::shared_ptr<Connection>> busy = {connect(), connect(), connect(), connect()};
  const auto first = connect(kHalfSent, 3), second = connect(kHalfSent, 9), third = connect(), fourth = connect();
  EXPECT_TRUE(first->guest && second->guest && third->guest && fourth->guest);
  EXPECT_FALSE(set_.has_place_for(*first));
  const auto fifth = connect();
  EXPECT_TRUE(fifth->guest && open(fifth));
  EXPECT_FALSE(open(second)) << "of the guests the one that waits for longest";
  EXPECT_TRUE(open(first));
  set_.remove(busy.front());
  EXPECT_TRUE(set_.has_place_for(*first));
}

TEST_F(Connections, APeerTakesNotMoreThanItsShare) {
  ConnectionSet set({.connections = 8, .connections_per_peer = 2, .unread_bytes = 100, .arriving_bytes = 100});
  const auto join = [&](unsigned char peer, bool local = false) {
    auto made = std::make_shared<Connection>(tcp::socket(context_, tcp::v4()), 1s);
    made->peer = asio::ip::address_v4({10, 0, 0, peer});
    made->from_loopback = local;
    set.add(made);
    return made;
  };
  const auto other = join(2), one = join(1), two = join(1), three = join(1);
  EXPECT_TRUE(three->guest) << "both others are busy";
  EXPECT_FALSE(set.has_place_for(*three));
  EXPECT_FALSE(join(2)->guest);
  other->waits_since = Clock::now() - 9s;
  two->waits_since = Clock::now();
  EXPECT_FALSE(join(1)->guest);
  EXPECT_FALSE(open(two)) << "its own";
  EXPECT_TRUE(open(other) && open(one));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(join(3, true)->guest) << "a proxy on this host";
}

TEST_F(Connections, BodiesThatArriveForLongestMakeRoomForAnother) {
  const auto first = connect(kHalfSent, 1), second = connect(kHalfSent, 2), third = connect(kHalfSent);
  const auto silent = connect(kHalfSent, 9);
  const auto a = set_.count_arriving(*first, 40), b = set_.count_arriving(*second, 60);
  {
    const auto c = set_.count_arriving(*third, 60);
    EXPECT_FALSE(open(second));
    EXPECT_TRUE(open(first) && open(silent)) << "it holds no bytes";
  }
  const auto d = set_.count_arriving(*third, 1'000);
  EXPECT_TRUE(open(third)) << "one alone may be of any size";
  EXPECT_FALSE(open(first));
}

TEST_F(Connections, WhoReadsAtAnAnswerForLongestMakesRoomForAnother) {
  EXPECT_TRUE(set_.make_room_for(1'000)) << "one alone may be of any size";
  const auto first = connect(), second = connect(), third = connect();
  const auto a = set_.count_unread(*first, 40), b = set_.count_unread(*second, 40);
  EXPECT_TRUE(set_.make_room_for(20));
  EXPECT_FALSE(set_.make_room_for(21)) << "none has had its time";
  first->writes_since -= 10s;
  second->writes_since -= 20s;
  EXPECT_TRUE(set_.make_room_for(21));
  EXPECT_FALSE(open(second));
  EXPECT_TRUE(open(first));
  {
    const auto c = set_.count_unread(*third, 60);
    EXPECT_TRUE(set_.make_room_for(1));
    EXPECT_FALSE(open(first)) << "the next one";
    EXPECT_FALSE(set_.make_room_for(41));
  }
  EXPECT_TRUE(set_.make_room_for(1'000)) << "all is read";
}

}  // namespace
}  // namespace ditfleet::gateway
