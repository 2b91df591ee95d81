// NCCL with one rank on one GPU, and with two where there are two. Each rank is a process, since CUDA does not survive
// a fork.
#include "pipeline/parallel/nccl.h"

#include <chrono>
#include <thread>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "shared/core/fd_io.h"
#include "tests/unit/pipeline/parallel/parallel_fixture.h"

namespace ditfleet::pipeline::parallel {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::blank;
using testing::expect_exit;
using testing::fork_rank;
using testing::gpus;
using testing::meet;
using testing::play;
using testing::run_processes;

constexpr milliseconds kLong{20'000};

class NcclGroup : public ::testing::Test {
 protected:
  // Skips unless there are as many GPUs.
  void need(int count) {
    const int found = gpus();
    if (found < count) GTEST_SKIP() << "needs " << count << " GPUs, but the driver reports " << found;
    set_nccl_environment();
    ASSERT_EQ(::pipe(ids_), 0);
  }
  void TearDown() override {
    for (const int fd : ids_) ::close(fd);
  }

  // Joins on GPU `rank`. Rank 0 makes the id and hands it to the others.
  std::unique_ptr<Group> join(int rank, int size, milliseconds timeout = kLong) {
    const auto device = load_device("cuda:" + std::to_string(rank)).device;
    NcclId id{};
    if (rank == 0) {
      id = unwrap(make_nccl_id());
      for (int r = 1; r < size; ++r) write_all(ids_[1], {id.bytes.data(), id.bytes.size()});
    } else if (::read(ids_[0], id.bytes.data(), id.bytes.size()) != static_cast<ssize_t>(id.bytes.size())) {
      fail(Code::kInternal, "no id");
    }
    return unwrap(join_nccl(id, rank, size, device, timeout));
  }

  static c10::Device gpu(int rank) { return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(rank)}; }

  std::string move_shares(int rank, int size) {
    const auto group = join(rank, size);
    StageScope scope(gpu(rank));
    for (const int largest : {5000, 5 << 20})
      if (std::string problem = play(*group, 7, 60, largest, gpu(rank)); !problem.empty()) return problem;
    unwrap(meet(*group, gpu(rank)));
    scope.finish();
    // Host time of a collective, which NCCL enqueues from a thread of its own.
    std::vector<at::Tensor> send, receive;
    for (int r = 0; r < size; ++r) {
      send.push_back(blank(1000).to(gpu(rank)));
      receive.push_back(blank(1000).to(gpu(rank)));
    }
    const auto began = steady_clock::now();
    for (int i = 0; i < 1000; ++i) unwrap(group->all_to_all(send, receive));
    const std::chrono::duration<double, std::micro> took = steady_clock::now() - began;
    std::fprintf(stderr, "rank %d of %d: %.1f us a collective on the host\n", rank, size, took.count() / 1000);
    unwrap(meet(*group, gpu(rank)));
    return {};
  }

  int ids_[2] = {-1, -1};
};

// Runs where the library is, also without a GPU.
TEST(NcclLibrary, MakesIds) {
  set_nccl_environment();
  const auto one = make_nccl_id(), other = make_nccl_id();
  if (!one) GTEST_SKIP() << one.error().message;
  EXPECT_NE(one->bytes, other->bytes);
  EXPECT_STREQ(::getenv("NCCL_NVLS_ENABLE"), "0");
}

TEST_F(NcclGroup, OneRankMovesShares) {
  need(1);
  if (IsSkipped()) return;
  run_processes(1, [&](int rank) { return move_shares(rank, 1); });
}

TEST_F(NcclGroup, TwoRanksMoveShares) {
  need(2);
  if (IsSkipped()) return;
  run_processes(2, [&](int rank) { return move_shares(rank, 2); });
}

// The other rank never joins.
TEST_F(NcclGroup, ReportsARankThatDoesNotArrive) {
  need(1);
  if (IsSkipped()) return;
  run_processes(1, [&](int rank) -> std::string {
    const auto group = join(rank, 2, milliseconds(2000));
    const auto began = steady_clock::now();
    const auto done = meet(*group, gpu(rank));
    if (done) return "no error";
    if (done.error().code != Code::kUnavailable ||
        done.error().message.find("2000 ms at rank 0 of 2") == std::string::npos)
      return done.error().message;
    if (meet(*group, gpu(rank)).error().message != "[parallel] the group was aborted") return "not aborted";
    return steady_clock::now() - began < milliseconds(5000) ? "" : "late";
  });
}

TEST_F(NcclGroup, AbortEndsTheWaitForOtherRanks) {
  need(1);
  if (IsSkipped()) return;
  run_processes(1, [&](int rank) -> std::string {
    const auto group = join(rank, 2);
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(1000));
      group->abort();
    });
    const auto began = steady_clock::now();
    const auto done = meet(*group, gpu(rank));
    other.join();
    if (done || done.error().message != "[parallel] the group was aborted")
      return done ? "no error" : done.error().message;
    return steady_clock::now() - began < milliseconds(4000) ? "" : "late";
  });
}

// Rank 1 dies while rank 0's kernels wait for it on the GPU.
TEST_F(NcclGroup, AbortStopsKernelsAfterAKill) {
  need(2);
  if (IsSkipped()) return;
  const auto body = [&](int rank) -> std::string {
    const auto group = join(rank, 2);
    StageScope scope(gpu(rank));
    const at::Tensor share = blank(1 << 20).to(gpu(rank));
    unwrap(group->broadcast(share, 1));  // makes the connections
    unwrap(meet(*group, gpu(rank)));
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(200));
      ::kill(::getpid(), SIGKILL);
    }
    for (int i = 0; i < 20; ++i) unwrap(group->broadcast(share, 1));
    std::thread other([&] {
      std::this_thread::sleep_for(milliseconds(1000));
      group->abort();
    });
    const auto began = steady_clock::now();
    scope.finish();
    other.join();
    const auto done = meet(*group, gpu(rank));
    if (done || done.error().code != Code::kUnavailable) return done ? "no error" : done.error().message;
    return steady_clock::now() - began < milliseconds(4000) ? "" : "late";
  };
  const pid_t survivor = fork_rank(0, body), victim = fork_rank(1, body);
  ::waitpid(victim, nullptr, 0);
  expect_exit(survivor);
}

}  // namespace
}  // namespace ditfleet::pipeline::parallel
