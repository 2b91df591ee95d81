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
#include "worker/adapters/metrics.h"

namespace ditfleet::worker {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr auto kCallTimeout = 5s;  // of one call, a chunk of 1 MiB included
constexpr auto kAskFor = 10s;      // how long Redis is asked again while it is away
constexpr auto kPause = 200ms;
constexpr std::size_t kPiece = 1u << 20;

bool is_away(const Error& error) { return error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded; }

// The name goes in front, the field behind.
Error about(const std::string& name, Error error) {
  error.message = "the adapter '" + name + "': " + error.message;
  error.param = "loras";
  return error;
}

Error deleted() {
  return {Code::kNotFound, "it was deleted after the job was submitted; register it again and submit the job anew", {}};
}

Error lost() {
  return {Code::kDataCorrupt,
          "it is registered, but Redis has lost some of its bytes (its maxmemory-policy must be noeviction); upload it "
          "again",
          {}};
}

// Of several sources that failed, the one of which there is most to tell.
int weight(const Error& error) {
  switch (error.code) {
    case Code::kResourceExhausted: return 4;
    case Code::kDataCorrupt: return 3;
    case Code::kPermissionDenied: return 2;
    default: return 1;
  }
}

bool is_below(const fs::path& file, const std::string& folder) {
  std::error_code ec;
  const fs::path root = fs::canonical(folder, ec);
  if (ec) return false;
  const auto [at, unused] = std::mismatch(root.begin(), root.end(), file.begin(), file.end());
  return at == root.end();
}

}  // namespace

Result<AdapterCopyPtr> copy_registered_file(AdapterCopies& copies, const loras::Location& location,
                                            const std::string& path, const std::vector<std::string>& folders) {
  const std::string its_file = location.one_place ? "its file '" + path + "'" : "its file";
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) {
    const int code = errno;
    return Error{code == ENOENT || code == ENOTDIR ? Code::kNotFound : Code::kUnavailable,
                 its_file + " cannot be read on this worker: " + std::strerror(code),
                 {}};
  }
  // What was opened, not what the path names by now, is what must lie in a folder.
  std::error_code ec;
  const fs::path opened = fs::read_symlink("/proc/self/fd/" + std::to_string(file.get()), ec);
  if (ec || std::none_of(folders.begin(), folders.end(),
                         [&](const std::string& folder) { return is_below(opened, folder); })) {
    std::string list;
    for (const auto& folder : folders) list += (list.empty() ? "" : ", ") + folder;
    return Error{Code::kPermissionDenied,
                 its_file + " is outside the folders that this worker takes adapters from" +
                     (list.empty() ? "; it takes none, upload the file instead" : ": " + list),
                 {}};
  }
  struct stat found {};
  if (::fstat(file.get(), &found) != 0 || !S_ISREG(found.st_mode))
    return Error{Code::kDataCorrupt, its_file + " is no regular file", {}};
  const auto changed = [&](const std::string& what) {
    return Error{Code::kDataCorrupt,
                 its_file + " has changed since it was registered: " + what + ", registered were " +
                     std::to_string(location.bytes) + " bytes with the SHA-256 " + location.sha256 +
                     "; register it again",
                 {}};
  };
  if (found.st_size != location.bytes) return changed("it has " + std::to_string(found.st_size) + " bytes");
  auto writer = copies.begin(location.sha256, location.bytes);
  if (!writer) return writer.error();
  while (true) {
    const auto piece = read_up_to(file.get(), kPiece);
    if (!piece) return unavailable(its_file + " cannot be read: " + std::strerror(errno));
    if (piece->empty()) break;
    auto written = writer->write(*piece);
    if (!written)
      return written.error().code == Code::kDataCorrupt ? changed(written.error().message) : written.error();
  }
  auto copy = writer->commit();
  if (!copy && copy.error().code == Code::kDataCorrupt) return changed(copy.error().message);
  if (copy) {
    count_adapter_bytes("file", location.bytes);
    show_adapter_cache(copies.bytes());
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
  const auto give_up = Deadline::after(kAskFor);
  while (true) {
    auto location = co_await source_->lookup(sha256, Deadline::after(kCallTimeout));
    if (location) co_return location;
    if (location.error().code == Code::kNotFound) co_return deleted();
    if (!is_away(location.error()) || give_up.passed()) co_return location.error();
    if (!wanted()) co_return Error{Code::kCanceled, "the adapter is not wanted any more", {}};
    co_await pause();
  }
}

