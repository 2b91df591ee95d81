#include "worker/ranks/leader.h"

#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "shared/core/missing_peer.h"
#include "worker/ranks/degrees.h"
#include "worker/ranks/follower.h"
#include "worker/ranks/messages.h"
#include "worker/ranks/pulse.h"
#include "worker/ranks/rank.h"

namespace ditfleet::worker {
namespace {

constexpr int kSlowest = 3;               // times as long as rank 0 another may take to load
constexpr std::chrono::seconds kEnds{5};  // after SIGKILL

using pipeline::Generation;
using pipeline::Model;

class Processes final : public RankProcesses {
 public:
  Processes(UniqueFd memory, std::shared_ptr<PulseMemory> pulses, const pipeline::RankOptions& options,
            EngineFactory create)
      : memory_(std::move(memory)), pulses_(std::move(pulses)), options_(options), create_(std::move(create)) {}
  ~Processes() override {
    const std::lock_guard lock(mutex_);
    broken_already_ = true;
  }

  void add(int number, pid_t process, UniqueFd socket) {
    ranks_.push_back(std::make_unique<Rank>(number, process, std::move(socket), options_.wait));
  }

  void on_broken(std::function<void(const Error&)> broken) override {
    const std::lock_guard lock(mutex_);
    broken_ = std::move(broken);
  }
  Result<std::unique_ptr<pipeline::Engine>> create_engine() override;
  void kill() override {
    fail(rank_fault("[ranks] rank 0 ends"), spdlog::level::debug);
    const Deadline limit = Deadline::after(kEnds);
    for (const auto& rank : ranks_)
      while (!rank->reap() && !limit.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

  Replies ask(const Message& message) {
    Replies replies;
    for (const auto& rank : ranks_) replies.add(rank->number(), rank->ask(message));
    return replies;
  }
  void tell(const Message& message) { ask(message); }  // nobody waits for the replies
  // When the others must have done what this rank began then and has done now. A file system or driver may hang.
  Deadline limit(Deadline::Clock::time_point began) const {
    return Deadline::after(kSlowest * (Deadline::Clock::now() - began + options_.wait));
  }
  // When the others must have failed after this rank has failed. Their replies only say why.
  Deadline soon() const { return Deadline::after(std::min(options_.wait, kSilent)); }
  // Kills the other ranks and reports it, the first time.
  void fail(const Error& error, spdlog::level::level_enum level = spdlog::level::err) {
    const std::lock_guard lock(mutex_);
    fail_locked(error, level);
  }
  void fail_locked(const Error& error, spdlog::level::level_enum level) {
    if (std::exchange(broken_already_, true)) return;
    spdlog::log(level, error.message);
    for (const auto& rank : ranks_) rank->kill(error);
    if (const auto broken = std::exchange(broken_, {})) broken(error);
  }
  // Ends what this rank waits for in a step. NCCL may block it.
  void abort() {
    const std::lock_guard lock(engine_mutex_);
    if (engine_) engine_->abort_ranks();
  }
  void set_engine(pipeline::Engine* engine) {
    const std::lock_guard lock(engine_mutex_);
    engine_ = engine;
  }

 private:
  void found_silent(int number) {
    const std::lock_guard lock(mutex_);
    if (broken_already_) return;  // the ranks may be gone
    const Rank& rank = *ranks_[static_cast<std::size_t>(number - 1)];
    if (rank.debugged()) return;
    fail_locked(rank_fault(rank.name() + " has not run for " + std::to_string(kSilent.count()) + " ms"),
                spdlog::level::err);
  }

  const UniqueFd memory_;
  const std::shared_ptr<PulseMemory> pulses_;
  const pipeline::RankOptions options_;  // of rank 0
  const EngineFactory create_;
  std::mutex mutex_;
  bool broken_already_ = false;
  std::function<void(const Error&)> broken_;
  std::mutex engine_mutex_;
  pipeline::Engine* engine_ = nullptr;        // whose collectives end when a rank ends
  std::unique_ptr<Pulse> pulse_;              // goes on until the ranks have ended, which would miss it
  std::vector<std::unique_ptr<Rank>> ranks_;  // their readers use the other members
};

class SharedGeneration final : public Generation {
 public:
  // `size`: with one GPU the other ranks do not have the generation.
  SharedGeneration(Processes& ranks, std::int64_t id, std::unique_ptr<Generation> own,
                   const pipeline::RequestSize& size)
      : size(size), ranks_(ranks), id_(id), own_(std::move(own)) {}
  ~SharedGeneration() override {
    if (size.gpus > 1) ranks_.tell({.call = Call::kRelease, .generation = id_});
  }

  const pipeline::RequestSize size;

  std::vector<std::string> warnings() const override { return own_->warnings(); }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return own_->phases_us(); }
  const std::map<std::string, std::int64_t>& device_phases_us() const override { return own_->device_phases_us(); }
  int skipped_steps() const override { return own_->skipped_steps(); }
  void go_on_from(std::string state) override {
    from_ = state;
    own_->go_on_from(std::move(state));
  }
  Result<void> dump(const std::string& path) const override { return own_->dump(path); }

  std::int64_t id() const { return id_; }
  Generation& own() { return *own_; }
  const std::string& from() const { return from_; }

 private:
  Processes& ranks_;
  const std::int64_t id_;
  const std::unique_ptr<Generation> own_;
  std::string from_;
};

class SharedModel final : public Model {
 public:
  SharedModel(Processes& ranks, std::int64_t number, std::unique_ptr<Model> own)
      : ranks_(ranks), number_(number), own_(std::move(own)) {}

