#include "worker/ranks/follower.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <csignal>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "shared/core/named_thread.h"
#include "worker/ranks/messages.h"
#include "worker/ranks/pulse.h"

namespace ditfleet::worker {
namespace {

class Follower {
 public:
  Follower(int socket, const pipeline::RankOptions& ranks, const EngineFactory& create)
      : socket_(socket), ranks_(ranks), create_(create) {}

  // Stages of different requests overlap, as in rank 0.
  void handle(Message message) {
    NamedThread* thread = nullptr;
    switch (message.call) {
      case Call::kEncode: thread = &text_; break;
      case Call::kCreate:
      case Call::kLoad:
      case Call::kDenoise:
      case Call::kRelease: thread = &device_; break;
      case Call::kPrefetch:
      case Call::kPin:
      case Call::kForget: thread = &adapters_;
    }
    asio::post(thread->executor(), [this, message = std::move(message)] { reply(message, run(message)); });
  }

 private:
  void reply(const Message& message, const Result<void>& result) {
    const Message made{
        .call = message.call, .bytes = packed(result ? std::nullopt : std::optional(result.error())), .id = message.id};
    const std::lock_guard lock(mutex_);
    (void)send_message(socket_, made);  // if rank 0 has ended, the reader ends this process
  }

  Result<void> run(const Message& m) try {
    switch (m.call) {
      case Call::kCreate: {
        auto engine = create_(ranks_);
        if (!engine) return engine.error();
        engine_ = std::move(*engine);
        return {};
      }
      case Call::kLoad: {
        auto model = engine_->load_model(arguments<pipeline::ModelSource>(m));
        if (!model) return model.error();
        const std::lock_guard lock(mutex_);
        models_.push_back(std::move(*model));
        return {};
      }
      case Call::kRelease: {  // after a step that may use it
        decltype(generations_)::node_type released;
        const std::lock_guard lock(mutex_);
        released = generations_.extract(m.generation);
        return {};
      }
      case Call::kEncode: {
        auto generation = model_of(m).encode(arguments<pipeline::GenerationRequest>(m));
        if (!generation) return generation.error();
        const std::lock_guard lock(mutex_);
        generations_[m.generation] = std::move(*generation);
        return {};
      }
      case Call::kDenoise: {
        pipeline::Generation* generation = nullptr;
        {
          const std::lock_guard lock(mutex_);
          generation = generations_.at(m.generation).get();
        }
        if (auto from = arguments<std::string>(m); !from.empty()) generation->go_on_from(std::move(from));
        return model_of(m).denoise(*generation, nullptr);
      }
      case Call::kPrefetch: {
        std::vector<pipeline::LoraRequest> loras;
        pipeline::AdapterDrops drops;
        if (!unpack(m.bytes, loras, drops)) return internal_error("[ranks] the message is cut off");
        return model_of(m).prefetch(loras, drops);
      }
      case Call::kPin: model_of(m).pin_adapters(arguments<std::set<std::string>>(m)); return {};
      case Call::kForget: model_of(m).forget_adapter(arguments<std::string>(m)); return {};
    }
    return internal_error("[ranks] an unknown call");
  } catch (const std::exception& e) {
    return internal_error("[ranks] " + std::string(name_of(m.call)) + ": " + e.what());
  }

  template <class T>
  static T arguments(const Message& m) {
    T value;
    if (!unpack(m.bytes, value)) throw std::runtime_error("the message is cut off");
    return value;
  }

  pipeline::Model& model_of(const Message& m) {
    const std::lock_guard lock(mutex_);
    return *models_.at(static_cast<std::size_t>(m.model));
  }

  const int socket_;
  const pipeline::RankOptions ranks_;
  const EngineFactory& create_;
  std::mutex mutex_;  // for the containers and for sending
  std::unique_ptr<pipeline::Engine> engine_;
  std::vector<std::unique_ptr<pipeline::Model>> models_;
  std::map<std::int64_t, std::unique_ptr<pipeline::Generation>> generations_;
  NamedThread device_{"device"}, text_{"text"}, adapters_{"adapters"};
};

}  // namespace

void follow(int socket, const pipeline::RankOptions& ranks, const EngineFactory& create,
            std::shared_ptr<PulseMemory> pulses) {
  const pid_t leader = ::getppid();
  auto pulse = std::make_unique<Pulse>(std::move(pulses), ranks.rank, [&](int silent) {
    if (silent != 0 || is_debugged(leader)) return;  // rank 0 ends the others
    spdlog::error("{} has not run for {} ms; rank {} ends it", rank_name(0, leader), kSilent.count(), ranks.rank);
    spdlog::shutdown();
    ::kill(leader, SIGKILL);  // it is still the parent: this process ends with it
    std::_Exit(EXIT_FAILURE);
  });
  Follower follower(socket, ranks, create);
  while (auto message = receive_message(socket)) follower.handle(std::move(*message));
  pulse.reset();
  // Threads may be in the middle of something that nobody waits for any more.
  spdlog::shutdown();
  std::_Exit(EXIT_SUCCESS);
}

}  // namespace ditfleet::worker
