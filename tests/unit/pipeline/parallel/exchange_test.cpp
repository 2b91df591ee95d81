// Exchanges among ranks without a GPU: the protocol on simulated devices, where flags are late or lost and ranks die,
// on a clock of its own; and attention by exchanges among threads, against the group's collectives.
#include "pipeline/parallel/exchange.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <thread>

#include "pipeline/device/failure.h"
#include "pipeline/parallel/sequence.h"
#include "tests/unit/pipeline/parallel/parallel_fixture.h"

namespace ditfleet::pipeline::parallel {
namespace {

using std::chrono::milliseconds;
using Time = Exchange::Clock::time_point;

constexpr milliseconds kTimeout{1000};

// What a device has been asked to do. `done` is called `takes` after `begin`, if that is set; neither before `ready`.
struct Work {
  std::function<bool()> ready = [] { return true; };
  std::function<void()> begin = [] {};
  std::function<void()> done = [] {};
  milliseconds takes{0};
};

struct Queue {
  std::deque<Work> work;
  std::optional<Time> ends;  // of the first one, which has begun
};

// Ranks in one process. Each has a host that calls its exchange, and a device with two queues.
class World {
 public:
  struct Rank {
    std::shared_ptr<HostGroup> host;
    std::unique_ptr<Exchange> exchange;
    Queue current, copies;
    std::deque<Work> calls;  // of the host
    std::vector<std::byte> memory;
    bool dead = false;   // neither host nor device do anything any more
    bool hangs = false;  // the device does nothing any more
    int meetings = 0;
    std::vector<bool> passed = {};  // events
  };

  World(int size, unsigned seed) : size(size), random(seed + 1), fd_(unwrap(create_group_memory(size, kTimeout))) {
    ranks.resize(static_cast<std::size_t>(size));
    for (int r = 0; r < size; ++r) {
      Rank& rank = at(r);
      rank.host = unwrap(join_group_memory(fd_.get(), r));
      rank.memory.resize(1 << 16);
      rank.exchange = std::make_unique<Exchange>(*rank.host, std::make_unique<Device>(*this, r));
    }
  }

  Rank& at(int rank) { return ranks[static_cast<std::size_t>(rank)]; }
  void expect(bool condition, const std::string& what) {
    if (!condition && problem.empty()) problem = what;
  }
  void expect(const Result<void>& result) { expect(result.ok() || at(0).host->failure(), "a call failed"); }

  // One thing that a rank can do, chosen at random, or else time passes.
  void step() {
    std::vector<std::function<void()>> choices;
    for (Rank& rank : ranks) {
      if (rank.dead) continue;
      if (!rank.calls.empty() && rank.calls.front().ready())
        choices.emplace_back([&rank] {
          const Work call = std::move(rank.calls.front());
          rank.calls.pop_front();
          call.begin();
        });
      if (rank.hangs) continue;
      for (Queue* queue : {&rank.current, &rank.copies}) {
        if (queue->work.empty()) continue;
        Work& first = queue->work.front();
        if (queue->ends ? now >= *queue->ends : first.ready())
          choices.emplace_back([this, queue, &first] {
            if (!queue->ends) {
              first.begin();
              queue->ends = now + first.takes;
            }
            if (now < *queue->ends) return;
            first.done();
            queue->ends.reset();
            queue->work.pop_front();
          });
      }
    }
    if (!choices.empty() && random() % 4 != 0) return choices[random() % choices.size()]();
    now += milliseconds(choices.empty() ? 20 : 1);
    if (now - checked_ < milliseconds(20)) return;
    checked_ = now;
    for (Rank& rank : ranks)
      if (!rank.dead) rank.exchange->check(now);
  }

