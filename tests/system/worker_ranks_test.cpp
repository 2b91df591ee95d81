// Rank 0 and its processes, with engines made for the test.
#include "worker/ranks/leader.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "shared/core/missing_peer.h"
#include "worker/ranks/rank.h"

namespace ditfleet::worker {
namespace {

using namespace std::chrono_literals;

// What the ranks do, and have done; in memory that they share.
struct Shared {
  std::atomic<int> generations = 0;                                          // that exist
  std::atomic<int> encode_fails = 0, denoise_fails = 0, denoise_misses = 0;  // a bit for each rank
  std::atomic<int> hangs_loading = -1, throws = -1, hangs_denoising = -1;    // ranks
  std::atomic<int> hang_ms = 300;                                            // while denoising
  std::atomic<bool> denoising = false, used_after_release = false;
};

template <class F>
bool until(F condition, std::chrono::milliseconds limit = 20s) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

bool has(int bits, int rank) { return (bits >> rank & 1) != 0; }

class FakeGeneration final : public pipeline::Generation {
 public:
  FakeGeneration(Shared& shared, int rank) : shared_(shared), rank_(rank) { ++shared_.generations; }
  ~FakeGeneration() override {
    if (shared_.denoising && rank_ == shared_.hangs_denoising) shared_.used_after_release = true;
    --shared_.generations;
  }
  std::vector<std::string> warnings() const override { return {}; }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return {}; }
  Result<void> dump(const std::string&) const override { return {}; }

 private:
  Shared& shared_;
  const int rank_;
};

class FakeModel final : public pipeline::Model {
 public:
  FakeModel(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
  const pipeline::ModelInfo& info() const override { return info_; }
  Result<pipeline::RequestSize> size_of(const pipeline::GenerationRequest&) const override {
    return pipeline::RequestSize{.gpus = 2};
  }
  Result<std::unique_ptr<pipeline::Generation>> encode(const pipeline::GenerationRequest&) override {
    if (has(shared_.encode_fails, rank_)) return Error{Code::kOutOfMemory, "no memory"};
    return std::unique_ptr<pipeline::Generation>(std::make_unique<FakeGeneration>(shared_, rank_));
  }
  Result<void> denoise(pipeline::Generation&, const pipeline::StepCallback&) override {
    if (shared_.throws == rank_) {
      until([&] { return shared_.denoising.load(); });
      throw std::runtime_error("on purpose");
    }
    if (shared_.hangs_denoising == rank_) {
      shared_.denoising = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(shared_.hang_ms));
      shared_.denoising = false;
    }
    if (has(shared_.denoise_misses, rank_)) return missing_peer("nobody came");
    if (has(shared_.denoise_fails, rank_)) return invalid_argument("a name with [parallel] in it");
    return {};
  }
  Result<pipeline::Media> decode(pipeline::Generation&, const pipeline::FrameCallback&) override {
    return pipeline::Media{};
  }
  Result<void> prefetch(const std::vector<pipeline::LoraRequest>&, const pipeline::AdapterDrops&) override {
    return {};
  }
  void pin_adapters(const std::set<std::string>&) override {}
  void forget_adapter(const std::string&) override {}
  pipeline::AdapterHoldings adapters() const override { return {}; }

 private:
  Shared& shared_;
  const int rank_;
  const pipeline::ModelInfo info_{.name = "fake"};
};

class FakeEngine final : public pipeline::Engine {
 public:
  FakeEngine(Shared& shared, int rank) : shared_(shared), rank_(rank) {}
  std::string device() const override { return "fake"; }
  std::string device_name() const override { return "fake"; }
  std::string precision() const override { return "fp32"; }
  std::string compile_backend() const override { return "none"; }
  std::string software() const override { return "none"; }
  region::RegionCounts region_counts() const override { return {}; }
  Result<std::unique_ptr<pipeline::Model>> load_model(const pipeline::ModelSource&) override {
    while (shared_.hangs_loading == rank_) std::this_thread::sleep_for(1ms);
    return std::unique_ptr<pipeline::Model>(std::make_unique<FakeModel>(shared_, rank_));
  }
  Result<pipeline::PlanReport> plan(const pipeline::ModelSource&, const pipeline::GenerationRequest&) override {
    return internal_error("not here");
  }

 private:
  Shared& shared_;
  const int rank_;
};

class WorkerRanks : public testing::Test {
 protected:
  WorkerRanks()
      : shared_(*new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
                    Shared) {}

  void start(int size, std::chrono::milliseconds wait = 20s) {
    const EngineFactory create = [this](const pipeline::RankOptions& ranks) {
      return Result<std::unique_ptr<pipeline::Engine>>(std::make_unique<FakeEngine>(shared_, ranks.rank));
    };
    auto ranks = RankProcesses::start({.size = size, .wait = wait}, UniqueFd(), create);
    ASSERT_TRUE(ranks.ok());
    ranks_ = *ranks;
    auto engine = ranks_->create_engine();
    ASSERT_TRUE(engine.ok()) << engine.error().message;
    engine_ = std::move(*engine);
  }
  void load() {
    auto model = engine_->load_model({"fake", "/nowhere"});
    ASSERT_TRUE(model.ok()) << model.error().message;
    model_ = std::move(*model);
  }
  Result<std::unique_ptr<pipeline::Generation>> encode() { return model_->encode({}); }
  Result<void> denoise() {
    auto generation = encode();
    if (!generation) return generation.error();
    return model_->denoise(**generation, {});
  }

