#include "worker/adapters/fetcher.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "shared/core/fd_io.h"
#include "shared/core/unique_fd.h"
#include "shared/loras/content.h"
#include "shared/safetensors/peft_folder.h"
#include "worker/adapters/metrics.h"

namespace ditfleet::worker {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr auto kCallTimeout = 5s;    // per call; the largest answer is a chunk of 1 MiB
constexpr auto kRetryLimit = 10min;  // how long calls are repeated while Redis is unavailable
constexpr auto kPause = 200ms;
constexpr std::size_t kPiece = 1u << 20;

bool is_transient(const Error& error) {
  return error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded;
}

Error with_context(const std::string& name, Error error) {
  error.message = "the adapter '" + name + "': " + error.message;
  error.param = "loras";
  return error;
}

Error deleted() {
  return {Code::kNotFound, "it was deleted after the job was submitted; register it again and resubmit the job", {}};
}

Error lost() {
  return {Code::kDataCorrupt,
          "it is registered, but Redis has lost some of its bytes; upload it again, and check that Redis' "
          "maxmemory-policy is noeviction",
          {}};
}

// If several sources fail, the error with the highest rank is reported.
int rank(const Error& error) {
  switch (error.code) {
    case Code::kResourceExhausted: return 4;
    case Code::kDataCorrupt: return 3;
    case Code::kPermissionDenied: return 2;
    default: return 1;
  }
}

}  // namespace

