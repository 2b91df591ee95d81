// Every text that says what a unit waits for, in the situation that causes it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/scheduling/scheduler_fixture.h"

namespace ditfleet::scheduling {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class WaitingTest : public NamedAdaptersTest {
 protected:
  std::string why(const std::string& job) const { return scheduler->waits_for({job, 0}, now); }
  const std::string two = spec(R"("loras":[{"name":"ink"},{"name":"oil"}])");
};

TEST_F(WaitingTest, no_worker_is_registered_or_none_is_ready) {
  submit("1");
  EXPECT_EQ(why("1"), "a worker with the model 'tiny': no such worker is registered");
  scheduler->on_workers({worker("a", "starting"), worker("b", "draining")}, now);
  settle();
  EXPECT_EQ(why("1"), "a ready worker: of 2 workers with 'tiny', 1 is starting, 1 is draining");
  EXPECT_EQ(why("no such job"), "");
}

TEST_F(WaitingTest, its_adapters_need_more_slots_than_any_worker_has) {
  submit("1", two);
  scheduler->on_workers({worker("a")}, now);
  settle();
  EXPECT_EQ(why("1"), "a worker with adapter slots: found 1 worker with 'tiny', but none with adapter slots");
  scheduler->on_workers({worker("a"), with_slots("b", 1)}, now);
  settle();
  EXPECT_EQ(why("1"), "a worker with 2 adapter slots, one per adapter: workers with 'tiny' have at most 1");
}

TEST_F(WaitingTest, workers_with_enough_slots_are_full_while_others_have_capacity) {
  scheduler->on_workers({with_slots("wide", 2)}, now);
  for (const char* id : {"1", "2", "3"}) submit(id, two);
  EXPECT_THAT(why("3"), StartsWith("capacity: 1 worker with 'tiny' is full, the next is free in about "));
  scheduler->on_workers({with_slots("wide", 2), with_slots("narrow", 1)}, now);
  settle();
  EXPECT_THAT(why("3"), StartsWith("capacity: 1 worker with 'tiny' and at least 2 adapter slots is full"));
  EXPECT_THAT(why("3"), HasSubstr("; 1 with fewer slots is not full"));
}

TEST_F(WaitingTest, its_adapters_are_being_loaded) {
  auto w = with_slots("w", 2);
  w.host_adapters = {"oil"};
  w.adapter_load_bytes_per_s = 172'000'000;  // one in a second
  scheduler->on_workers({w}, now);
  submit("1", two);
  ASSERT_EQ(owner_of("1"), "w:1");
  EXPECT_EQ(why("1"), "w to load 1 of 2 adapters, about 1 s more");
  now += 300 * kMs;
  EXPECT_EQ(why("1"), "w to load 1 of 2 adapters, about 707 ms more");
  now += 900 * kMs;
  w.heartbeat_ms = now / 1000;
  scheduler->on_workers({w}, now);
  EXPECT_EQ(why("1"), "w to load 1 of 2 adapters, longer than predicted");
  w.host_adapters = {"ink", "oil"};
  scheduler->on_workers({w}, now);
  EXPECT_EQ(why("1"), "w to start it");
  store.start({"1", 0}, now);
  settle();
  EXPECT_EQ(why("1"), "");
}

TEST_F(WaitingTest, a_full_worker_is_worth_waiting_for) {
  auto holder = with_slots("holder", 2);
  holder.host_adapters = holder.adapters = {"ink", "oil"};
  auto far = with_slots("far", 2);
  far.adapter_load_bytes_per_s = 1'000'000;  // minutes
  scheduler->on_workers({holder, far}, now);
  for (const char* id : {"1", "2", "3"}) submit(id, two);
  ASSERT_EQ(owner_of("3"), "");
  EXPECT_THAT(why("3"), StartsWith("a full worker that has its adapters: loading them elsewhere takes longer (about "));
}

TEST_F(WaitingTest, behind_another_unit_and_on_a_silent_worker) {
  workers({"w"});
  submit("1");
  submit("2");
  store.start({"1", 0}, now);
  settle();
  ASSERT_EQ(owner_of("2"), "w:1");
  EXPECT_EQ(why("1"), "");
  EXPECT_EQ(why("2"), "w, which runs 1 other unit first");
  auto silent = worker("w");
  scheduler->grant_grace(60'000, now);
  now += 10'000 * kMs;
  scheduler->on_workers({silent}, now);
  EXPECT_EQ(why("2"), "its return from w, which is silent");
}

TEST_F(WaitingTest, a_retry_and_a_deadline_that_has_passed) {
  workers({"w"});
  submit("1");
  store.event({"1", 0}, "ready", now, {{"reason", "retry"}, {"not_before_ms", std::to_string(now / 1000 + 500)}});
  settle();
  EXPECT_EQ(why("1"), "its next attempt: the last one failed");
  scheduler->on_workers({}, now);
  submit("2", spec(R"("deadline_ms":1000)"));
  now += 2'000 * kMs;
  workers({"w"});
  settle();
  EXPECT_EQ(why("2"), "nothing: its deadline has passed");
}

}  // namespace
}  // namespace ditfleet::scheduling