  const pipeline::ModelInfo& info() const override { return own_->info(); }
  Result<pipeline::RequestSize> size_of(const pipeline::GenerationRequest& request) const override {
    return own_->size_of(request);
  }
  pipeline::MemoryReport memory() const override { return own_->memory(); }
  pipeline::AdapterHoldings adapters() const override { return own_->adapters(); }

  Result<std::unique_ptr<Generation>> encode(const pipeline::GenerationRequest& request) override {
    static std::atomic<std::int64_t> last = 0;
    const std::int64_t id = ++last;
    auto size = own_->size_of(request);
    if (!size) return size.error();
    if (request.alone.value_or(degrees_.one_is_faster(*size))) {
      pipeline::GenerationRequest chosen = request;
      chosen.alone = true;
      auto own = own_->encode(chosen);
      pipeline::RequestSize with_one = *size;
      with_one.gpus = 1;
      if (own)
        return std::unique_ptr<Generation>(std::make_unique<SharedGeneration>(ranks_, id, std::move(*own), with_one));
      // Several GPUs may have the memory.
      if (request.alone || own.error().code != Code::kOutOfMemory) return own.error();
    }
    Replies replies = ranks_.ask({Call::kEncode, number_, id, packed(request)});
    auto own = own_->encode(request);
    const Result<void> there = replies.wait();
    if (own) {
      auto shared = std::make_unique<SharedGeneration>(ranks_, id, std::move(*own), *size);
      if (!there) return there.error();
      return std::unique_ptr<Generation>(std::move(shared));
    }
    ranks_.tell({.call = Call::kRelease, .generation = id});  // some of them may have it
    return own.error();
  }

  // Rank 0 decides after each step whether to go on. When a rank fails, the others miss it.
  Result<void> denoise(Generation& generation, const pipeline::StepCallback& on_step) override {
    auto& shared = dynamic_cast<SharedGeneration&>(generation);
    Replies replies;
    if (shared.size.gpus > 1) replies = ranks_.ask({Call::kDenoise, number_, shared.id(), packed(shared.from())});
    // The first step sets things up.
    auto began = std::chrono::steady_clock::now();
    const Result<void> own = own_->denoise(shared.own(), [&](const pipeline::StepProgress& progress) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      if (progress.step > 1 && !progress.skipped) degrees_.observe(shared.size, took.count());
      const bool go_on = !on_step || on_step(progress);
      began = std::chrono::steady_clock::now();
      return go_on;
    });
    // A rank that this one has missed may never reply.
    const Result<void> there = replies.wait(own ? Deadline::never() : ranks_.soon());
    if (own && !there) return rank_fault(there.error().message);
    if (!own && !there && is_missing_peer(own.error())) return rank_fault(there.error().message);
    return own;
  }

  Result<pipeline::Media> decode(Generation& generation, const pipeline::FrameCallback& on_frames) override {
    return own_->decode(dynamic_cast<SharedGeneration&>(generation).own(), on_frames);
  }