  bool idle() const {
    return std::all_of(ranks.begin(), ranks.end(), [](const Rank& r) {
      return r.dead || r.hangs || (r.calls.empty() && r.current.work.empty() && r.copies.work.empty());
    });
  }
  // Until all have done their work or `limit` has passed.
  void run(milliseconds limit = milliseconds(100'000)) {
    for (const Time end = now + limit; !idle() && now < end && problem.empty();) step();
  }

  const int size;
  std::minstd_rand random;
  Time now{std::chrono::hours(1)};
  std::vector<Rank> ranks;
  std::string problem;
  int lose = -1;         // the raised flag, counted down to 0, that does not arrive
  milliseconds slow{3};  // the longest time of a copy

 private:
  class Device final : public CopyDevice {
   public:
    Device(World& world, int rank) : world_(world), rank_(rank) {}
    // The hosts of the test call begin() only when the devices that must be idle are.
    Result<bool> meet(std::size_t bytes) override {
      ++here().meetings;
      return bytes <= here().memory.size();
    }
    std::byte* memory(int rank) const override { return world_.at(rank).memory.data(); }
    Result<void> copies_follow() override { return order(here().current, here().copies); }
    Result<void> follow_copies() override { return order(here().copies, here().current); }
    Result<void> copy(const Rows& from, std::byte* to, std::size_t pitch) override {
      // In two parts, so that others see half a copy.
      for (const std::size_t half : {0, 1}) {
        const auto move = [=] {
          for (std::size_t i = half; i < from.count; i += 2)
            std::memcpy(to + i * pitch, from.data + i * from.pitch, from.width);
        };
        here().copies.work.push_back({.done = move, .takes = milliseconds(world_.random() % world_.slow.count())});
      }
      return {};
    }
    Result<void> raise(int rank, std::uint32_t round) override {
      here().copies.work.push_back({.done =
                                        [this, rank, round] {
                                          if (world_.lose-- != 0) flag(rank, rank_) = round;
                                        },
                                    .takes = milliseconds(world_.random() % 2)});
      return {};
    }
    Result<void> wait(int rank, std::uint32_t round) override {
      here().current.work.push_back(
          {.ready = [this, rank, round] { return static_cast<std::int32_t>(flag(rank_, rank) - round) >= 0; }});
      return {};
    }

   private:
    Rank& here() { return world_.at(rank_); }
    std::atomic<std::uint32_t>& flag(int to, int from) {
      return here().host->flags().at[static_cast<std::size_t>(to)][static_cast<std::size_t>(from)];
    }
    Result<void> order(Queue& before, Queue& after) {
      Rank& rank = here();
      const auto event = rank.passed.size();
      rank.passed.push_back(false);
      before.work.push_back({.done = [&rank, event] { rank.passed[event] = true; }});
      after.work.push_back({.ready = [&rank, event] { return rank.passed[event]; }});
      return {};
    }

    World& world_;
    const int rank_;
  };

  const UniqueFd fd_;
  Time checked_{};
};

// Trips of rows that name their trip, way and sender, so that a row that is too old or too new is noticed.
class Trips {
 public:
  static constexpr std::size_t kRows = 4;

  explicit Trips(World& world) : world_(world), sources_(world.ranks.size()) {}

  // A trip in teams of `count` ranks, for all ranks. `meet`: slots or teams differ from the last trip.
  void add(int count, bool meet) {
    const int trip = trips_++;
    for (int r = 0; r < world_.size; ++r) {
      World::Rank& rank = world_.at(r);
      const int first = r / count * count;
      const auto call = [&](
                            std::function<void()> what, std::function<bool()> ready = [] { return true; }) {
        rank.calls.push_back({.ready = std::move(ready), .begin = std::move(what)});
      };
      call(
          [=, this] {
            began_[static_cast<std::size_t>(trip)]++;
            const int meetings = world_.at(r).meetings + (meet ? 1 : 0);
            const auto done = world_.at(r).exchange->begin(first, count, {slot(count), slot(count)});
            world_.expect(world_.at(r).meetings == meetings || !done, "the ranks do not meet");
            world_.expect(without_value(done));
            send(trip, 0, r, first, count);
          },
          // Ranks meet when all have come here and no device has work left.
          [=, this] { return !meet || came(trip); });
      call([=, this] { receive(trip, 0, r, first, count); });
      call([=, this] {
        world_.expect(world_.at(r).exchange->turn());
        send(trip, 1, r, first, count);
      });
      call([=, this] { receive(trip, 1, r, first, count); });
    }
  }

  int arrived() const { return arrived_; }  // ways, of all ranks

 private:
  using Content = std::array<std::uint32_t, 4>;
  static std::size_t slot(int count) { return static_cast<std::size_t>(count) * kRows * sizeof(Content); }

  bool came(int trip) {
    if (began_[static_cast<std::size_t>(trip)] > 0) return true;
    return std::all_of(world_.ranks.begin(), world_.ranks.end(), [&](const World::Rank& r) {
      return r.calls.size() == static_cast<std::size_t>(4 * (trips_ - trip)) && r.current.work.empty() &&
             r.copies.work.empty();
    });
  }

