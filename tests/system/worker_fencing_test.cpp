// A worker that loses Redis for longer than its lease; the test plays the scheduler.
#include "tests/system/worker_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;

class WorkerFencing : public WorkerTest {
 protected:
  WorkerFencing() : WorkerTest(short_lease()) {}
  static queue::QueueOptions short_lease() {
    auto options = quick();
    options.lease_ms = 600;
    return options;
  }
  // Also while Redis is only coming back.
  bool is_ready_again(const std::string& id) {
    return until([&] {
      auto record = wait(client_->job(id, "", soon()));
      return record.ok() && record->state == State::kReady;
    });
  }
};

TEST_F(WorkerFencing, ALeaseThatCannotBeRenewedStopsTheUnitWithoutARedis) {
  script_->step_ms = 20;
  auto worker = start_ready_worker();
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 150);
  const std::string id = ready(slow);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
  server_.kill();
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_TRUE(until([&] { return logged("stopped 1"); }, 3s));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 600ms + 250ms) << "it went on past its lease";
  server_.restart();
  // It is handed back, not completed and not a crash.
  ASSERT_TRUE(is_ready_again(id));
  EXPECT_EQ(keys_like("df:{0}:blob:*"), 0u);
}

TEST_F(WorkerFencing, AUnitThatFinishesAfterItsLeaseIsNotCompleted) {
  auto worker = start_ready_worker();
  HeldEncoding encoding(*script_);
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return encoding.reached(); }));
  server_.kill();
  std::this_thread::sleep_for(900ms);
  server_.restart();
  encoding.release();
  ASSERT_TRUE(is_ready_again(id));
  EXPECT_EQ(event_types(id).find("succeeded"), std::string::npos);
  EXPECT_TRUE(until([&] { return keys_like("df:{0}:blob:*") == 0; }));
}

}  // namespace
}  // namespace ditfleet::testing
