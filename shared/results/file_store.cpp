#include "shared/results/file_store.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "shared/core/bytes.h"
#include "shared/core/fd_io.h"
#include "shared/core/log_throttle.h"
#include "shared/core/named_thread.h"
#include "shared/core/sha256.h"
#include "shared/core/unique_fd.h"
#include "shared/results/verification.h"

namespace ditfleet::results {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxPreviewBytes = 64 << 20, kMaxInputBytes = 256 << 20;
constexpr std::chrono::minutes kMostClockDifference{1};

// "results/3f/<name>"
std::string relative_path(const char* kind, const ResultKey& result, const std::string& last) {
  return std::string(kind) + "/" + sha256_hex(result.job).substr(0, 2) + "/" + result.job + "." +
         std::to_string(result.unit) + "." + result.nonce + "." + last;
}

std::string input_path(const std::string& sha256) { return "inputs/" + sha256.substr(0, 2) + "/" + sha256; }

// Whether relative_path() could have made the path. A manifest comes from Redis and must not name a file elsewhere.
bool is_own_path(std::string_view path, std::string_view kind) {
  if (!path.starts_with(kind) || path.size() < kind.size() + 5 || path[kind.size()] != '/') return false;
  const auto rest = path.substr(kind.size() + 1);
  constexpr std::string_view kHex = "0123456789abcdef";
  if (kHex.find(rest[0]) == kHex.npos || kHex.find(rest[1]) == kHex.npos || rest[2] != '/') return false;
  const auto name = rest.substr(3);
  return name != "." && name != ".." && name.find('/') == name.npos && name.find('\0') == name.npos;
}

Result<void> sync_folder(const std::string& folder) {
  const UniqueFd opened(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.valid()) return unavailable("cannot open the folder '" + folder + "': " + std::strerror(errno));
  if (::fsync(opened.get()) != 0) return unavailable("cannot sync the folder '" + folder + "'");
  return {};
}

// The file and its folder must survive a power failure before a manifest names them.
Result<void> write_whole(const std::string& path, std::string_view bytes) {
  const fs::path folder = fs::path(path).parent_path();
  std::error_code error;
  const bool made = fs::create_directories(folder, error);
  if (error) return unavailable("cannot create the folder '" + folder.string() + "': " + error.message());
  if (auto written = write_file_atomically(path, bytes); !written) return written;
  if (auto synced = sync_folder(folder); !synced || !made) return synced;
  return sync_folder(folder.parent_path());
}

Result<UniqueFd> open_result(const std::string& path) {
  // Nonblocking: opening a FIFO would block the thread.
  UniqueFd file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.valid()) return file;
  const int e = errno;
  if (e == ENOENT) return not_found("the result file does not exist; it has expired or was removed");
  return unavailable("cannot open the result '" + path + "': " + std::strerror(e));
}

Result<void> remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return {};
  return unavailable("cannot remove '" + path + "': " + std::strerror(errno));
}

Result<void> check_own(const Manifest& manifest) {
  if (manifest.backend == "file" && is_own_path(manifest.key, "results")) return {};
  return data_corrupt("the result '" + manifest.key + "' of backend '" + manifest.backend +
                      "' is not in this store (file, results/…)");
}

// kDataCorrupt: the file is larger than `limit`.
Result<std::string> read_whole(const std::string& path, std::int64_t limit) {
  const auto file = open_result(path);
  if (!file) return file.error();
  struct stat status {};
  if (::fstat(file->get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size > limit)
    return data_corrupt("the result file '" + path + "' is larger than its manifest says, or not a file");
  auto bytes = read_up_to(file->get(), static_cast<std::size_t>(status.st_size));
  if (!bytes) return unavailable("cannot read the result '" + path + "': " + std::strerror(errno));
  return std::move(*bytes);
}

}  // namespace

Result<int> sweep(const std::string& dir, std::chrono::milliseconds age, fs::file_time_type local_time) {
  // The folder's file server gives it its own time, by which it also dates the files.
  if (::utimensat(AT_FDCWD, dir.c_str(), nullptr, 0) != 0)
    return unavailable("cannot write to the folder '" + dir + "': " + std::strerror(errno));
  std::error_code error;
  const auto now = fs::last_write_time(dir, error);
  if (error) return unavailable("cannot read the folder '" + dir + "': " + error.message());
  const auto ahead = std::chrono::duration_cast<std::chrono::seconds>(local_time - now);
  if (std::chrono::abs(ahead) > kMostClockDifference) {
    return unavailable("this host's clock differs by " + std::to_string(ahead.count()) +
                       " s from that of the folder '" + dir + "'; set both clocks");
  }
  const auto limit = now - age;
  int removed = 0;
  for (fs::directory_iterator folders(dir, error), end; !error && folders != end; folders.increment(error)) {
    std::error_code inner;
    if (!folders->is_directory(inner) || folders->is_symlink(inner)) continue;
    for (fs::directory_iterator files(folders->path(), inner); !inner && files != end; files.increment(inner)) {
      std::error_code ignored;
      if (files->is_symlink(ignored) || !files->is_regular_file(ignored)) continue;
      const auto changed = files->last_write_time(ignored);
      if (!ignored && changed < limit && fs::remove(files->path(), ignored)) ++removed;
    }
  }
  return removed;
}