  void send(int trip, int way, int r, int first, int count) {
    World::Rank& rank = world_.at(r);
    if (rank.host->failure()) return;
    auto& source = sources_[static_cast<std::size_t>(r)].emplace_back(
        std::make_unique<std::vector<Content>>(static_cast<std::size_t>(world_.size) * kRows));
    for (int i = 1; i <= count; ++i) {
      const int to = first + (r - first + i) % count;
      Content* const rows = source->data() + static_cast<std::size_t>(to) * kRows;
      for (std::size_t k = 0; k < kRows; ++k)
        rows[k] = {static_cast<std::uint32_t>(trip), static_cast<std::uint32_t>(way), static_cast<std::uint32_t>(r),
                   static_cast<std::uint32_t>(to)};
      // Every other row, between those of the next sender.
      world_.expect(rank.exchange->send(
          to, {reinterpret_cast<const std::byte*>(rows), sizeof(Content), sizeof(Content), kRows},
          static_cast<std::size_t>(r - first) * sizeof(Content), static_cast<std::size_t>(count) * sizeof(Content)));
      if (to != r) world_.expect(rank.exchange->raise(to));
    }
  }

  // The device reads the slot for some time and then overwrites what the rank has sent.
  void receive(int trip, int way, int r, int first, int count) {
    World::Rank& rank = world_.at(r);
    const auto slot = rank.exchange->wait();
    if (!slot) return world_.expect(rank.host->failure().has_value(), slot.error().message);
    const auto* const rows = reinterpret_cast<const Content*>(*slot);
    const auto check = [=, this] {
      if (world_.at(r).host->failure()) return;
      for (std::size_t k = 0; k < kRows * static_cast<std::size_t>(count); ++k) {
        const Content wanted = {static_cast<std::uint32_t>(trip), static_cast<std::uint32_t>(way),
                                static_cast<std::uint32_t>(first) + static_cast<std::uint32_t>(k) % count,
                                static_cast<std::uint32_t>(r)};
        world_.expect(rows[k] == wanted, "trip " + std::to_string(trip) + ", way " + std::to_string(way) + ": rank " +
                                             std::to_string(r) + " reads a row of rank " + std::to_string(wanted[2]) +
                                             " of trip " + std::to_string(rows[k][0]) + ", way " +
                                             std::to_string(rows[k][1]));
      }
    };
    auto* const sent = sources_[static_cast<std::size_t>(r)].back().get();
    rank.current.work.push_back({.begin = check,
                                 .done =
                                     [=, this] {
                                       check();
                                       for (Content& c : *sent) c = {};
                                       ++arrived_;
                                     },
                                 .takes = milliseconds(world_.random() % 5)});
  }

  World& world_;
  int trips_ = 0, arrived_ = 0;
  std::map<std::size_t, int> began_;
  std::vector<std::vector<std::unique_ptr<std::vector<Content>>>> sources_;
};

std::string name_of(int rank, int size) {
  return "[parallel] rank " + std::to_string(rank) + " of " + std::to_string(size) + " did not arrive within 1000 ms";
}

class ExchangeProtocol : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeProtocol, ::testing::Values(2, 3, 4, 8));

TEST_P(ExchangeProtocol, ReadsRowsAfterTheyArriveAndBeforeOthersComeInAnyOrder) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    World world(GetParam(), seed);
    world.slow = milliseconds(seed % 3 == 0 ? 1 : seed % 3 == 1 ? 5 : 30);
    Trips trips(world);
    for (int i = 0; i < 6; ++i) trips.add(GetParam(), i == 0);
    world.run();
    ASSERT_EQ(world.problem, "") << "seed " << seed;
    ASSERT_FALSE(world.at(0).host->failure()) << world.at(0).host->failure()->message;
    ASSERT_EQ(trips.arrived(), 12 * GetParam()) << "seed " << seed;
  }
}

TEST(ExchangeProtocols, ChangeTeamsAndSizes) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    World world(4, seed);
    Trips trips(world);
    int last = 0;
    for (const int count : {4, 4, 2, 2, 4, 2}) trips.add(count, std::exchange(last, count) != count);
    world.run();
    ASSERT_EQ(world.problem, "") << "seed " << seed;
    ASSERT_EQ(trips.arrived(), 2 * 6 * 4);
  }
}