  Shared& shared_;
  std::shared_ptr<RankProcesses> ranks_;
  std::unique_ptr<pipeline::Engine> engine_;
  std::unique_ptr<pipeline::Model> model_;
};

// What it has enqueued cannot be taken back, so its next forward would be wrong.
TEST_F(WorkerRanks, ARankThatFailsAfterTheLastStepOfRank0IsADeviceFault) {
  start(2);
  load();
  ASSERT_TRUE(denoise().ok());
  shared_.denoise_fails = 1 << 1;
  const auto done = denoise();
  ASSERT_FALSE(done.ok());
  EXPECT_EQ(done.error().code, Code::kDeviceFault);
  EXPECT_TRUE(done.error().message.starts_with("rank 1: ")) << done.error().message;
}

TEST_F(WorkerRanks, AnErrorOfAllRanksIsTheRequestsWhateverItSays) {
  start(2);
  load();
  shared_.denoise_fails = 0b11;
  EXPECT_EQ(denoise().error().code, Code::kInvalidArgument);
}

TEST_F(WorkerRanks, WhoOnlyMissedTheOthersIsNotToBlame) {
  start(3);
  load();
  shared_.denoise_misses = 0b011;
  shared_.denoise_fails = 0b100;
  const auto done = denoise();
  EXPECT_EQ(done.error().code, Code::kDeviceFault);
  EXPECT_TRUE(done.error().message.starts_with("rank 2: ")) << done.error().message;
}

// Its device hangs, but the process answers.
TEST_F(WorkerRanks, ARankThatOthersMissedNeedNotReply) {
  start(2, 1001ms);  // pings are sent after a second
  load();
  shared_.denoise_misses = 0b01;
  shared_.hangs_denoising = 1;
  shared_.hang_ms = 60'000;
  const auto done = denoise();
  ASSERT_FALSE(done.ok());
  EXPECT_EQ(done.error().code, Code::kDeviceFault);
  EXPECT_TRUE(done.error().message.starts_with("rank 1: ")) << done.error().message;
}

TEST_F(WorkerRanks, ARankThatEncodesWhatOthersCannotGivesItBack) {
  start(3);
  load();
  for (const int failing : {0b101, 0b001, 0b110, 0b011}) {
    shared_.encode_fails = failing;
    EXPECT_EQ(encode().error().code, Code::kOutOfMemory);
    EXPECT_TRUE(until([&] { return shared_.generations == 0; })) << "ranks that fail: " << failing;
  }
}

TEST_F(WorkerRanks, AGenerationIsReleasedAfterTheStepThatUsesIt) {
  start(2);
  load();
  shared_.throws = 0;
  shared_.hangs_denoising = 1;
  EXPECT_THROW((void)denoise(), std::runtime_error);
  EXPECT_TRUE(until([&] { return shared_.generations == 0; }));
  EXPECT_FALSE(shared_.used_after_release);
}

TEST_F(WorkerRanks, ARankThatHangsWhileItLoadsIsADeviceFault) {
  start(3, 1001ms);  // pings are sent after a second
  shared_.hangs_loading = 2;
  const auto loaded = engine_->load_model({"fake", "/nowhere"});
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code, Code::kDeviceFault);
  EXPECT_TRUE(loaded.error().message.starts_with("rank 2: ")) << loaded.error().message;
}

// A process that another one traces stays a child after its death, as one in a driver's call that never returns.
TEST_F(WorkerRanks, ARankThatCannotBeEndedDoesNotKeepTheWorker) {
  int ends[2], tells[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  ASSERT_EQ(::pipe(tells), 0);
  const auto end_worker = [&] {
    const pid_t rank = ::fork();
    if (rank == 0) {
      ::pause();
      ::_exit(0);
    }
    const pid_t tracer = ::fork();
    if (tracer == 0) {
      const char good = ::ptrace(PTRACE_SEIZE, rank, nullptr, nullptr) == 0 ? 'y' : 'n';
      (void)!::write(tells[1], &good, 1);
      ::sleep(20);
      ::_exit(0);
    }
    char good = 'n';
    if (::read(tells[0], &good, 1) != 1 || good != 'y') ::_exit(77);  // the container does not allow it
    { const Rank one(1, rank, UniqueFd(ends[0]), 200ms); }
    ::_exit(78);
  };
  const pid_t worker = ::fork();
  if (worker == 0) {
    ::setpgid(0, 0);
    end_worker();
  }
  int status = 0;
  const bool ended = until([&] { return ::waitpid(worker, &status, WNOHANG) == worker; });
  ::kill(-worker, SIGKILL);  // the tracer
  ASSERT_TRUE(ended);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no ptrace here";
  EXPECT_EQ(WEXITSTATUS(status), EXIT_FAILURE);
}

}  // namespace
}  // namespace ditfleet::worker
