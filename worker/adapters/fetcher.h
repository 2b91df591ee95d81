// From a digest to a file of this host that holds it: the copy that is there, else one made from a registered file in
// an allowed folder or from the chunks in Redis.
//
// Every use asks the registry first, so that what was deleted is not drawn with, however many copies there are.
#pragma once

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/named_thread.h"
#include "worker/adapters/copies.h"
#include "worker/adapters/source.h"

namespace ditfleet::worker {

struct FetchedAdapter {
  AdapterCopyPtr copy;
  bool was_here = false;  // before anybody asked for it
  bool pinned = false;    // in the registry, now
};

// The io thread's. Disk work is done on a thread of its own, one piece at a time; of the bytes no more than a piece is
// in memory.
class AdapterFetcher {
 public:
  // `folders`: where registered files may lie, all below them included; after symbolic links.
  AdapterFetcher(asio::any_io_executor executor, AdapterSource* source, AdapterCopies& copies,
                 std::vector<std::string> folders);

  // `name` is for messages to whoever asks with it. `wanted`: false ends what waits for Redis. One fetch a digest at a
  // time; who asks meanwhile waits for it, and tries itself where it failed and the registry told this one of other
  // places. Errors, param "loras": kNotFound: deleted, or a file that is not there. kDataCorrupt: the bytes are not
  // what was registered. kPermissionDenied: a file outside the folders. kResourceExhausted: the disk is full.
  // kUnavailable: Redis is away, or the folder of copies can't be written. kCanceled: not wanted any more.
  asio::awaitable<Result<FetchedAdapter>> fetch(std::string sha256, std::string name, std::function<bool()> wanted);

 private:
  struct Flight {
    using Source = std::pair<std::string, std::vector<std::string>>;  // the upload, the paths
    Flight(const asio::any_io_executor& executor, Source from) : source(std::move(from)), done(executor) {}
    const Source source;
    asio::steady_timer done;  // expires never, is canceled when the result is there
    std::vector<std::function<bool()>> wanted;
    std::optional<Result<FetchedAdapter>> result;
    bool is_wanted() const;
  };
  using FlightPtr = std::shared_ptr<Flight>;

  asio::awaitable<Result<FetchedAdapter>> fly(std::string sha256, FlightPtr flight, loras::Location location);
  asio::awaitable<Result<loras::Location>> locate(std::string sha256, std::function<bool()> wanted);
  asio::awaitable<Result<AdapterCopyPtr>> download(loras::Location location, FlightPtr flight);
  asio::awaitable<void> pause();

  asio::any_io_executor executor_;
  AdapterSource* source_;
  AdapterCopies& copies_;
  const std::vector<std::string> folders_;
  std::map<std::string, FlightPtr> flights_;  // by digest
  NamedThread disk_{"adapter files"};
};

// Copies a registered file that lies in one of the folders. Blocks. Errors as AdapterFetcher::fetch's.
Result<AdapterCopyPtr> copy_registered_file(AdapterCopies& copies, const loras::Location& location,
                                            const std::string& path, const std::vector<std::string>& folders);

}  // namespace ditfleet::worker
