#include "worker/adapters/copies.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <utility>

#include "shared/core/fd_io.h"
#include "shared/core/ids.h"

namespace ditfleet::worker {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kExtension = ".safetensors", kPart = ".part";
constexpr auto kAbandonedAfter = std::chrono::hours(1);  // the writer of an older partial file has died

std::int64_t ns(const timespec& time) { return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec; }

Error cannot_write(const std::string& folder, std::int64_t bytes, int code) {
  const std::string reason = std::strerror(code);
  if (code == ENOSPC || code == EDQUOT) {
    return {Code::kResourceExhausted,
            "no space for an adapter of " + std::to_string(bytes) + " bytes in '" + folder + "': " + reason +
                "; free some space, or set worker.lora.cache_dir to a folder on another disk",
            {}};
  }
  return unavailable("cannot write an adapter into '" + folder + "': " + reason +
                     "; worker.lora.cache_dir must be a folder that this worker can write to");
}

struct File {
  std::string path;
  std::int64_t bytes = 0, used_ns = 0;
  bool part = false;
};

// The copies and partial files in the folder. Another process may remove any of them at any time.
std::vector<File> files_in(const std::string& folder) {
  std::vector<File> files;
  std::error_code ec;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    const std::string path = it->path().string();
    const bool part = path.ends_with(kPart);
    struct stat found {};
    if ((!part && !path.ends_with(kExtension)) || ::lstat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode))
      continue;
    files.push_back({path, found.st_size, ns(found.st_atim), part});
  }
  return files;
}

// Returns false if the file is in use.
bool remove_unused(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return errno == ENOENT;
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) return false;
  ::unlink(path.c_str());  // under the lock, so that a process that has just opened the file sees that it is removed
  return true;
}

}  // namespace

// Locks the copy and marks it as just used.
AdapterCopyPtr AdapterCopies::open(const std::string& sha256, Identity* identity) const {
  if (folder_.empty()) return nullptr;
  const std::string path = path_of(sha256);
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  struct stat held {};
  // No links: removed between our open and our lock.
  if (!fd.valid() || ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0 || ::fstat(fd.get(), &held) != 0 ||
      !S_ISREG(held.st_mode) || held.st_nlink == 0) {
    return nullptr;
  }
  const timespec times[2] = {{.tv_sec = 0, .tv_nsec = UTIME_NOW}, {.tv_sec = 0, .tv_nsec = UTIME_OMIT}};
  ::futimens(fd.get(), times);  // fails for another user's file, which then keeps its place in the eviction order
  *identity = {.device = held.st_dev, .inode = held.st_ino, .bytes = held.st_size, .modified_ns = ns(held.st_mtim)};
  return std::make_shared<const AdapterCopy>(held.st_size, std::move(fd));
}

AdapterCopyPtr AdapterCopies::find_checked(const std::string& sha256) {
  {
    const std::lock_guard lock(mutex_);
    if (!checked_.contains(sha256)) return nullptr;
  }
  Identity identity;
  auto copy = open(sha256, &identity);
  const std::lock_guard lock(mutex_);
  const auto known = checked_.find(sha256);
  return copy && known != checked_.end() && known->second == identity ? copy : nullptr;
}

