// Returns the copy of an adapter on this host. If the folder of copies has none, it makes one from a registered file in
// an allowed folder, or from the chunks in Redis.
//
// Every fetch looks the adapter up in the registry first, so a deleted adapter is never used, even if a copy exists.
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
  bool was_on_disk = false;  // the copy existed before this fetch
  bool pinned = false;       // in the registry, at the time of the fetch
};

// Call every function on the io thread. Disk work runs on a separate thread. At most 1 MiB of an adapter is in memory.
class AdapterFetcher {
 public:
  // Registered files must be below one of `folders` after symbolic links are resolved. `source` must outlive the
  // fetcher. If it is null, fetch() must not be called.
  AdapterFetcher(asio::any_io_executor executor, AdapterSource* source, AdapterCopies& copies,
                 std::vector<std::string> folders);

  // `name` is the adapter's name in error messages. When `wanted` returns false, the fetch stops waiting for Redis.
  // Single flight per digest: a concurrent call waits for the running fetch. If the running fetch fails and the
  // registry meanwhile has different sources, the waiting call fetches again. Errors, with param "loras": kNotFound
  // (deleted, or the file is missing), kDataCorrupt (the bytes differ from the registered ones), kPermissionDenied (a
  // file outside the folders), kResourceExhausted (disk full), kUnavailable (Redis is down, or the folder of copies is
  // not writable), kCanceled (no longer wanted).
  asio::awaitable<Result<FetchedAdapter>> fetch(std::string sha256, std::string name, std::function<bool()> wanted);

  bool busy() const { return disk_.busy(); }

 private:
  struct Flight {
    using Source = std::pair<std::string, std::vector<std::string>>;  // upload, paths
    Flight(const asio::any_io_executor& executor, Source from) : source(std::move(from)), done(executor) {}
    const Source source;
    asio::steady_timer done;  // never expires; canceled when the result is set
    std::vector<std::function<bool()>> wanted;
    std::optional<Result<FetchedAdapter>> result;
    bool is_wanted() const;
  };
  using FlightPtr = std::shared_ptr<Flight>;

  asio::awaitable<Result<FetchedAdapter>> run_flight(std::string sha256, FlightPtr flight, loras::Location location);
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

// Copies a registered file that is below one of the folders. Blocks. Errors: those of AdapterFetcher::fetch().
Result<AdapterCopyPtr> copy_registered_file(AdapterCopies& copies, const loras::Location& location,
                                            const std::string& path, const std::vector<std::string>& folders);

}  // namespace ditfleet::worker