Result<AdapterCopyPtr> copy_registered_file(AdapterCopies& copies, const loras::Location& location,
                                            const std::string& path, const std::vector<std::string>& folders) {
  const std::string its_file = location.one_place ? "its file '" + path + "'" : "its file";
  const auto whole = safetensors::open_adapter(path);
  if (!whole)
    return Error{whole.error().code, its_file + " cannot be read on this worker: " + whole.error().message, {}};
  const UniqueFd file(::open(whole->file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) {
    const int code = errno;
    return Error{code == ENOENT || code == ENOTDIR ? Code::kNotFound : Code::kUnavailable,
                 its_file + " cannot be read on this worker: " + std::strerror(code),
                 {}};
  }
  // Checks the file that was opened: the path may name another one by now.
  std::error_code ec;
  const fs::path opened = fs::read_symlink("/proc/self/fd/" + std::to_string(file.get()), ec);
  const auto contains_it = [&](const std::string& folder) {
    std::error_code missing;
    const fs::path root = fs::canonical(folder, missing);
    return !missing && loras::is_inside(opened, root);
  };
  if (ec || std::none_of(folders.begin(), folders.end(), contains_it)) {
    std::string list;
    for (const auto& folder : folders) list += (list.empty() ? "" : ", ") + folder;
    return Error{Code::kPermissionDenied,
                 its_file + " is outside the folders that this worker reads adapters from" +
                     (list.empty() ? "; loras.folders is empty, so upload the file instead" : ": " + list),
                 {}};
  }
  struct stat found {};
  if (::fstat(file.get(), &found) != 0 || !S_ISREG(found.st_mode))
    return Error{Code::kDataCorrupt, its_file + " is not a regular file", {}};
  const auto changed = [&](const std::string& what) {
    return Error{Code::kDataCorrupt,
                 its_file + " has changed since it was registered: " + what + " instead of " +
                     std::to_string(location.bytes) + " bytes with the SHA-256 " + location.sha256 +
                     "; register it again",
                 {}};
  };
  const std::int64_t bytes = whole->bytes(found.st_size);
  if (bytes != location.bytes) return changed("it has " + std::to_string(bytes) + " bytes");
  if (::lseek(file.get(), static_cast<off_t>(whole->begins), SEEK_SET) < 0)
    return unavailable(its_file + " cannot be read: " + std::strerror(errno));
  auto writer = copies.begin(location.sha256, location.bytes);
  if (!writer) return writer.error();
  for (std::optional<std::string> piece = whole->head;; piece.reset()) {
    if (!piece || piece->empty()) piece = read_up_to(file.get(), kPiece);
    if (!piece) return unavailable(its_file + " cannot be read: " + std::strerror(errno));
    if (piece->empty()) break;
    auto written = (*writer)->write(*piece);
    if (!written)
      return written.error().code == Code::kDataCorrupt ? changed(written.error().message) : written.error();
  }
  auto copy = (*writer)->commit();
  if (!copy && copy.error().code == Code::kDataCorrupt) return changed(copy.error().message);
  if (copy) {
    count_adapter_bytes("file", location.bytes);
    set_adapter_cache_bytes(copies.bytes());
  }
  return copy;
}

AdapterFetcher::AdapterFetcher(asio::any_io_executor executor, AdapterSource* source, AdapterCopies& copies,
                               std::vector<std::string> folders)
    : executor_(std::move(executor)), source_(source), copies_(copies), folders_(std::move(folders)) {}

bool AdapterFetcher::Flight::is_wanted() const {
  return std::any_of(wanted.begin(), wanted.end(), [](const std::function<bool()>& wants) { return wants(); });
}

asio::awaitable<void> AdapterFetcher::pause() {
  asio::steady_timer timer(executor_, kPause);
  co_await timer.async_wait(asio::use_awaitable);
}

asio::awaitable<Result<loras::Location>> AdapterFetcher::locate(std::string sha256, std::function<bool()> wanted) {
  const auto give_up = Deadline::after(kRetryLimit);
  while (true) {
    auto location = co_await source_->lookup(sha256, Deadline::after(kCallTimeout));
    if (location) co_return location;
    if (location.error().code == Code::kNotFound) co_return deleted();
    if (!is_transient(location.error()) || give_up.passed()) co_return location.error();
    if (!wanted()) co_return Error{Code::kCanceled, "the adapter is no longer wanted", {}};
    co_await pause();
  }
}

asio::awaitable<Result<FetchedAdapter>> AdapterFetcher::fetch(std::string sha256, std::string name,
                                                              std::function<bool()> wanted) {
  auto location = co_await locate(sha256, wanted);
  if (!location) {
    if (location.error().code == Code::kNotFound) copies_.remove(sha256);
    co_return with_context(name, location.error());
  }
  const Flight::Source source{location->upload, location->paths};
  // Each caller gets its own name in errors: callers that share a fetch may belong to different tenants.
  const auto answer = [pinned = location->pinned, name](Result<FetchedAdapter> fetched) -> Result<FetchedAdapter> {
    if (!fetched) return with_context(name, fetched.error());
    fetched->pinned = pinned;
    return fetched;
  };
  if (auto copy = copies_.find_checked(sha256)) co_return answer(FetchedAdapter{std::move(copy), true});
  for (auto found = flights_.find(sha256); found != flights_.end(); found = flights_.find(sha256)) {
    const FlightPtr flight = found->second;
    flight->wanted.push_back(wanted);
    boost::system::error_code ignored;
    while (!flight->result) co_await flight->done.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    // The failed fetch may have used an upload or a path that the registry no longer has. Then fetch again.
    if (*flight->result || flight->source == source) co_return answer(*flight->result);
  }
  auto flight = std::make_shared<Flight>(executor_, source);
  flight->done.expires_at(Deadline::never().time_point());
  flight->wanted.push_back(std::move(wanted));
  flights_.emplace(sha256, flight);
  // Wakes the waiting callers even if this coroutine is canceled.
  struct Landing {
    AdapterFetcher& fetcher;
    const std::string& sha256;
    Flight& flight;
    ~Landing() {
      if (!flight.result) flight.result = Error{Code::kCanceled, "the fetch was canceled", {}};
      fetcher.flights_.erase(sha256);
      flight.done.cancel();
    }
  } landing{*this, sha256, *flight};
  auto fetched = co_await run_flight(sha256, flight, std::move(*location));
  flight->result = fetched;
  co_return answer(std::move(fetched));
}

asio::awaitable<Result<FetchedAdapter>> AdapterFetcher::run_flight(std::string sha256, FlightPtr flight,
                                                                   loras::Location location) {
  const std::function<Result<AdapterCopyPtr>()> look = [this, sha256]() -> Result<AdapterCopyPtr> {
    return copies_.find(sha256);
  };
  auto found = co_await disk_.run<AdapterCopyPtr>(look, Deadline::never());
  if (found && *found) co_return FetchedAdapter{std::move(*found), true};
  std::optional<Error> failed;
  const auto note = [&failed](Error error) {
    if (!failed || rank(error) > rank(*failed)) failed = std::move(error);
  };
  for (const std::string& path : location.paths) {
    const std::function<Result<AdapterCopyPtr>()> work = [this, location, path] {
      return copy_registered_file(copies_, location, path, folders_);
    };
    auto copied = co_await disk_.run<AdapterCopyPtr>(work, Deadline::never());
    if (copied) co_return FetchedAdapter{std::move(*copied), false};
    if (!location.one_place)
      spdlog::warn("adapters: could not copy {} from '{}': {}", sha256.substr(0, 12), path, copied.error().message);
    note(copied.error());
  }
  if (location.chunks > 0) {
    const std::string upload = location.upload;
    auto downloaded = co_await download(std::move(location), flight);
    if (downloaded) co_return FetchedAdapter{std::move(*downloaded), false};
    note(downloaded.error());
    if (downloaded.error().code == Code::kNotFound) {
      const std::function<bool()> wanted = [flight] { return flight->is_wanted(); };
      const auto still = co_await locate(sha256, wanted);
      if (still && still->upload == upload) note(lost());
    }
  }
  if (!failed) failed = Error{Code::kDataCorrupt, "the registry has no source for its bytes; register it again", {}};
  co_return std::move(*failed);
}

asio::awaitable<Result<AdapterCopyPtr>> AdapterFetcher::download(loras::Location location, FlightPtr flight) {
  // The disk thread uses the writer only while this coroutine waits for it.
  auto writer = std::make_shared<std::unique_ptr<AdapterCopies::Writer>>();
  const std::function<Result<void>()> begin = [this, writer, location]() -> Result<void> {
    auto begun = copies_.begin(location.sha256, location.bytes);
    if (!begun) return begun.error();
    *writer = std::move(*begun);
    return {};
  };
  if (auto begun = co_await disk_.run<void>(begin, Deadline::never()); !begun) co_return begun.error();
  // Removes the partial file now: the disk thread may keep its reference to the writer a little longer.
  const auto given_up = [&writer](Error error) {
    writer->reset();
    return error;
  };
  auto give_up = Deadline::after(kRetryLimit);
  for (int i = 0; i < location.chunks;) {
    if (!flight->is_wanted()) co_return given_up({Code::kCanceled, "the adapter is no longer wanted", {}});
    auto chunk = co_await source_->read_chunk(location, i, Deadline::after(kCallTimeout));
    if (!chunk) {
      if (chunk.error().code == Code::kNotFound) co_return given_up(deleted());
      if (!is_transient(chunk.error()) || give_up.passed()) co_return given_up(chunk.error());
      spdlog::warn("adapters: reading {} from Redis is delayed: {}", location.sha256.substr(0, 12),
                   chunk.error().message);
      co_await pause();
      continue;
    }
    give_up = Deadline::after(kRetryLimit);
    ++i;
    const std::function<Result<void>()> write = [writer, piece = std::make_shared<std::string>(std::move(*chunk))] {
      return (*writer)->write(*piece);
    };
    if (auto written = co_await disk_.run<void>(write, Deadline::never()); !written)
      co_return given_up(written.error());
  }
  const std::function<Result<AdapterCopyPtr>()> commit = [this, writer,
                                                          sha256 = location.sha256]() -> Result<AdapterCopyPtr> {
    auto copy = (*writer)->commit();
    writer->reset();
    if (copy) set_adapter_cache_bytes(copies_.bytes());
    if (copy || copy.error().code != Code::kDataCorrupt) return copy;
    return Error{Code::kDataCorrupt,
                 "Redis does not have the bytes that were uploaded: " + copy.error().message + " instead of " + sha256 +
                     "; remove it under every name and upload it again",
                 {}};
  };
  auto copy = co_await disk_.run<AdapterCopyPtr>(commit, Deadline::never());
  if (copy) count_adapter_bytes("redis", location.bytes);
  co_return copy;
}

}  // namespace ditfleet::worker