asio::awaitable<Result<FetchedAdapter>> AdapterFetcher::fetch(std::string sha256, std::string name,
                                                              std::function<bool()> wanted) {
  auto location = co_await locate(sha256, wanted);
  if (!location) {
    if (location.error().code == Code::kNotFound) copies_.remove(sha256);
    co_return about(name, location.error());
  }
  const Flight::Source source{location->upload, location->paths};
  // To each under the name of its own: who waits for the same fetch may be another tenant.
  const auto told = [pinned = location->pinned, name](Result<FetchedAdapter> fetched) -> Result<FetchedAdapter> {
    if (!fetched) return about(name, fetched.error());
    fetched->pinned = pinned;
    return fetched;
  };
  if (auto copy = copies_.find_checked(sha256)) co_return told(FetchedAdapter{std::move(copy), true});
  for (auto found = flights_.find(sha256); found != flights_.end(); found = flights_.find(sha256)) {
    const FlightPtr flight = found->second;
    flight->wanted.push_back(wanted);
    boost::system::error_code ignored;
    while (!flight->result) co_await flight->done.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    // One that began before the adapter was deleted and registered again, or registered elsewhere, too, fails alone.
    if (*flight->result || flight->source == source) co_return told(*flight->result);
  }
  auto flight = std::make_shared<Flight>(executor_, source);
  flight->done.expires_at(Deadline::Clock::time_point::max());
  flight->wanted.push_back(std::move(wanted));
  flights_.emplace(sha256, flight);
  // Also if this coroutine is ended: nobody may wait for it then.
  struct Landing {
    AdapterFetcher& fetcher;
    const std::string& sha256;
    Flight& flight;
    ~Landing() {
      if (!flight.result) flight.result = Error{Code::kCanceled, "the adapter is not fetched any more", {}};
      fetcher.flights_.erase(sha256);
      flight.done.cancel();
    }
  } landing{*this, sha256, *flight};
  auto fetched = co_await fly(sha256, flight, std::move(*location));
  flight->result = fetched;
  co_return told(std::move(fetched));
}

asio::awaitable<Result<FetchedAdapter>> AdapterFetcher::fly(std::string sha256, FlightPtr flight,
                                                            loras::Location location) {
  const std::function<Result<AdapterCopyPtr>()> look = [this, sha256]() -> Result<AdapterCopyPtr> {
    return copies_.find(sha256);
  };
  auto here = co_await disk_.run<AdapterCopyPtr>(look, Deadline::never());
  if (here && *here) co_return FetchedAdapter{std::move(*here), true};
  std::optional<Error> failed;
  const auto note = [&failed](Error error) {
    if (!failed || weight(error) > weight(*failed)) failed = std::move(error);
  };
  for (const std::string& path : location.paths) {
    const std::function<Result<AdapterCopyPtr>()> work = [this, location, path] {
      return copy_registered_file(copies_, location, path, folders_);
    };
    auto copied = co_await disk_.run<AdapterCopyPtr>(work, Deadline::never());
    if (copied) co_return FetchedAdapter{std::move(*copied), false};
    if (!location.one_place)
      spdlog::warn("adapters: {} from '{}': {}", sha256.substr(0, 12), path, copied.error().message);
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
  if (!failed)
    failed = Error{Code::kDataCorrupt, "the registry does not say where its bytes are; register it again", {}};
  co_return std::move(*failed);
}

asio::awaitable<Result<AdapterCopyPtr>> AdapterFetcher::download(loras::Location location, FlightPtr flight) {
  // Shared with the disk's thread, which has it only while this waits.
  auto writer = std::make_shared<std::optional<AdapterCopies::Writer>>();
  const std::function<Result<bool>()> begin = [this, writer, location]() -> Result<bool> {
    auto begun = copies_.begin(location.sha256, location.bytes);
    if (!begun) return begun.error();
    writer->emplace(std::move(*begun));
    return true;
  };
  if (auto begun = co_await disk_.run<bool>(begin, Deadline::never()); !begun) co_return begun.error();
  // At once, while the disk's thread has nothing to do with it; its last piece of work may hold on to it a little
  // longer.
  const auto given_up = [&writer](Error error) {
    writer->reset();
    return error;
  };
  auto give_up = Deadline::after(kAskFor);
  for (int i = 0; i < location.chunks;) {
    if (!flight->is_wanted()) co_return given_up({Code::kCanceled, "the adapter is not wanted any more", {}});
    auto chunk = co_await source_->read_chunk(location, i, Deadline::after(kCallTimeout));
    if (!chunk) {
      if (chunk.error().code == Code::kNotFound) co_return given_up(deleted());
      if (!is_away(chunk.error()) || give_up.passed()) co_return given_up(chunk.error());
      spdlog::warn("adapters: {} is not read on yet: {}", location.sha256.substr(0, 12), chunk.error().message);
      co_await pause();
      continue;
    }
    give_up = Deadline::after(kAskFor);
    ++i;
    const std::function<Result<bool>()> write =
        [writer, piece = std::make_shared<std::string>(std::move(*chunk))]() -> Result<bool> {
      auto written = (*writer)->write(*piece);
      if (!written) return written.error();
      return true;
    };
    if (auto written = co_await disk_.run<bool>(write, Deadline::never()); !written)
      co_return given_up(written.error());
  }
  const std::function<Result<AdapterCopyPtr>()> commit = [this, writer,
                                                          sha256 = location.sha256]() -> Result<AdapterCopyPtr> {
    auto copy = (*writer)->commit();
    writer->reset();
    if (copy) show_adapter_cache(copies_.bytes());
    if (copy || copy.error().code != Code::kDataCorrupt) return copy;
    return Error{Code::kDataCorrupt,
                 "what Redis holds of it is not what was uploaded: " + copy.error().message + ", not " + sha256 +
                     "; remove it, under every name, and upload it again",
                 {}};
  };
  auto copy = co_await disk_.run<AdapterCopyPtr>(commit, Deadline::never());
  if (copy) count_adapter_bytes("redis", location.bytes);
  co_return copy;
}

}  // namespace ditfleet::worker
