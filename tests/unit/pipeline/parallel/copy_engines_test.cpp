// Exchanges by copy engines between 2 and 4 GPUs, against NCCL. Each rank is a process. Prints what an exchange takes
// on the host and on the GPU, and how much it slows a product that runs beside it.
#include "pipeline/parallel/copy_engines.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/device/side_stream.h"
#include "pipeline/parallel/nccl.h"
#include "pipeline/parallel/sequence.h"
#include "tests/unit/pipeline/parallel/parallel_fixture.h"

namespace ditfleet::pipeline::parallel {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::expect_exit;
using testing::fork_rank;
using testing::meet;
using testing::run_processes;

constexpr milliseconds kLong{20'000};

// A rank with both ways to exchange.
struct Member {
  std::shared_ptr<HostGroup> host;
  std::shared_ptr<Group> nccl, engines;
  c10::Device device;

  Member(int memory, int rank, int size, milliseconds timeout = kLong)
      : host(unwrap(join_group_memory(memory, rank))), device(load_device("cuda", rank).device) {
    const c10::DeviceGuard guard(device);
    nccl = join(rank, size, timeout);
    auto exchange = open_copy_engines(*host, device);
    if (!exchange) fail(exchange.error().code, exchange.error().message);
    engines = add_exchange(join(rank, size, timeout), host, std::move(*exchange), device);
  }

  std::unique_ptr<Group> join(int rank, int size, milliseconds timeout) {
    NcclId id{};
    if (rank == 0) id = unwrap(make_nccl_id());
    unwrap(host->broadcast(at::from_blob(id.bytes.data(), {sizeof id.bytes}, at::kByte), 0));
    return unwrap(join_nccl(id, rank, size, device, timeout, host));
  }

  // Keeps the GPU busy for about as many milliseconds as there are rounds.
  void dawdle(int rounds) const {
    at::Tensor a = at::randn({4096, 4096}, at::TensorOptions(at::kBFloat16).device(device));
    for (int i = 0; i < rounds * 4; ++i) a = at::mm(a, a).mul_(1e-3);
  }
};

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2);
}

struct Shape {
  std::int64_t batch, tokens, heads, size;
  at::ScalarType type = at::kBFloat16;
};

struct Inputs {
  at::Tensor q, k, v;
};
// q and k of their own, v inside a row of q, k and v, as in a block.
Inputs inputs(const Shape& s, std::int64_t tokens, c10::Device device) {
  const auto options = at::TensorOptions(s.type).device(device);
  const at::Tensor all = at::randn({s.batch, tokens, 3, s.heads, s.size}, options);
  return {at::randn({s.batch, tokens, s.heads, s.size}, options),
          at::randn({s.batch, tokens, s.heads, s.size}, options), all.select(2, 2)};
}

void attend_until_failure(const Sequence& sequence, const Inputs& x) {
  try {
    for (int i = 0; i < 100; ++i) sequence.attention(x.q, x.k, x.v, attend);
  } catch (const Failure&) {  // of the group; the device's queue may be full until then
  }
}

class CopyEngines : public ::testing::TestWithParam<int> {
 protected:
  // Skips unless there are as many GPUs.
  void SetUp() override {
    const int found = testing::gpus();
    if (found < GetParam()) GTEST_SKIP() << "needs " << GetParam() << " GPUs, but the driver reports " << found;
    set_nccl_environment();
  }

