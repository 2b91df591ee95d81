// Keys that administrators add at run time, with two gateways on one Redis.
#include "coordinator/gateway/routes/key_store.h"

#include <algorithm>

#include "shared/core/bytes.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using gateway::Key;

class KeyStoreTest : public QueueTest {
 protected:
  struct Gateway {
    explicit Gateway(const std::shared_ptr<redis::Connection>& connection) : store(connection, ring, "") {}
    bool has(const std::string& id) const {
      return std::any_of(ring.keys().begin(), ring.keys().end(), [&](const Key& key) { return key.id == id; });
    }
    gateway::KeyRing ring{
        std::vector<config::ApiKey>{{.tenant = "admin", .sha256 = std::string(64, 'a'), .admin = true}}};
    gateway::KeyStore store;
  };
  static Key key(const std::string& id) {
    return {.id = id, .tenant = "acme", .sha256 = sha256_hex(id), .created_ms = 1'700'000'000'000};
  }
  Gateway first_{connection_}, second_{connection_};
};

TEST_F(KeyStoreTest, AChangeOfKeysThatAnotherGatewayHasChangedIsRefused) {
  for (auto* gateway : {&first_, &second_}) ASSERT_TRUE(wait(gateway->store.refresh(soon())).ok());
  ASSERT_TRUE(wait(first_.store.put(key("one"), soon())).ok());
  const auto late = wait(second_.store.put(key("two"), soon()));
  ASSERT_FALSE(late.ok());
  EXPECT_EQ(late.error().code, Code::kConflict);
  ASSERT_TRUE(wait(second_.store.refresh(soon())).ok());
  EXPECT_TRUE(second_.has("one") && !second_.has("two"));
  ASSERT_TRUE(wait(second_.store.put(key("two"), soon())).ok());
  EXPECT_EQ(wait(first_.store.remove(key("two"), soon())).error().code, Code::kConflict);
  ASSERT_TRUE(wait(first_.store.refresh(soon())).ok());
  EXPECT_TRUE(first_.has("one") && first_.has("two"));
}

}  // namespace
}  // namespace ditfleet::testing
