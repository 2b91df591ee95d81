#include "shared/queue/client.h"

#include "shared/queue/calls.h"

namespace ditfleet::queue {

Client::Client(std::shared_ptr<redis::Connection> connection, QueueOptions options)
    : impl_(std::make_shared<Impl>(std::move(connection), options)) {}
Client::~Client() = default;
const QueueOptions& Client::options() const { return impl_->options_; }

asio::awaitable<Result<void>> Client::load_library(Deadline deadline) {
  const auto impl = impl_;
  co_return co_await impl->load(deadline);
}

}  // namespace ditfleet::queue