  Result<void> prefetch(const std::vector<pipeline::LoraRequest>& loras, const pipeline::AdapterDrops& drops) override {
    Replies replies = ranks_.ask({Call::kPrefetch, number_, 0, packed(loras, drops)});
    const Result<void> own = own_->prefetch(loras, drops), there = replies.wait();
    return own ? there : own;
  }
  void pin_adapters(const std::set<std::string>& ids) override {
    ranks_.tell({Call::kPin, number_, 0, packed(ids)});
    own_->pin_adapters(ids);
  }
  void forget_adapter(const std::string& id) override {
    ranks_.tell({Call::kForget, number_, 0, packed(id)});
    own_->forget_adapter(id);
  }

 private:
  Processes& ranks_;
  Degrees degrees_;
  const std::int64_t number_;  // in the order of loading
  const std::unique_ptr<Model> own_;
};

class SharedEngine final : public pipeline::Engine {
 public:
  SharedEngine(Processes& ranks, std::unique_ptr<pipeline::Engine> own) : ranks_(ranks), own_(std::move(own)) {}
  ~SharedEngine() override { ranks_.set_engine(nullptr); }

  std::string device() const override { return own_->device(); }
  std::string device_name() const override { return own_->device_name(); }
  std::string precision() const override { return own_->precision(); }
  std::string compile_backend() const override { return own_->compile_backend(); }
  std::string software() const override { return own_->software(); }
  region::RegionCounts region_counts() const override { return own_->region_counts(); }
  void abort_ranks() noexcept override { ranks_.fail(rank_fault("[ranks] this worker ends"), spdlog::level::debug); }

  Result<std::unique_ptr<Model>> load_model(const pipeline::ModelSource& source) override {
    Replies replies = ranks_.ask({.call = Call::kLoad, .bytes = packed(source)});
    const auto began = Deadline::Clock::now();
    auto own = own_->load_model(source);
    const Result<void> there = replies.wait(ranks_.limit(began));
    if (!own) return own.error();
    if (!there) return there.error();
    return std::unique_ptr<Model>(std::make_unique<SharedModel>(ranks_, models_++, std::move(*own)));
  }
  Result<pipeline::PlanReport> plan(const pipeline::ModelSource& source,
                                    const pipeline::GenerationRequest& request) override {
    return own_->plan(source, request);
  }

 private:
  Processes& ranks_;
  const std::unique_ptr<pipeline::Engine> own_;
  std::int64_t models_ = 0;
};

Result<std::unique_ptr<pipeline::Engine>> Processes::create_engine() {
  for (const auto& rank : ranks_)
    rank->start([this] { abort(); },
                [this](const Error& error) {
                  fail(error);
                  abort();
                });
  pulse_ = std::make_unique<Pulse>(pulses_, 0, [this](int rank) { found_silent(rank); });
  Replies replies = ask({Call::kCreate});
  const auto began = Deadline::Clock::now();
  auto own = create_(options_);
  if (own) set_engine(own->get());
  const Result<void> there = replies.wait(limit(began));
  if (!own || !there) {
    set_engine(nullptr);
    return !own && (there || !is_missing_peer(own.error())) ? own.error() : there.error();
  }
  return std::unique_ptr<pipeline::Engine>(std::make_unique<SharedEngine>(*this, std::move(*own)));
}

}  // namespace

Result<std::shared_ptr<RankProcesses>> RankProcesses::start(pipeline::RankOptions options, UniqueFd memory,
                                                            const EngineFactory& create) {
  const auto cannot = [](const char* what) {
    return unavailable(std::string("[ranks] cannot ") + what + ": " + std::strerror(errno));
  };
  options.memory = memory.get();
  auto pulses = PulseMemory::create(options.size);
  if (!pulses) return pulses.error();
  auto made = std::make_shared<Processes>(std::move(memory), *pulses, options, create);
  for (int rank = 1; rank < options.size; ++rank) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return cannot("open a socket pair");
    UniqueFd here(ends[0]), there(ends[1]);
    const pid_t parent = ::getpid(), child = ::fork();
    if (child < 0) return cannot("start a process");
    if (child == 0) {
      // A drain is rank 0's business, and a terminal or systemd signals all processes.
      for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, SIG_IGN);
      ::prctl(PR_SET_NAME, ("ditfleet-rank" + std::to_string(rank)).c_str());
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) std::_Exit(EXIT_FAILURE);
      here.reset();
      options.rank = rank;
      follow(there.get(), options, create, *pulses);
    }
    made->add(rank, child, std::move(here));
  }
  return std::shared_ptr<RankProcesses>(std::move(made));
}

}  // namespace ditfleet::worker