AdapterCopyPtr AdapterCopies::find(const std::string& sha256) {
  if (auto copy = find_checked(sha256)) return copy;
  Identity identity;
  auto copy = open(sha256, &identity);
  if (!copy) return nullptr;
  auto digest = sha256_of_file(copy->path());
  if (!digest || digest->sha256 != sha256) {
    spdlog::warn("adapters: removing '{}', whose content does not match its name: {}", path_of(sha256),
                 digest ? "its SHA-256 is " + digest->sha256 : digest.error().message);
    remove(sha256);
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  checked_[sha256] = identity;
  return copy;
}

void AdapterCopies::remove(const std::string& sha256) {
  {
    const std::lock_guard lock(mutex_);
    checked_.erase(sha256);
  }
  if (!folder_.empty()) ::unlink(path_of(sha256).c_str());
}

std::vector<std::string> AdapterCopies::digests() const {
  std::vector<std::string> out;
  if (folder_.empty()) return out;
  for (const File& file : files_in(folder_)) {
    std::string name = fs::path(file.path).stem().string();
    if (!file.part && is_sha256_hex(name)) out.push_back(std::move(name));
  }
  return out;
}

std::int64_t AdapterCopies::bytes() const {
  std::int64_t sum = 0;
  if (!folder_.empty()) {
    for (const File& file : files_in(folder_)) sum += file.bytes;
  }
  return sum;
}

void AdapterCopies::evict_for(std::int64_t bytes) {
  auto files = files_in(folder_);
  const auto now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch());
  std::int64_t used = 0;
  std::erase_if(files, [&](const File& file) {
    if (file.part && file.used_ns < (now - kAbandonedAfter).count() && remove_unused(file.path)) return true;
    used += file.bytes;
    return file.part;
  });
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.used_ns < b.used_ns; });
  const std::int64_t copies = std::accumulate(files.begin(), files.end(), std::int64_t{0},
                                              [](std::int64_t sum, const File& file) { return sum + file.bytes; });
  std::int64_t free = free_(folder_);
  const bool never_fits = free <= bytes && bytes - free >= copies;  // evicting everything would not be enough
  for (const File& file : files) {
    if (used + bytes <= max_bytes_ && (free > bytes || never_fits)) return;
    if (!remove_unused(file.path)) continue;
    used -= file.bytes;
    free += file.bytes;
  }
}

std::int64_t AdapterCopies::disk_free(const std::string& folder) {
  struct statvfs disk {};
  constexpr auto kUnknown = std::numeric_limits<std::int64_t>::max();
  if (::statvfs(folder.c_str(), &disk) != 0) return kUnknown;
  const auto blocks = static_cast<std::uint64_t>(disk.f_bavail), size = static_cast<std::uint64_t>(disk.f_frsize);
  return size > 0 && blocks > kUnknown / size ? kUnknown : static_cast<std::int64_t>(blocks * size);
}

Result<std::unique_ptr<AdapterCopies::Writer>> AdapterCopies::begin(const std::string& sha256, std::int64_t bytes) {
  if (folder_.empty())
    return unavailable("this worker has no folder for adapters; set worker.lora.cache_dir or data.dir");
  std::error_code ec;
  fs::create_directories(folder_, ec);
  evict_for(bytes);
  std::unique_ptr<Writer> writer(new Writer(*this, sha256, bytes));
  writer->path_ = folder_ + "/" + sha256 + "." + new_nonce() + std::string(kPart);
  writer->fd_.reset(::open(writer->path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!writer->fd_.valid()) return cannot_write(folder_, bytes, errno);
  ::flock(writer->fd_.get(), LOCK_SH);  // the copy inherits this lock
  // Fails before any byte is fetched.
  if (free_(folder_) <= bytes) return cannot_write(folder_, bytes, ENOSPC);
  return writer;
}

AdapterCopies::Writer::~Writer() {
  if (!path_.empty()) ::unlink(path_.c_str());
}

Result<void> AdapterCopies::Writer::write(std::string_view bytes) {
  if (written_ + static_cast<std::int64_t>(bytes.size()) > bytes_) {
    return Error{Code::kDataCorrupt, "it has more than the registered " + std::to_string(bytes_) + " bytes", {}};
  }
  hash_.update(bytes);
  written_ += static_cast<std::int64_t>(bytes.size());
  if (!write_all(fd_.get(), bytes)) return cannot_write(copies_.folder_, bytes_, errno);
  return {};
}

Result<AdapterCopyPtr> AdapterCopies::Writer::commit() {
  const std::string digest = hash_.hex();
  if (digest != sha256_) {
    return Error{Code::kDataCorrupt, "its " + std::to_string(written_) + " bytes have the SHA-256 " + digest, {}};
  }
  const std::string path = copies_.path_of(sha256_);
  struct stat made {};
  // Not synced: after a crash, the next process checks the file before it uses it.
  if (::fstat(fd_.get(), &made) != 0 || ::rename(path_.c_str(), path.c_str()) != 0) {
    return cannot_write(copies_.folder_, bytes_, errno);
  }
  path_.clear();
  {
    const std::lock_guard lock(copies_.mutex_);
    copies_.checked_[sha256_] = {
        .device = made.st_dev, .inode = made.st_ino, .bytes = made.st_size, .modified_ns = ns(made.st_mtim)};
  }
  return AdapterCopyPtr(std::make_shared<const AdapterCopy>(written_, std::move(fd_)));
}

}  // namespace ditfleet::worker
