#include "worker/ranks/leader.h"

#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "shared/core/deadline.h"
#include "worker/ranks/follower.h"
#include "worker/ranks/messages.h"

namespace ditfleet::worker {
namespace {

using pipeline::Generation;
using pipeline::Model;

constexpr std::chrono::seconds kEnds{5};  // how long a rank may take to end by itself
constexpr std::chrono::seconds kPing{1};  // after which silence a rank is asked whether it lives

Error broken(std::string message) { return {Code::kDeviceFault, std::move(message), {}}; }

// One of the other ranks. Thread-safe.
class Rank {
 public:
  // `wait`: how long the rank may not answer at all before it is killed.
  Rank(int number, pid_t process, UniqueFd socket, std::chrono::milliseconds wait)
      : number_(number), process_(process), socket_(std::move(socket)), wait_(wait) {}

  ~Rank() {
    ending_ = true;
    ::shutdown(socket_.get(), SHUT_RDWR);  // ends the reader here, and the other process
    if (reader_.joinable()) reader_.join();
    const Deadline limit = Deadline::after(kEnds);
    while (!reaped_ && ::waitpid(process_, nullptr, WNOHANG) == 0) {
      if (limit.passed()) ::kill(process_, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  // Reads replies on a thread of its own until the rank ends; then calls `broken`. Calls `failed` when the rank reports
  // that its device or its part in a step has failed.
  void start(std::function<void()> failed, std::function<void(const Error&)> broken) {
    reader_ = std::thread([this, failed = std::move(failed), broken = std::move(broken)] {
      while (auto reply = next_message()) {
        const std::lock_guard lock(mutex_);
        const auto found = waiting_.find(reply->head.at("id").as_int64());
        if (found == waiting_.end()) continue;
        Result<void> result = result_of(reply->head);
        if (!result && result.error().code == Code::kDeviceFault) failed();
        found->second.set_value(std::move(result));
        waiting_.erase(found);
      }
      if (ending_) return;
      const Error error = worker::broken(how_it_ended());
      {
        const std::lock_guard lock(mutex_);
        ended_ = error;
        for (auto& [id, promise] : waiting_) promise.set_value(error);
        waiting_.clear();
      }
      broken(error);
    });
  }

  std::future<Result<void>> ask(Message message) {
    std::promise<Result<void>> promise;
    auto reply = promise.get_future();
    const std::lock_guard lock(mutex_);
    if (ended_) {
      promise.set_value(*ended_);
      return reply;
    }
    message.head["id"] = ++last_id_;
    waiting_.emplace(last_id_, std::move(promise));
    (void)send_message(socket_.get(), message);  // if it fails, the reader finds that the rank has ended
    return reply;
  }

  int number() const { return number_; }

 private:
  // A process that is stopped keeps its socket, so it is asked for a sign of life.
  Result<Message> next_message() {
    pollfd ready{socket_.get(), POLLIN, 0};
    for (auto silent = kPing; ::poll(&ready, 1, std::chrono::milliseconds(kPing).count()) == 0; silent += kPing) {
      if (silent > wait_) {
        spdlog::error("[ranks] rank {} has not answered for {} s", number_, silent.count());
        ::kill(process_, SIGKILL);
      }
      ask({{{"call", "ping"}}, {}});
    }
    return receive_message(socket_.get());
  }

  std::string how_it_ended() {
    std::string text = "[ranks] rank " + std::to_string(number_) + " (process " + std::to_string(process_) + ") ";
    int status = 0;
    for (const Deadline limit = Deadline::after(kEnds); ::waitpid(process_, &status, WNOHANG) != process_;) {
      if (limit.passed()) return text + "has closed its socket";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    reaped_ = true;
    if (WIFSIGNALED(status)) return text + "was ended by SIG" + ::sigabbrev_np(WTERMSIG(status));
    return text + "has ended with exit status " + std::to_string(WEXITSTATUS(status));
  }

  const int number_;
  const pid_t process_;
  const UniqueFd socket_;
  const std::chrono::milliseconds wait_;
  std::thread reader_;
  std::atomic<bool> ending_ = false, reaped_ = false;
  std::mutex mutex_;
  std::int64_t last_id_ = 0;
  std::map<std::int64_t, std::promise<Result<void>>> waiting_;
  std::optional<Error> ended_;
};

class Replies {
 public:
  void add(int rank, std::future<Result<void>> reply) { replies_.emplace_back(rank, std::move(reply)); }

  // Waits for all. The first error, with the rank's number; one of a rank that only missed others comes last.
  Result<void> wait() {
    Result<void> first;
    for (auto& [rank, reply] : replies_) {
      Result<void> one = reply.get();
      if (one || (!first && !misses_others(first.error()))) continue;
      Error error = one.error();
      if (!error.message.starts_with("[ranks]")) error.message = "rank " + std::to_string(rank) + ": " + error.message;
      first = std::move(error);
    }
    return first;
  }

  static bool misses_others(const Error& error) { return error.message.find("[parallel]") != std::string::npos; }

 private:
  std::vector<std::pair<int, std::future<Result<void>>>> replies_;
};

class Processes final : public RankProcesses {
 public:
  Processes(UniqueFd memory, const pipeline::RankOptions& options, EngineFactory create)
      : memory_(std::move(memory)), options_(options), create_(std::move(create)) {}

  void add(int number, pid_t process, UniqueFd socket) {
    ranks_.push_back(std::make_unique<Rank>(number, process, std::move(socket), options_.wait));
  }

  void on_broken(std::function<void(const Error&)> broken) override {
    const std::lock_guard lock(mutex_);
    broken_ = std::move(broken);
  }
  Result<std::unique_ptr<pipeline::Engine>> create_engine() override;

  Replies ask(const Message& message) {
    Replies replies;
    for (const auto& rank : ranks_) replies.add(rank->number(), rank->ask(message));
    return replies;
  }
  void tell(const Message& message) { ask(message); }  // nobody waits for the replies
  // Ends what this rank waits for in a step.
  void abort() {
    const std::lock_guard lock(mutex_);
    if (engine_) engine_->abort_ranks();
  }
  void set_engine(pipeline::Engine* engine) {
    const std::lock_guard lock(mutex_);
    engine_ = engine;
  }

 private:
  const UniqueFd memory_;
  const pipeline::RankOptions options_;  // of rank 0
  const EngineFactory create_;
  std::mutex mutex_;
  std::function<void(const Error&)> broken_;
  pipeline::Engine* engine_ = nullptr;        // whose collectives end when a rank ends
  std::vector<std::unique_ptr<Rank>> ranks_;  // their readers use the other members
};

// Which requests one GPU denoises faster than all: small ones, as a rule. Thread-safe.
class Degrees {
 public:
  // What the time of a step depends on.
  // Width × height × frames, text tokens, and a bit for each scale above 1, which may double the forwards.
  using Class = std::array<std::int64_t, 3>;

  static Class class_of(const pipeline::GenerationRequest& request) {
    const job::FieldValues& f = request.fields;
    std::int64_t scales = 0;
    for (const job::Field field : job::kFields)
      if (field.row().type == job::FieldType::kReal && f.has(field)) scales = 2 * scales + (*f.real(field) > 1);
    return {f.integer("width").value_or(1024) * f.integer("height").value_or(1024) * f.integer("frames").value_or(1),
            f.integer("max_sequence_length").value_or(0), scales};
  }

  // Whether one GPU was faster, or the only way that was tried. For a new class: whether that is so for one with at
  // least as many pixels, because the larger a request is, the more it gains from all.
  bool alone(const Class& c) const {
    const std::lock_guard lock(mutex_);
    const auto known = seconds_.find(c);
    if (known != seconds_.end()) return is_alone(known->second);
    return std::any_of(seconds_.begin(), seconds_.end(),
                       [&](const auto& other) { return other.first[0] >= c[0] && is_alone(other.second); });
  }

  void observe(const Class& c, bool alone, double step_s) {
    const std::lock_guard lock(mutex_);
    double& best = seconds_.try_emplace(c, std::array<double, 2>{kNever, kNever}).first->second[alone];
    best = std::min(best, step_s);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static bool is_alone(const std::array<double, 2>& seconds) { return seconds[1] < seconds[0]; }

  mutable std::mutex mutex_;
  std::map<Class, std::array<double, 2>> seconds_;  // shortest step with all ranks, and alone
};

// What both sides of a call have returned.
Result<void> both(Result<void> here, Result<void> there) { return here ? std::move(there) : std::move(here); }

class SharedGeneration final : public Generation {
 public:
  // `alone`: the other ranks do not have it.
  SharedGeneration(Processes& ranks, std::int64_t id, std::unique_ptr<Generation> own, Degrees::Class shape, bool alone)
      : shape(shape), alone(alone), ranks_(ranks), id_(id), own_(std::move(own)) {}
  ~SharedGeneration() override {
    if (!alone) ranks_.tell({{{"call", "release"}, {"generation", id_}}, {}});
  }

  const Degrees::Class shape;
  const bool alone;

  std::vector<std::string> warnings() const override { return own_->warnings(); }
  std::vector<std::pair<std::string, std::int64_t>> phases_us() const override { return own_->phases_us(); }
  const std::map<std::string, std::int64_t>& device_phases_us() const override { return own_->device_phases_us(); }
  Result<void> dump(const std::string& path) const override { return own_->dump(path); }

  std::int64_t id() const { return id_; }
  Generation& own() { return *own_; }

 private:
  Processes& ranks_;
  const std::int64_t id_;
  const std::unique_ptr<Generation> own_;
};

class SharedModel final : public Model {
 public:
  SharedModel(Processes& ranks, std::int64_t number, std::unique_ptr<Model> own)
      : ranks_(ranks), number_(number), own_(std::move(own)) {}

  const pipeline::ModelInfo& info() const override { return own_->info(); }
  pipeline::MemoryReport memory() const override { return own_->memory(); }
  pipeline::AdapterHoldings adapters() const override { return own_->adapters(); }

  Result<std::unique_ptr<Generation>> encode(const pipeline::GenerationRequest& request) override {
    static std::atomic<std::int64_t> last = 0;
    const std::int64_t id = ++last;
    const auto shape = Degrees::class_of(request);
    const bool alone = request.alone.value_or(degrees_.alone(shape));
    if (alone) {
      pipeline::GenerationRequest chosen = request;
      chosen.alone = true;
      auto own = own_->encode(chosen);
      if (own)
        return std::unique_ptr<Generation>(
            std::make_unique<SharedGeneration>(ranks_, id, std::move(*own), shape, true));
      // Several GPUs may have the memory.
      if (request.alone || own.error().code != Code::kOutOfMemory) return own.error();
    }
    Message message = call("encode", message_of(request));
    message.head["generation"] = id;
    Replies replies = ranks_.ask(message);
    auto own = own_->encode(request);
    const Result<void> there = replies.wait();
    if (own) {
      auto shared = std::make_unique<SharedGeneration>(ranks_, id, std::move(*own), shape, false);
      if (!there) return there.error();
      return std::unique_ptr<Generation>(std::move(shared));
    }
    if (there) ranks_.tell({{{"call", "release"}, {"generation", id}}, {}});
    return own.error();
  }

  // Rank 0 decides after each step whether to go on. When a rank fails, the others miss it.
  Result<void> denoise(Generation& generation, const pipeline::StepCallback& on_step) override {
    auto& shared = dynamic_cast<SharedGeneration&>(generation);
    Replies replies;
    if (!shared.alone) {
      Message message = call("denoise");
      message.head["generation"] = shared.id();
      replies = ranks_.ask(message);
    }
    // The first step sets things up.
    auto began = std::chrono::steady_clock::now();
    const Result<void> own = own_->denoise(shared.own(), [&](const pipeline::StepProgress& progress) {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      if (progress.step > 1) degrees_.observe(shared.shape, shared.alone, took.count());
      const bool go_on = !on_step || on_step(progress);
      began = std::chrono::steady_clock::now();
      return go_on;
    });
    const Result<void> there = replies.wait();
    if (own && !there) return broken(there.error().message);
    if (!own && !there && Replies::misses_others(own.error())) return broken(there.error().message);
    return own;
  }

  Result<pipeline::Media> decode(Generation& generation, const pipeline::FrameCallback& on_frames) override {
    return own_->decode(dynamic_cast<SharedGeneration&>(generation).own(), on_frames);
  }

  Result<void> prefetch(const std::vector<pipeline::LoraRequest>& loras, const pipeline::AdapterDrops& drops) override {
    Replies replies = ranks_.ask(call("prefetch", message_of(loras, drops)));
    auto own = own_->prefetch(loras, drops);
    return both(std::move(own), replies.wait());
  }
  void pin_adapters(const std::set<std::string>& ids) override {
    Message message = call("pin");
    message.head["ids"] = json::value_from(ids);
    ranks_.tell(message);
    own_->pin_adapters(ids);
  }
  void forget_adapter(const std::string& id) override {
    Message message = call("forget");
    message.head["adapter"] = id;
    ranks_.tell(message);
    own_->forget_adapter(id);
  }

 private:
  Message call(const char* name, Message message = {}) const {
    message.head["call"] = name;
    message.head["model"] = number_;
    return message;
  }

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
  region::RegionCounts region_counts() const override { return own_->region_counts(); }
  void abort_ranks() noexcept override { own_->abort_ranks(); }

  Result<std::unique_ptr<Model>> load_model(const pipeline::ModelSource& source) override {
    Message message = message_of(source);
    message.head["call"] = "load";
    Replies replies = ranks_.ask(message);
    auto own = own_->load_model(source);
    const Result<void> there = replies.wait();
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
                  abort();
                  const std::lock_guard lock(mutex_);
                  spdlog::error("{}", error.message);
                  if (const auto broken = std::exchange(broken_, {})) broken(error);
                });
  Replies replies = ask({{{"call", "create"}}, {}});
  auto own = create_(options_);
  if (own) set_engine(own->get());
  const Result<void> there = replies.wait();
  if (!own || !there) {
    set_engine(nullptr);
    return !own && (there || !Replies::misses_others(own.error())) ? own.error() : there.error();
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
  auto made = std::make_shared<Processes>(std::move(memory), options, create);
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
      follow(there.get(), options, create);
    }
    made->add(rank, child, std::move(here));
  }
  return std::shared_ptr<RankProcesses>(std::move(made));
}

}  // namespace ditfleet::worker
