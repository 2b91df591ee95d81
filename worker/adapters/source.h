// The part of the adapter registry that a worker needs.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/loras/registry.h"

namespace ditfleet::worker {

namespace asio = boost::asio;

// Call every function on the io thread. Errors: those of loras::Registry.
class AdapterSource {
 public:
  virtual ~AdapterSource() = default;
  virtual void start() {}
  virtual void stop() {}
  // kNotFound: no registered adapter has this digest.
  virtual asio::awaitable<Result<loras::Location>> lookup(const std::string& sha256, Deadline deadline) = 0;
  virtual asio::awaitable<Result<std::string>> read_chunk(const loras::Location& location, int index,
                                                          Deadline deadline) = 0;
  // Changes whenever an adapter is registered, replaced or removed.
  virtual asio::awaitable<Result<std::int64_t>> version(Deadline deadline) = 0;
};

// The registry. `connection` must not be the queue's: queue commands would wait behind the chunks of adapters.
std::unique_ptr<AdapterSource> registry_source(std::shared_ptr<redis::Connection> connection);

}  // namespace ditfleet::worker
