#include "worker/adapters/source.h"

#include "shared/redis/connection.h"

namespace ditfleet::worker {
namespace {

class RegistrySource final : public AdapterSource {
 public:
  explicit RegistrySource(std::shared_ptr<redis::Connection> connection) : registry_(std::move(connection)) {}
  void start() override { registry_.connection()->start(); }
  void stop() override { registry_.connection()->stop(); }
  asio::awaitable<Result<loras::Location>> lookup(const std::string& sha256, Deadline deadline) override {
    return registry_.lookup(sha256, deadline);
  }
  asio::awaitable<Result<std::string>> read_chunk(const loras::Location& location, int index,
                                                  Deadline deadline) override {
    return registry_.read_chunk(location, index, deadline);
  }
  asio::awaitable<Result<std::int64_t>> version(Deadline deadline) override { return registry_.version(deadline); }

 private:
  loras::Registry registry_;
};

}  // namespace

std::unique_ptr<AdapterSource> registry_source(std::shared_ptr<redis::Connection> connection) {
  return std::make_unique<RegistrySource>(std::move(connection));
}

}  // namespace ditfleet::worker
