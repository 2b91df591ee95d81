// Coordinators are killed or stopped, alone and with a second one.
#include <iostream>

#include "tests/fault/service_fixture.h"
#include "tests/paths.h"

namespace ditfleet::testing {
namespace {

class CoordinatorDeath : public ServiceTest {
 protected:
  CoordinatorDeath() { max_attempts_ = 1; }  // a new leader leaves running units alone
  void TearDown() override {
    end_second();
    ServiceTest::TearDown();
  }
  // Starts a second coordinator on the same Redis.
  void start_second() {
    const int log = ::open((dir_ + "/second.log").c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    const std::string config = dir_ + "/data/effective.yaml", program = program_path("ditfleet");
    second_ = ::fork();
    if (second_ == 0) {
      ::dup2(log, 1);
      ::dup2(log, 2);
      ::execl(program.c_str(), program.c_str(), "coordinator", "--config", config.c_str(), "--listen", "127.0.0.1:0",
              nullptr);
      ::_exit(127);
    }
    ::close(log);
    ASSERT_TRUE(until(
        [&] {
          auto text = read_file(dir_ + "/second.log");
          return text && text->find("ready: http") != std::string::npos;
        },
        60s))
        << "the second coordinator is not ready";
  }
  void end_second() {
    if (second_ <= 0) return;
    ::kill(second_, SIGKILL);
    ::waitpid(second_, nullptr, 0);
    second_ = -1;
  }
  // "<epoch> <coordinator>", or empty if there is no leader.
  std::string leader() { return redis({"GET", "df:{0}:leader"}).text; }
  long epoch() { return std::atol(leader().c_str()); }
  std::string log_of(const std::string& name) {
    auto text = read_file(dir_ + "/" + name);
    return text ? *text : "";
  }

  pid_t second_ = -1;
};

TEST_F(CoordinatorDeath, KilledTwiceAndRestarted) {
  start(2);
  if (HasFatalFailure()) return;
  std::vector<std::string> ids;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 15; ++i) ids.push_back(submit(4, 1 + i % 3));
    const pid_t pid = pid_of("coordinator");
    ASSERT_GT(pid, 1);
    ASSERT_EQ(::kill(pid, SIGKILL), 0);
    for (int i = 0; i < 15; ++i) {  // accepted without a leader
      ids.push_back(submit(2));
      nap(10ms);
    }
    ASSERT_TRUE(until([&] { return pid_of("coordinator") > 1 && pid_of("coordinator") != pid; }, 60s));
  }
  expect_all_ended_once(ids, 120s);
}

// A leader with pending work is stopped past its lease. The other coordinator takes over. When the first one continues,
// its epoch fences it, and no job ends twice.
TEST_F(CoordinatorDeath, AStoppedLeaderIsReplacedAndFenced) {
  start(2);
  if (HasFatalFailure()) return;
  start_second();
  if (HasFatalFailure()) return;
  const auto first_leader = leader();
  const long first_epoch = epoch();
  const pid_t pid = pid_of("coordinator");
  ASSERT_GT(first_epoch, 0);
  ASSERT_GT(pid, 1);
  std::vector<std::string> ids;
  for (int i = 0; i < 30; ++i) ids.push_back(submit(4, 1 + i % 2));
  ASSERT_EQ(::kill(pid, SIGSTOP), 0);
  for (int i = 0; i < 15; ++i) ids.push_back(submit(2));
  std::string second_leader;
  const bool taken = until([&] { return !(second_leader = leader()).empty() && second_leader != first_leader; }, 60s);
  const long second_epoch = std::atol(second_leader.c_str());
  for (int i = 0; i < 15; ++i) ids.push_back(submit(2));
  const bool works = taken && until([&] { return ended(ids.back()); }, 60s);
  ASSERT_EQ(::kill(pid, SIGCONT), 0);
  ASSERT_TRUE(taken) << leader();
  EXPECT_TRUE(works) << "the second coordinator leads but does not schedule: " << history(ids.back());
  EXPECT_GT(second_epoch, first_epoch);
  for (int i = 0; i < 15; ++i) ids.push_back(submit(2));
  expect_all_ended_once(ids, 120s);
  EXPECT_EQ(leader(), second_leader) << "the first coordinator took over from a live leader";

  // After the second coordinator is killed, the first leads again with a third epoch.
  end_second();
  ids = {submit(2), submit(2)};
  expect_all_ended_once(ids, 60s);
  EXPECT_GT(epoch(), second_epoch);
  EXPECT_EQ(pid_of("coordinator"), pid) << "the first coordinator was restarted";
}

}  // namespace
}  // namespace ditfleet::testing
