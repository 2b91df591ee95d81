#include <gtest/gtest.h>

#include <map>

#include "coordinator/scheduling/service/fleet_log.h"

namespace ditfleet::scheduling {
namespace {

constexpr std::int64_t kSecond = 1'000'000;

class FleetLogTest : public ::testing::Test {
 protected:
  // These are registered, all in one state; `mute` has the second of the last heartbeat of those that fell silent.
  std::vector<std::string> look(int second, const std::vector<std::string>& names, const std::string& state = "ready",
                                const std::map<std::string, int>& mute = {}) {
    std::vector<queue::WorkerInfo> infos;
    for (const auto& name : names) {
      queue::WorkerInfo info;
      info.name = name;
      info.boot = "1";
      info.state = state;
      info.heartbeat_ms = (mute.contains(name) ? mute.at(name) : second) * 1000;
      infos.push_back(info);
    }
    fleet.update(infos, second * kSecond, [](const std::string&) { return 0; });
    std::vector<std::string> lines;
    for (const auto& line : log.look(fleet, second * kSecond)) lines.push_back((line.warning ? "! " : "") + line.text);
    return lines;
  }
  using Lines = std::vector<std::string>;

  Fleet fleet{2, 3 * kSecond};
  FleetLog log;
};

TEST_F(FleetLogTest, a_workers_life) {
  EXPECT_EQ(look(0, {"old"}), Lines{});  // it was there before
  EXPECT_EQ(look(1, {"old"}), Lines{});
  EXPECT_EQ(look(1, {"old", "w"}, "starting"), (Lines{"2 workers registered and are starting: 'old', 'w'"}));
  EXPECT_EQ(look(2, {"w"}), (Lines{"worker 'w' is ready", "worker 'old' is gone"}));
  fleet.hold(fleet.intern_owner("w:1"), {.ref = {"j", 0}});
  EXPECT_EQ(look(4, {"w"}, "ready", {{"w", 0}}), (Lines{"! worker 'w' is silent: no heartbeat for 4 s, with 1 unit"}));
  EXPECT_EQ(look(5, {"w"}, "ready", {{"w", 0}}), Lines{});
  EXPECT_EQ(look(6, {"w"}), (Lines{"worker 'w' sends heartbeats again"}));
  fleet.hold(fleet.intern_owner("w:1"), {.ref = {"j", 1}});
  EXPECT_EQ(look(7, {"w"}, "draining"), (Lines{"worker 'w' is draining, with 2 units"}));
  EXPECT_EQ(look(8, {}), (Lines{"worker 'w' is gone, with 2 units"}));
  EXPECT_EQ(look(9, {}), Lines{});
  look(10, {"clean"});
  fleet.hold(fleet.intern_owner("clean:1"), {.ref = {"k", 0}});
  look(11, {"clean"});
  fleet.release(fleet.intern_owner("clean:1"), {"k", 0}, 11 * kSecond);  // ended after the last look
  EXPECT_EQ(look(12, {}), (Lines{"worker 'clean' is gone"}));
}

TEST_F(FleetLogTest, a_worker_that_gets_no_ordinary_work) {
  look(0, {"w"});
  const auto w = fleet.intern_owner("w:1");
  fleet.hold(w, {.ref = {"j", 0}, .run_us = kSecond});
  fleet.started(w, {"j", 0}, 0);
  EXPECT_EQ(look(61, {"w"}), (Lines{"! worker 'w' runs a unit for far longer than predicted and gets no other"}));
  fleet.release(w, {"j", 0}, 62 * kSecond);
  EXPECT_EQ(look(62, {"w"}), (Lines{"worker 'w' is ready"}));
  for (int i = 0; i < 3; ++i) fleet.failed_alone("w", 63 * kSecond);
  EXPECT_EQ(look(63, {"w"}),
            (Lines{"! worker 'w' fails units that succeed elsewhere and gets one at a time, as a probe"}));
  EXPECT_EQ(look(69, {"w"}), Lines{});
  fleet.succeeded(w);
  EXPECT_EQ(look(70, {"w"}), (Lines{"worker 'w' is ready"}));
  EXPECT_EQ(look(71, {"w"}, "stuck"), (Lines{"! worker 'w' is stuck"}));
}

TEST_F(FleetLogTest, a_silent_worker_has_its_own_time) {
  look(0, {"a", "b"});
  EXPECT_EQ(look(5, {"a", "b"}, "ready", {{"b", 0}}), (Lines{"! worker 'b' is silent: no heartbeat for 5 s"}));
  EXPECT_EQ(look(9, {"a", "b"}, "ready", {{"a", 5}, {"b", 0}}),
            (Lines{"! worker 'a' is silent: no heartbeat for 4 s"}));
}

TEST_F(FleetLogTest, a_fleet_that_changes_at_once_is_one_line) {
  std::vector<std::string> names;
  std::map<std::string, int> mute;
  for (int i = 0; i < 500; ++i) names.push_back("w" + std::to_string(1000 + i));
  for (const auto& name : names) mute[name] = 0;
  look(0, names);
  EXPECT_EQ(look(9, names, "ready", mute),
            (Lines{"! 500 workers are silent: 'w1000', 'w1001', 'w1002', 'w1003', 'w1004', …"}));
}

TEST(FleetLog, units_that_a_lost_worker_leaves) {
  const auto line = [](std::string type, std::map<std::string, std::string> fields) {
    return line_of_lost(
               {.id = {}, .job = "j", .type = std::move(type), .unit = 1, .at_ms = 0, .fields = std::move(fields)})
        .value_or(FleetLine{})
        .text;
  };
  EXPECT_EQ(line("ready", {{"reason", "lease lapsed"}, {"owner", "w:1"}}),
            "unit j/1: the lease of worker 'w' expired; the unit is ready again");
  EXPECT_EQ(line("failed", {{"reason", "workers lost"}, {"message", "[queue] 2 workers were lost"}}),
            "unit j/1 failed: [queue] 2 workers were lost");
  EXPECT_EQ(line("ready", {}), "");
  EXPECT_EQ(line("ready", {{"reason", "handed back"}}), "");
  EXPECT_EQ(line("failed", {{"message", "out of memory"}}), "");  // the worker's log has it
}

}  // namespace
}  // namespace ditfleet::scheduling