  void run(milliseconds timeout, const std::function<std::string(Member&, int rank)>& body) {
    const auto memory = create_group_memory(GetParam(), timeout);
    ASSERT_TRUE(memory);
    run_processes(GetParam(), [&](int rank) {
      Member member(memory->get(), rank, GetParam(), timeout);
      StageScope scope(member.device);
      return body(member, rank);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Gpus, CopyEngines, ::testing::Values(2, 4));

// The same bytes as by NCCL, with ranks that are late by turns, and without waits between exchanges.
TEST_P(CopyEngines, AttendAsWithNccl) {
  run(kLong, [&](Member& m, int rank) -> std::string {
    const std::vector<Shape> shapes = {{1, 4608, 24, 128},        {1, 333, 12, 64},   {2, 1000, 8, 128},
                                       {1, 5, 4, 16, at::kFloat}, {1, 4608, 24, 128}, {1, 9000, 40, 128}};
    for (std::size_t n = 0; n < shapes.size(); ++n) {
      const Shape& s = shapes[n];
      const Sequence by_nccl(Team::all(m.nccl), s.tokens), by_engines(Team::all(m.engines), s.tokens);
      const std::int64_t own = by_nccl.own(at::zeros({1, s.tokens})).size(1);
      std::vector<at::Tensor> expected, got;
      for (int i = 0; i < 12; ++i) {
        const Inputs x = inputs(s, own, m.device);
        expected.push_back(by_nccl.attention(x.q, x.k, x.v, attend).clone());
        if (i % (GetParam() + 1) == rank) m.dawdle(3);
        if (i % 2) by_engines.start(x.q, x.k, x.v);
        if (i % 3 == 0) m.dawdle(1);
        got.push_back(by_engines.attention(x.q, x.k, x.v, attend).clone());
      }
      synchronize_current(m.device);
      for (std::size_t i = 0; i < got.size(); ++i)
        if (!got[i].equal(expected[i]))
          return "shape " + std::to_string(n) + ", exchange " + std::to_string(i) + ": other bytes";
    }
    return {};
  });
}

// Two teams of half of the ranks, in turn with a team of all.
TEST_P(CopyEngines, ChangeTeams) {
  if (GetParam() < 4) GTEST_SKIP() << "needs teams of two";
  run(kLong, [&](Member& m, int rank) -> std::string {
    const int half = GetParam() / 2, first = rank < half ? 0 : half;
    const Shape s{1, 1024, 8, 64};
    for (int i = 0; i < 20; ++i) {
      const bool all = i % 3 == 0;
      const auto team = [&](const std::shared_ptr<Group>& group) {
        return all ? Team::all(group) : Team{group, first, half};
      };
      const Sequence by_nccl(team(m.nccl), s.tokens), by_engines(team(m.engines), s.tokens);
      const Inputs x = inputs(s, s.tokens / (all ? GetParam() : half), m.device);
      const at::Tensor expected = by_nccl.attention(x.q, x.k, x.v, attend).clone();
      if (!by_engines.attention(x.q, x.k, x.v, attend).equal(expected))
        return "exchange " + std::to_string(i) + ": other bytes";
    }
    return {};
  });
}

// Rank 1 lives but sends nothing; the others name it and their streams end.
TEST_P(CopyEngines, NameARankThatHangs) {
  run(milliseconds(3000), [&](Member& m, int rank) -> std::string {
    const Shape s{1, 512, 8, 64};
    const Sequence sequence(Team::all(m.engines), s.tokens);
    const Inputs x = inputs(s, s.tokens / GetParam(), m.device);
    for (int i = 0; i < 3; ++i) sequence.attention(x.q, x.k, x.v, attend);
    synchronize_current(m.device);
    const auto began = steady_clock::now();
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(6000));
    } else {
      attend_until_failure(sequence, x);
      synchronize_current(m.device);
      const std::chrono::duration<double> took = steady_clock::now() - began;
      std::fprintf(stderr, "rank %d: noticed after %.2f s\n", rank, took.count());
      if (took > milliseconds(5000)) return "late";
    }
    const auto failure = m.host->failure();
    if (!failure) return "no error";
    return failure->message.find("rank 1 of") != std::string::npos ? "" : failure->message;
  });
}

// Rank 1 is killed while the streams of the others wait for it; rank 0 aborts, as a worker does.
TEST_P(CopyEngines, EndAfterAKill) {
  const auto memory = create_group_memory(GetParam(), kLong);
  ASSERT_TRUE(memory);
  std::vector<pid_t> children;
  for (int r = 0; r < GetParam(); ++r)
    children.push_back(fork_rank(r, [&](int rank) -> std::string {
      Member m(memory->get(), rank, GetParam());
      StageScope scope(m.device);
      const Shape s{1, 512, 8, 64};
      const Sequence sequence(Team::all(m.engines), s.tokens);
      const Inputs x = inputs(s, s.tokens / GetParam(), m.device);
      for (int i = 0; i < 3; ++i) sequence.attention(x.q, x.k, x.v, attend);
      synchronize_current(m.device);
      if (rank == 1) ::kill(::getpid(), SIGKILL);
      std::thread reader([&] {
        std::this_thread::sleep_for(milliseconds(1000));
        if (rank == 0) m.engines->abort();
      });
      attend_until_failure(sequence, x);
      synchronize_current(m.device);
      reader.join();
      return m.engines->agree(true) ? "no error" : "";
    }));
  const auto began = steady_clock::now();
  for (int r = 0; r < GetParam(); ++r) {
    if (r == 1)
      ::waitpid(children[static_cast<std::size_t>(r)], nullptr, 0);
    else
      expect_exit(children[static_cast<std::size_t>(r)]);
  }
  EXPECT_LT(steady_clock::now() - began, milliseconds(60'000));
}

// An exchange takes no time of the multiprocessors: a product beside exchanges is as fast as alone.
TEST_P(CopyEngines, LeaveTheMultiprocessorsAlone) {
  run(kLong, [&](Member& m, int rank) -> std::string {
    const Shape s{1, 32768, 24, 128};
    const Inputs x = inputs(s, s.tokens / GetParam(), m.device);
    const at::Tensor a = at::randn({8192, 8192}, x.q.options());
    const auto seconds = [&](const std::shared_ptr<Group>& group, bool products, bool exchanges) {
      const Sequence sequence(Team::all(group), s.tokens);
      SideStream side(m.device);
      const auto copied = [](const at::Tensor& q, const at::Tensor&, const at::Tensor&) { return q.clone(); };
      std::chrono::duration<double> took{};
      for (int turn = 0; turn < 2; ++turn) {  // the first one sets things up
        unwrap(meet(*m.nccl, m.device));
        const auto began = steady_clock::now();
        if (exchanges)
          side.start([&] {
            for (int i = 0; i < 30; ++i) sequence.attention(x.q, x.k, x.v, copied);
          });
        at::Tensor made;
        if (products)
          for (int i = 0; i < 40; ++i) made = at::mm(a, a);
        if (products) synchronize_current(m.device);
        took = steady_clock::now() - began;
        side.join();
        synchronize_current(m.device);
        if (!products) took = steady_clock::now() - began;
      }
      return took.count() * 1e3;
    };
    const double alone = seconds(m.nccl, true, false);
    const double nccl = seconds(m.nccl, true, true), engines = seconds(m.engines, true, true);
    const double only_nccl = seconds(m.nccl, false, true), only_engines = seconds(m.engines, false, true);
    if (rank == 0)
      std::fprintf(
          stderr,
          "%d GPUs: 40 products alone %.2f ms; beside 30 exchanges by NCCL %.2f ms, by copy engines %.2f ms; 30 "
          "exchanges alone by NCCL %.2f ms, by copy engines %.2f ms\n",
          GetParam(), alone, nccl, engines, only_nccl, only_engines);
    return {};
  });
}

}  // namespace
}  // namespace ditfleet::pipeline::parallel
