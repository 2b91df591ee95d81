// Where the bytes of adapters come from: the registry of adapters, as far as a worker needs it.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>

#include "shared/core/deadline.h"
#include "shared/core/result.h"
#include "shared/loras/registry.h"

namespace ditfleet::worker {

namespace asio = boost::asio;

// The io thread's; errors are those of loras::Registry.
class AdapterSource {
 public:
  virtual ~AdapterSource() = default;
  virtual void start() {}
  virtual void stop() {}
  // kNotFound: registered under no name (any more).
  virtual asio::awaitable<Result<loras::Location>> lookup(const std::string& sha256, Deadline deadline) = 0;
  virtual asio::awaitable<Result<std::string>> read_chunk(const loras::Location& location, int index,
                                                          Deadline deadline) = 0;
  // Another number whenever something was registered, replaced or removed.
  virtual asio::awaitable<Result<std::int64_t>> version(Deadline deadline) = 0;
};

// The registry itself, over a connection that is nobody else's: the queue's commands would wait behind its chunks.
std::unique_ptr<AdapterSource> registry_source(std::shared_ptr<redis::Connection> connection);

}  // namespace ditfleet::worker