// A rank dies, or its device hangs, at any moment.
TEST_P(ExchangeProtocol, NamesTheRankThatIsMissingAndEndsTheOthers) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    World world(GetParam(), seed);
    Trips trips(world);
    for (int i = 0; i < 6; ++i) trips.add(GetParam(), i == 0);
    const int victim = static_cast<int>(world.random() % GetParam());
    for (unsigned steps = world.random() % 400; steps > 0; --steps) world.step();
    (seed % 2 ? world.at(victim).dead : world.at(victim).hangs) = true;
    const Time before = world.now;
    while (!world.idle() && !world.at(0).host->failure() && world.problem.empty()) world.step();
    ASSERT_EQ(world.problem, "") << "seed " << seed;
    if (world.idle() && !world.at(0).host->failure()) continue;  // it was done already
    ASSERT_TRUE(world.at(0).host->failure());
    EXPECT_EQ(world.at(0).host->failure()->message, name_of(victim, GetParam())) << "seed " << seed;
    EXPECT_GE(world.now - before, milliseconds(900)) << "seed " << seed;
    EXPECT_LE(world.now - before, milliseconds(1500)) << "seed " << seed;
    // The devices of the others come to an end, whatever is in their queues.
    world.run(milliseconds(5000));
    EXPECT_TRUE(world.idle()) << "seed " << seed;
    EXPECT_FALSE(world.at(0).exchange->begin(0, GetParam(), {64, 64}));
  }
}

// A flag that is lost does no harm if another one follows, and else is noticed.
TEST_P(ExchangeProtocol, SurvivesOrReportsALostFlag) {
  int reported = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    World world(GetParam(), seed);
    Trips trips(world);
    for (int i = 0; i < 3; ++i) trips.add(GetParam(), i == 0);
    const int flags = 3 * 2 * GetParam() * (GetParam() - 1);
    world.lose = seed < 3 ? flags - 1 : static_cast<int>(world.random() % flags);
    world.run();
    ASSERT_EQ(world.problem, "") << "seed " << seed;
    EXPECT_TRUE(world.idle());
    const auto failure = world.at(0).host->failure();
    reported += failure.has_value();
    EXPECT_TRUE(failure || trips.arrived() == 6 * GetParam()) << "seed " << seed;
  }
  EXPECT_GT(reported, 0);
}

// A rank that is slower than the others, but not by the timeout, is not missing; nor is any if the host slept.
TEST(ExchangeProtocols, WaitForSlowRanks) {
  World world(3, 5);
  Trips trips(world);
  for (int i = 0; i < 4; ++i) trips.add(3, i == 0);
  for (int i = 0; i < 100; ++i) world.step();
  for (const int asleep : {0, 5000}) {
    world.at(1).hangs = true;
    for (const Time end = world.now + milliseconds(600); world.now < end;) world.step();
    world.now += milliseconds(asleep);
    for (int i = 0; i < 10; ++i) world.step();
    world.at(1).hangs = false;
    for (int i = 0; i < 50; ++i) world.step();
  }
  world.run();
  EXPECT_EQ(world.problem, "");
  EXPECT_FALSE(world.at(0).host->failure());
  EXPECT_EQ(trips.arrived(), 4 * 2 * 3);
}

TEST(ExchangeProtocols, RefuseCallsOutOfOrder) {
  World world(2, 1);
  Exchange& exchange = *world.at(0).exchange;
  std::byte row[16] = {};
  const Rows rows{row, 16, 16, 1};
  EXPECT_EQ(exchange.wait().error().code, Code::kInvalidArgument);
  EXPECT_EQ(exchange.turn().error().code, Code::kInvalidArgument);
  EXPECT_EQ(exchange.send(1, rows, 0, 16).error().code, Code::kInvalidArgument);
  ASSERT_TRUE(*exchange.begin(0, 2, {32, 32}));
  EXPECT_TRUE(exchange.begun());
  EXPECT_EQ(exchange.begin(0, 2, {32, 32}).error().code, Code::kInvalidArgument);
  EXPECT_EQ(exchange.send(1, rows, 17, 16).error().code, Code::kInvalidArgument);  // beyond the slot
  EXPECT_EQ(exchange.send(2, rows, 0, 16).error().code, Code::kInvalidArgument);   // of no such rank
  EXPECT_TRUE(exchange.send(1, rows, 16, 16));
  EXPECT_EQ(exchange.wait().error().code, Code::kInvalidArgument);  // the other rank does not know
  ASSERT_FALSE(*world.at(1).exchange->begin(0, 2, {1 << 20, 32}));  // no memory
  EXPECT_FALSE(world.at(1).exchange->begun());
}

