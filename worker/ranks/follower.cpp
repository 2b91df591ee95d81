#include "worker/ranks/follower.h"

#include <spdlog/spdlog.h>

#include <boost/asio/post.hpp>
#include <cstdlib>
#include <map>
#include <mutex>

#include "shared/core/named_thread.h"
#include "worker/ranks/messages.h"

namespace ditfleet::worker {
namespace {

class Follower {
 public:
  Follower(int socket, const pipeline::RankOptions& ranks, const EngineFactory& create)
      : socket_(socket), ranks_(ranks), create_(create) {}

  // Stages of different requests overlap, as in rank 0.
  void handle(Message message) {
    const std::string call(message.head.at("call").as_string());
    if (call == "ping") return reply(message, {});
    NamedThread& thread = call == "encode"                                                               ? text_
                          : call == "denoise" || call == "release" || call == "create" || call == "load" ? device_
                                                                                                         : adapters_;
    asio::post(thread.executor(), [this, call, message = std::move(message)] { reply(message, run(call, message)); });
  }

 private:
  void reply(const Message& message, const Result<void>& result) {
    Message made;
    made.head["id"] = message.head.at("id");
    put_result(made.head, result);
    const std::lock_guard lock(mutex_);
    (void)send_message(socket_, made);  // if rank 0 has ended, the reader ends this process
  }

  Result<void> run(const std::string& call, const Message& m) try {
    if (call == "create") {
      auto engine = create_(ranks_);
      if (!engine) return engine.error();
      engine_ = std::move(*engine);
      return {};
    }
    if (call == "load") {
      auto model = engine_->load_model(source_of(m));
      if (!model) return model.error();
      const std::lock_guard lock(mutex_);
      models_.push_back(std::move(*model));
      return {};
    }
    if (call == "release") {  // after a step that may use it
      decltype(generations_)::node_type released;
      const std::lock_guard lock(mutex_);
      released = generations_.extract(m.head.at("generation").as_int64());
      return {};
    }
    pipeline::Model& model = model_of(m);
    if (call == "encode") {
      auto request = request_of(m);
      if (!request) return request.error();
      auto generation = model.encode(*request);
      if (!generation) return generation.error();
      const std::lock_guard lock(mutex_);
      generations_[m.head.at("generation").as_int64()] = std::move(*generation);
      return {};
    }
    if (call == "denoise") {
      pipeline::Generation* generation = nullptr;
      {
        const std::lock_guard lock(mutex_);
        generation = generations_.at(m.head.at("generation").as_int64()).get();
      }
      return model.denoise(*generation, nullptr);
    }
    if (call == "prefetch") return model.prefetch(loras_of(m), drops_of(m));
    if (call == "pin") {
      const auto ids = strings_of(m.head.at("ids"));
      model.pin_adapters({ids.begin(), ids.end()});
    } else {
      model.forget_adapter(std::string(m.head.at("adapter").as_string()));
    }
    return {};
  } catch (const std::exception& e) {
    return internal_error(std::string("[ranks] ") + call + ": " + e.what());
  }

  pipeline::Model& model_of(const Message& m) {
    const std::lock_guard lock(mutex_);
    return *models_.at(static_cast<std::size_t>(m.head.at("model").as_int64()));
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

void follow(int socket, const pipeline::RankOptions& ranks, const EngineFactory& create) {
  Follower follower(socket, ranks, create);
  while (auto message = receive_message(socket)) follower.handle(std::move(*message));
  // Threads may be in the middle of something that nobody waits for any more.
  spdlog::shutdown();
  std::_Exit(EXIT_SUCCESS);
}

}  // namespace ditfleet::worker
