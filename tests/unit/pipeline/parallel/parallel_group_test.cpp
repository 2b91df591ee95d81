#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chrono>
#include <ctime>
#include <thread>

#include "pipeline/parallel/shared_memory.h"
#include "tests/unit/pipeline/parallel/parallel_fixture.h"

namespace ditfleet::pipeline::parallel {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::blank;
using testing::expect_exit;
using testing::fork_rank;
using testing::meet;
using testing::play;

constexpr milliseconds kLong{20'000};

std::unique_ptr<Group> join(int fd, int rank) {
  auto group = join_group_memory(fd, rank);
  EXPECT_TRUE(group) << group.error().message;
  return std::move(group).value();
}

class SharedMemoryGroup : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SharedMemoryGroup, ::testing::Values(1, 2, 3, 4));

// Buffers of 1000 bytes, so most messages take several rounds.
TEST_P(SharedMemoryGroup, MovesSharesBetweenThreads) {
  const auto memory = create_group_memory(GetParam(), kLong, 1000);
  ASSERT_TRUE(memory);
  std::vector<std::string> problems(GetParam());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < GetParam(); ++rank)
    ranks.emplace_back([&, rank] { problems[rank] = play(*join(memory->get(), rank), 7, 300, 5000); });
  for (auto& rank : ranks) rank.join();
  for (const auto& problem : problems) EXPECT_EQ(problem, "");
}

TEST_P(SharedMemoryGroup, MovesSharesBetweenProcesses) {
  const auto memory = create_group_memory(GetParam(), kLong, 1000);
  ASSERT_TRUE(memory);
  testing::run_processes(GetParam(), [&](int rank) { return play(*join(memory->get(), rank), 8, 300, 5000); });
}

TEST_P(SharedMemoryGroup, MovesLargeShares) {
  const auto memory = create_group_memory(GetParam(), kLong);
  ASSERT_TRUE(memory);
  testing::run_processes(GetParam(), [&](int rank) { return play(*join(memory->get(), rank), 9, 8, 5 << 20); });
}

TEST(SharedMemoryGroups, DoNotDisturbEachOther) {
  const auto one = create_group_memory(2, kLong, 500), other = create_group_memory(2, kLong, 700);
  ASSERT_TRUE(one && other);
  testing::run_processes(4, [&](int i) { return play(*join((i < 2 ? one : other)->get(), i % 2), i / 2, 400, 3000); });
}

TEST(SharedMemoryGroups, MoveAnyTypeAndKeepOwnMemory) {
  const auto memory = create_group_memory(1, kLong);
  ASSERT_TRUE(memory);
  const auto group = join(memory->get(), 0);
  at::Tensor t = at::empty({2, 3}, at::kFloat);
  for (int i = 0; i < 6; ++i) t.data_ptr<float>()[i] = 0.5f * static_cast<float>(i);
  const at::Tensor out = at::empty({2, 3}, at::kFloat);
  EXPECT_TRUE(group->all_gather(t, std::vector{out}));
  EXPECT_EQ(out.data_ptr<float>()[5], 2.5f);
  EXPECT_TRUE(group->all_gather(t, std::vector{t}));
  EXPECT_TRUE(group->all_to_all(std::vector{at::Tensor()}, std::vector{at::Tensor()}));
  EXPECT_EQ(t.data_ptr<float>()[5], 2.5f);
}

TEST(SharedMemoryGroups, RefuseWhatIsWrong) {
  EXPECT_EQ(create_group_memory(0, kLong).error().code, Code::kInvalidArgument);
  EXPECT_EQ(create_group_memory(33, kLong).error().code, Code::kInvalidArgument);
  const auto memory = create_group_memory(1, kLong);
  ASSERT_TRUE(memory);
  EXPECT_EQ(join_group_memory(memory->get(), 1).error().code, Code::kInvalidArgument);
  EXPECT_EQ(join_group_memory(-1, 0).error().code, Code::kUnavailable);
  const auto group = join(memory->get(), 0);
  const at::Tensor strided = at::empty({4, 4}, at::kFloat).t(), good = at::empty({4, 4}, at::kFloat);
  for (const auto& [send, receive] :
       {std::pair(strided, good), std::pair(good, strided), std::pair(good, at::empty({3}, at::kFloat)),
        std::pair(good, at::empty({4, 4}, at::TensorOptions(at::kMeta).dtype(at::kFloat)))})
    EXPECT_EQ(group->all_gather(send, std::vector{receive}).error().code, Code::kInvalidArgument);
  EXPECT_EQ(group->all_to_all(std::vector{good, good}, std::vector{good}).error().code, Code::kInvalidArgument);
}