struct FileStore::Impl {
  std::string dir;
  std::chrono::milliseconds result_age, preview_age, input_age;
  // Used on the disk thread only; null once the store is closing. The thread must end before it is destroyed.
  std::unique_ptr<asio::steady_timer> next_sweep;
  LogThrottle unswept_log;  // also
  NamedThread disk{"results-disk"};

  std::string path(const std::string& relative) const { return dir + "/" + relative; }

  // Sweeps now and then every quarter of the shorter age.
  void keep_sweeping() {
    int removed = 0;
    for (const auto& swept : {sweep(dir + "/results", result_age), sweep(dir + "/previews", preview_age),
                              sweep(dir + "/inputs", input_age)}) {
      if (swept) {
        removed += *swept;
      } else if (const auto more = unswept_log.admit()) {
        spdlog::warn("not removing expired results: {}{}", swept.error().message, *more);
      }
    }
    if (removed > 0) spdlog::info("removed {} expired files from the results folder '{}'", removed, dir);
    next_sweep->expires_after(std::clamp(std::min({result_age, preview_age, input_age}) / 4,
                                         std::chrono::milliseconds(1000), std::chrono::milliseconds(600'000)));
    next_sweep->async_wait([this](boost::system::error_code error) {
      if (!error && next_sweep) keep_sweeping();
    });
  }
};

Result<std::shared_ptr<Store>> FileStore::open(const StoreOptions& options) {
  if (options.dir.empty()) {
    return invalid_argument("results.backend is 'file', which needs results.dir: a folder that all hosts share",
                            "results.dir");
  }
  std::error_code error;
  for (const char* kind : {"/results", "/previews", "/inputs"}) {
    fs::create_directories(options.dir + kind, error);
    if (error) return unavailable("cannot create the results folder '" + options.dir + kind + "': " + error.message());
  }
  if (::access(options.dir.c_str(), W_OK | X_OK) != 0) {
    return unavailable("the results folder '" + options.dir + "' cannot be written to: " + std::strerror(errno));
  }
  auto impl = std::make_unique<Impl>();
  impl->dir = fs::absolute(options.dir);
  impl->result_age = std::chrono::milliseconds(options.retention_ms + kExtraRetentionMs);
  impl->preview_age = std::chrono::milliseconds(options.preview_ms);
  impl->input_age = std::chrono::milliseconds(options.input_ms);
  asio::post(impl->disk.executor(), [impl = impl.get()] {
    impl->next_sweep = std::make_unique<asio::steady_timer>(impl->disk.executor());
    impl->keep_sweeping();
  });
  return std::shared_ptr<Store>(new FileStore(std::move(impl)));
}

FileStore::FileStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

FileStore::~FileStore() {
  // Accepted writes are still performed; only the sweeps end here.
  asio::post(impl_->disk.executor(), [impl = impl_.get()] { impl->next_sweep.reset(); });
}

asio::awaitable<Result<Manifest>> FileStore::put(const ResultKey& result, std::string bytes, std::string media_type,
                                                 Deadline deadline) {
  if (auto named = check_names(result); !named) co_return named.error();
  std::function<Result<Manifest>()> work = [result, dir = impl_->dir, bytes = std::move(bytes),
                                            media_type]() -> Result<Manifest> {
    Manifest manifest = describe(result, bytes, media_type);
    manifest.backend = "file";
    manifest.key = relative_path("results", result, extension_of(media_type));
    if (auto written = write_whole(dir + "/" + manifest.key, bytes); !written) return written.error();
    return manifest;
  };
  co_return co_await impl_->disk.run<Manifest>(std::move(work), deadline);
}

asio::awaitable<Result<std::string>> FileStore::get_piece(const Manifest& manifest, std::int64_t offset,
                                                          std::int64_t size, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  size = std::min(size, manifest.bytes - offset);
  std::function<Result<std::string>()> work = [path = impl_->path(manifest.key), offset,
                                               size]() -> Result<std::string> {
    const auto file = open_result(path);
    if (!file) return file.error();
    std::string bytes(static_cast<std::size_t>(std::max<std::int64_t>(0, size)), '\0');
    if (::pread(file->get(), bytes.data(), bytes.size(), offset) != static_cast<ssize_t>(bytes.size()))
      return data_corrupt("the result file '" + path + "' is shorter than its manifest says");
    return bytes;
  };
  co_return co_await impl_->disk.run<std::string>(std::move(work), deadline);
}

asio::awaitable<Result<std::string>> FileStore::get(const Manifest& manifest, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  std::function<Result<std::string>()> work = [manifest, path = impl_->path(manifest.key)]() -> Result<std::string> {
    auto bytes = read_whole(path, manifest.bytes);
    if (!bytes) return bytes;
    if (auto good = verify(manifest, *bytes); !good) return good.error();
    return bytes;
  };
  co_return co_await impl_->disk.run<std::string>(std::move(work), deadline);
}

asio::awaitable<Result<void>> FileStore::touch(const Manifest& manifest, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  std::function<Result<void>()> work = [path = impl_->path(manifest.key)]() -> Result<void> {
    if (::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW) == 0 || errno == ENOENT) return {};
    return unavailable("cannot extend the life of '" + path + "': " + std::strerror(errno));
  };
  co_return co_await impl_->disk.run<void>(std::move(work), deadline);
}

asio::awaitable<Result<void>> FileStore::remove(const Manifest& manifest, Deadline deadline) {
  if (auto own = check_own(manifest); !own) co_return own.error();
  std::function<Result<void>()> work = [path = impl_->path(manifest.key)] { return remove_file(path); };
  co_return co_await impl_->disk.run<void>(std::move(work), deadline);
}

asio::awaitable<Result<std::string>> FileStore::put_preview(const ResultKey& result, int index, std::string bytes,
                                                            Deadline deadline) {
  if (auto named = check_names(result); !named) co_return named.error();
  std::function<Result<std::string>()> work = [result, index, dir = impl_->dir,
                                               bytes = std::move(bytes)]() -> Result<std::string> {
    const std::string key = relative_path("previews", result, std::to_string(index));
    if (auto written = write_whole(dir + "/" + key, bytes); !written) return written.error();
    return key;
  };
  co_return co_await impl_->disk.run<std::string>(std::move(work), deadline);
}

asio::awaitable<Result<std::string>> FileStore::get_preview(const std::string& key, Deadline deadline) {
  if (!is_own_path(key, "previews")) co_return invalid_argument("'" + key + "' is not a preview's key (previews/…)");
  std::function<Result<std::string>()> work = [path = impl_->path(key)]() -> Result<std::string> {
    return read_whole(path, kMaxPreviewBytes);
  };
  co_return co_await impl_->disk.run<std::string>(std::move(work), deadline);
}

asio::awaitable<Result<void>> FileStore::put_input(const std::string& sha256, std::string bytes, Deadline deadline) {
  std::function<Result<void>()> work = [path = impl_->path(input_path(sha256)), bytes = std::move(bytes)] {
    return write_whole(path, bytes);
  };
  co_return co_await impl_->disk.run<void>(std::move(work), deadline);
}

asio::awaitable<Result<void>> FileStore::touch_input(const std::string& sha256, Deadline deadline) {
  std::function<Result<void>()> work = [sha256, path = impl_->path(input_path(sha256))]() -> Result<void> {
    if (::utimensat(AT_FDCWD, path.c_str(), nullptr, AT_SYMLINK_NOFOLLOW) == 0) return {};
    if (errno == ENOENT) return input_gone(sha256);
    return unavailable("cannot extend the life of '" + path + "': " + std::strerror(errno));
  };
  co_return co_await impl_->disk.run<void>(std::move(work), deadline);
}

asio::awaitable<Result<std::string>> FileStore::get_input(const std::string& sha256, Deadline deadline) {
  if (!is_sha256_hex(sha256)) co_return input_gone(sha256);
  std::function<Result<std::string>()> work = [sha256,
                                               path = impl_->path(input_path(sha256))]() -> Result<std::string> {
    auto bytes = read_whole(path, kMaxInputBytes);
    if (!bytes) return bytes.error().code == Code::kNotFound ? input_gone(sha256) : bytes.error();
    if (auto good = verify_input(sha256, *bytes); !good) return good.error();
    return bytes;
  };
  co_return co_await impl_->disk.run<std::string>(std::move(work), deadline);
}

asio::awaitable<Result<void>> FileStore::remove_input(const std::string& sha256, Deadline deadline) {
  std::function<Result<void>()> work = [path = impl_->path(input_path(sha256))] { return remove_file(path); };
  co_return co_await impl_->disk.run<void>(std::move(work), deadline);
}

}  // namespace ditfleet::results