// A device that does everything at once, for ranks that are threads.
class InstantDevice final : public CopyDevice {
 public:
  InstantDevice(HostGroup& host, std::vector<std::vector<std::byte>>& memories) : host_(host), memories_(memories) {}
  Result<bool> meet(std::size_t bytes) override {
    const auto barrier = [&] { return testing::meet(host_); };
    if (auto met = barrier(); !met) return met.error();
    memories_[static_cast<std::size_t>(host_.rank())].assign(bytes, std::byte{0xa5});
    if (auto met = barrier(); !met) return met.error();
    return bytes < most;
  }
  std::byte* memory(int rank) const override { return memories_[static_cast<std::size_t>(rank)].data(); }
  Result<void> copies_follow() override { return {}; }
  Result<void> follow_copies() override { return {}; }
  Result<void> copy(const Rows& from, std::byte* to, std::size_t pitch) override {
    for (std::size_t i = 0; i < from.count; ++i) std::memcpy(to + i * pitch, from.data + i * from.pitch, from.width);
    return {};
  }
  Result<void> raise(int rank, std::uint32_t round) override {
    flag(rank, host_.rank()) = round;
    return {};
  }
  Result<void> wait(int rank, std::uint32_t round) override {
    while (static_cast<std::int32_t>(flag(host_.rank(), rank) - round) < 0) std::this_thread::yield();
    return {};
  }

  static constexpr std::size_t most = 1 << 18;  // longer slots are refused

 private:
  std::atomic<std::uint32_t>& flag(int to, int from) {
    return host_.flags().at[static_cast<std::size_t>(to)][static_cast<std::size_t>(from)];
  }
  HostGroup& host_;
  std::vector<std::vector<std::byte>>& memories_;
};

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto scores = at::matmul(q.transpose(1, 2), k.transpose(1, 2).transpose(2, 3));
  return at::matmul(scores, v.transpose(1, 2)).transpose(1, 2);  // heads are not adjacent
}

class ExchangeAttention : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExchangeAttention, ::testing::Values(2, 3, 4));

TEST_P(ExchangeAttention, EqualsThatOfCollectives) {
  const int size = GetParam();
  std::vector<UniqueFd> memory;
  for (int i = 0; i < 3; ++i) memory.push_back(unwrap(create_group_memory(size, milliseconds(20'000))));
  std::vector<std::vector<std::byte>> memories(static_cast<std::size_t>(size));
  std::vector<std::string> problems(static_cast<std::size_t>(size));
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      std::string& problem = problems[static_cast<std::size_t>(r)];
      std::shared_ptr<Group> plain = unwrap(join_group_memory(memory[0].get(), r));
      std::shared_ptr<HostGroup> host = unwrap(join_group_memory(memory[1].get(), r));
      auto exchange = std::make_unique<Exchange>(*host, std::make_unique<InstantDevice>(*host, memories));
      const std::shared_ptr<Group> group = add_exchange(unwrap(join_group_memory(memory[2].get(), r)), host,
                                                        std::move(exchange), c10::Device(c10::DeviceType::CPU));
      std::minstd_rand random(7);
      for (int i = 0; i < 30 && problem.empty(); ++i) {
        const std::int64_t tokens = size + random() % 20, batch = 1 + random() % 2;
        const std::int64_t heads = size * (1 + random() % 3), width = i % 10 == 9 ? 4'000 : 1 + random() % 9;
        const bool halves = size == 4 && random() % 3 == 0;
        const auto team = [&](const std::shared_ptr<Group>& of) {
          return halves ? Team{of, r / 2 * 2, 2} : Team::all(of);
        };
        for (int repeated = 0; repeated < 3; ++repeated) {
          const Sequence one(team(plain), tokens), two(team(group), tokens);
          const std::int64_t own = one.own(at::empty({1, tokens})).size(1);
          const at::Tensor qkv = at::randn({batch, own, 3, heads, width}), k = at::randn({batch, own, heads, width});
          const at::Tensor q = qkv.select(2, 0), v = qkv.select(2, 2);
          const at::Tensor expected = one.attention(q, k, v, attend);
          if (random() % 2) two.start(q, k, v);
          if (!two.attention(q, k, v, attend).equal(expected)) problem = "attention " + std::to_string(i);
        }
      }
    });
  for (auto& rank : ranks) rank.join();
  for (const auto& problem : problems) EXPECT_EQ(problem, "");
}

}  // namespace
}  // namespace ditfleet::pipeline::parallel