// The receiver says what it got, the other ranks that the group has ended.
TEST(SharedMemoryGroups, ReportSizesThatDiffer) {
  const auto memory = create_group_memory(2, kLong);
  ASSERT_TRUE(memory);
  const pid_t child = fork_rank(1, [&](int) {
    const auto group = join(memory->get(), 1);
    (void)group->broadcast(blank(10), 0);
    const auto next = meet(*group);
    return next ? "no error" : next.error().code == Code::kUnavailable ? "" : next.error().message;
  });
  const auto group = join(memory->get(), 0);
  (void)group->broadcast(blank(12), 0);
  const auto next = meet(*group);
  EXPECT_FALSE(next);
  expect_exit(child);
}

TEST(SharedMemoryGroups, NameRanksThatDoNotArrive) {
  const auto memory = create_group_memory(4, milliseconds(300));
  ASSERT_TRUE(memory);
  testing::run_processes(2, [&](int i) -> std::string {
    const auto began = steady_clock::now();
    const auto group = join(memory->get(), 2 * i);
    for (int repeated = 0; repeated < 2; ++repeated) {
      const auto done = meet(*group);
      if (done) return "no error";
      if (done.error().code != Code::kUnavailable ||
          done.error().message != "[parallel] ranks 1, 3 of 4 did not arrive within 300 ms")
        return done.error().message;
    }
    return steady_clock::now() - began < milliseconds(2000) ? "" : "late";
  });
}

TEST(SharedMemoryGroups, DoNotCountTheTimeInWhichAllAreStopped) {
  const auto memory = create_group_memory(2, milliseconds(1000));
  ASSERT_TRUE(memory);
  const pid_t stopped = fork_rank(0, [&](int rank) -> std::string {
    const auto group = join(memory->get(), rank);
    for (int round = 0; round < 2; ++round)
      if (const auto done = meet(*group); !done) return done.error().message;
    return "";
  });
  const auto group = join(memory->get(), 1);
  ASSERT_TRUE(meet(*group));
  std::this_thread::sleep_for(milliseconds(200));  // it waits
  ::kill(stopped, SIGSTOP);
  std::this_thread::sleep_for(milliseconds(1200));
  ::kill(stopped, SIGCONT);
  std::this_thread::sleep_for(milliseconds(100));  // it looks at its clock
  EXPECT_TRUE(meet(*group));
  expect_exit(stopped);
}

std::string expect_aborted(Group& group) {
  for (int round = 0; round < 1'000'000; ++round) {
    const auto done = group.all_gather(blank(5000), std::vector<at::Tensor>(group.size(), blank(5000)));
    if (done) continue;
    return done.error().message == "[parallel] the group was aborted" ? "" : done.error().message;
  }
  return "no error";
}

// Rank 3 is killed at a random moment of its work; another process aborts the others.
TEST(SharedMemoryGroups, EndWithinASecondAfterAKill) {
  for (int turn = 0; turn < 10; ++turn) {
    const auto memory = create_group_memory(4, kLong, 1000);
    ASSERT_TRUE(memory);
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 4; ++rank)
      ranks.push_back(fork_rank(rank, [&](int r) { return expect_aborted(*join(memory->get(), r)); }));
    std::this_thread::sleep_for(milliseconds(20 + 7 * turn));
    ::kill(ranks[3], SIGKILL);
    ASSERT_EQ(::waitpid(ranks[3], nullptr, 0), ranks[3]);
    const auto began = steady_clock::now();
    join(memory->get(), 3)->abort();
    for (int rank = 0; rank < 3; ++rank) expect_exit(ranks[rank]);
    ASSERT_LT(steady_clock::now() - began, milliseconds(1000));
  }
}

// A rank that waits must leave the processor to the others.
TEST(SharedMemoryGroups, WaitWithoutWork) {
  const auto memory = create_group_memory(2, milliseconds(500));
  ASSERT_TRUE(memory);
  const auto group = join(memory->get(), 0);
  const std::clock_t began = std::clock();
  EXPECT_FALSE(meet(*group));
  EXPECT_LT(static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC, 0.1);
}

}  // namespace
}  // namespace ditfleet::pipeline::parallel
