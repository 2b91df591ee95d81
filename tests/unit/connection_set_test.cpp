// Which connection goes where there is no room for all.
#include "coordinator/gateway/http/connection_set.h"

#include <gtest/gtest.h>

#include <boost/asio/io_context.hpp>

namespace ditfleet::gateway {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using tcp = asio::ip::tcp;

class Connections : public ::testing::Test {
 protected:
  std::shared_ptr<Connection> connect() {
    auto made = std::make_shared<Connection>(tcp::socket(context_, tcp::v4()), 1s);
    set_.add(made);
    return made;
  }
  static bool open(const std::shared_ptr<Connection>& connection) { return connection->stream().socket().is_open(); }

  asio::io_context context_;
  ConnectionSet set_{100};
};

TEST_F(Connections, WhoOwesAHeadForLongestMakesRoom) {
  const auto busy = connect(), newer = connect(), older = connect(), newcomer = connect();
  newer->awaits_head_since = Clock::now() - 1s;
  older->awaits_head_since = Clock::now() - 2s;
  newcomer->awaits_head_since = Clock::now() - 3s;
  set_.evict_longest_idle(*newcomer);
  EXPECT_FALSE(open(older));
  EXPECT_FALSE(older->awaits_head_since) << "so that its coroutine knows";
  EXPECT_EQ(set_.size(), 3u);
  set_.evict_longest_idle(*newcomer);
  EXPECT_FALSE(open(newer));
  set_.evict_longest_idle(*newcomer);
  EXPECT_TRUE(open(busy) && open(newcomer));
  EXPECT_EQ(set_.size(), 2u);
}

TEST_F(Connections, WhoReadsAtAnAnswerForLongestMakesRoomForAnother) {
  EXPECT_TRUE(set_.make_room_for(1'000)) << "one alone may be of any size";
  const auto first = connect(), second = connect(), third = connect();
  const ConnectionSet::Unread a(set_, *first, 40), b(set_, *second, 40);
  EXPECT_TRUE(set_.make_room_for(20));
  EXPECT_FALSE(set_.make_room_for(21)) << "none has had its time";
  first->writes_since -= 10s;
  second->writes_since -= 20s;
  EXPECT_TRUE(set_.make_room_for(21));
  EXPECT_FALSE(open(second));
  EXPECT_TRUE(open(first));
  {
    const ConnectionSet::Unread c(set_, *third, 60);
    EXPECT_TRUE(set_.make_room_for(1));
    EXPECT_FALSE(open(first)) << "the next one";
    EXPECT_FALSE(set_.make_room_for(41));
  }
  EXPECT_TRUE(set_.make_room_for(1'000)) << "all is read";
}

}  // namespace
}  // namespace ditfleet::gateway
