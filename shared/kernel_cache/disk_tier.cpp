#include "shared/kernel_cache/disk_tier.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/kernel_cache/codec.h"

namespace ditfleet::kernel_cache {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

constexpr int kWritesBetweenLooks = 64;
constexpr seconds kAbandonedTemporary = std::chrono::hours(1);
constexpr seconds kAbandonedLock = std::chrono::hours(24);

struct Found {
  fs::path path;
  std::uint64_t bytes = 0;
  timespec used{};
};

// Calls `take` with every regular file below `dir`, to `depth` folders down. What is not there, or vanishes meanwhile,
// is left out; which folder could not be read, being someone else's or a file, `unread` says.
template <class Take>
void each_file(const fs::path& dir, int depth, const Take& take, Result<void>* unread = nullptr) {
  std::error_code ec;
  for (auto it = fs::directory_iterator(dir, ec); !ec && it != fs::directory_iterator(); it.increment(ec)) {
    struct stat info {};
    if (::lstat(it->path().c_str(), &info) != 0) continue;
    if (S_ISDIR(info.st_mode) && depth > 0) each_file(it->path(), depth - 1, take, unread);
    if (S_ISREG(info.st_mode)) take(Found{it->path(), static_cast<std::uint64_t>(info.st_size), info.st_mtim});
  }
  if (ec && ec != std::errc::no_such_file_or_directory && unread)
    *unread = unavailable("cannot read the folder '" + dir.string() + "': " + ec.message());
}

bool older(const timespec& a, const timespec& b) {
  return std::pair(a.tv_sec, a.tv_nsec) < std::pair(b.tv_sec, b.tv_nsec);
}

bool abandoned(const Found& file, seconds age) {
  return std::chrono::system_clock::to_time_t(std::chrono::system_clock::now()) - file.used.tv_sec > age.count();
}

void touch(const std::string& path) {
  const timespec now[2] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
  (void)::utimensat(AT_FDCWD, path.c_str(), now, AT_SYMLINK_NOFOLLOW);
}

// By errno.
Error cannot_remove(const std::string& path) {
  return unavailable("cannot remove '" + path + "': " + std::strerror(errno));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

std::string DiskTier::path_of(const Key& key, Name name) const {
  const std::string hex = key.hex();
  return dir_ + "/1/" + hex.substr(0, 2) + "/" + hex + (name == Name::kOwn ? "." + secret_id_ : "");
}

bool DiskTier::make_folder(const std::string& path) {
  std::error_code ec;
  fs::create_directories(path, ec);
  return !ec;
}

Result<std::optional<std::string>> DiskTier::read(const Key& key, Name name) const {
  const std::string path = path_of(key, name);
  const auto failed = [&] { return unavailable("cannot read '" + path + "': " + std::strerror(errno)); };
  // Not blocking: whatever lies there may be a pipe.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() < 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::optional<std::string>();
    return failed();
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return failed();
  if (!S_ISREG(info.st_mode)) return Error{Code::kDataCorrupt, "'" + path + "' is no regular file", {}};
  if (static_cast<std::uint64_t>(info.st_size) > kMaxValueBytes)
    return Error{
        Code::kDataCorrupt, "'" + path + "' has " + std::to_string(info.st_size) + " bytes, more than any value", {}};
  std::string bytes(static_cast<std::size_t>(info.st_size), '\0');
  std::size_t got = 0;
  while (got < bytes.size()) {
    const ssize_t n = ::read(file.get(), bytes.data() + got, bytes.size() - got);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed();
    if (n == 0) break;
    got += static_cast<std::size_t>(n);
  }
  bytes.resize(got);
  return std::optional<std::string>(std::move(bytes));
}

void DiskTier::used(const Key& key, Name name) const {
  touch(path_of(key, name));
}  // a folder of someone else's keeps its order of use

Result<void> DiskTier::write(const Key& key, std::string_view bytes, Name name) {
  if (bytes.size() > max_bytes_)
    return Error{Code::kPayloadTooLarge,
                 "a program of " + std::to_string(bytes.size()) + " bytes is above cache.disk_bytes (" +
                     std::to_string(max_bytes_) + ")",
                 {}};
  const std::string path = path_of(key, name);
  if (!make_folder(fs::path(path).parent_path()))
    return unavailable("cannot make the folder of '" + path + "': " + std::strerror(errno));
  if (auto written = write_file_atomically(path, bytes); !written) return written;
  bool look = false;
  {
    const std::lock_guard lock(mutex_);
    bytes_ += bytes.size();
    look = bytes_ > max_bytes_ || --writes_until_trim_ <= 0;
  }
  if (look) trim();
  return {};
}

Result<bool> DiskTier::remove(const Key& key, Name name) {
  const std::string path = path_of(key, name);
  if (::unlink(path.c_str()) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return cannot_remove(path);
}

void DiskTier::trim() {
  std::vector<Found> values;
  std::uint64_t total = 0;
  each_file(dir_ + "/1", 1, [&](const Found& file) {
    if (file.path.filename().native().find(".tmp-") != std::string::npos) {
      if (abandoned(file, kAbandonedTemporary)) ::unlink(file.path.c_str());
      return;
    }
    total += file.bytes;
    values.push_back(file);
  });
  each_file(dir_ + "/locks", 0, [](const Found& file) {
    if (abandoned(file, kAbandonedLock)) ::unlink(file.path.c_str());
  });
  if (total > max_bytes_) {
    std::sort(values.begin(), values.end(), [](const Found& a, const Found& b) { return older(a.used, b.used); });
    // A little below the bound, so that not every write looks again. The newest, just written, stays.
    const std::uint64_t goal = max_bytes_ - max_bytes_ / 10;
    for (std::size_t i = 0; i + 1 < values.size() && total > goal; ++i) {
      if (::unlink(values[i].path.c_str()) == 0 || errno == ENOENT) total -= values[i].bytes;
    }
  }
  const std::lock_guard lock(mutex_);
  bytes_ = total;
  writes_until_trim_ = kWritesBetweenLooks;
}

bool DiskTier::quarantine(const Key& key, Name name, std::string_view why) {
  const std::string path = path_of(key, name), folder = dir_ + "/quarantine";
  if (!make_folder(folder)) return false;
  const std::string target = folder + "/" + key.hex() + ".disk." + std::string(why);
  struct stat info {};
  const bool file = ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
  if (::rename(path.c_str(), target.c_str()) != 0) {
    std::error_code ec;
    if (!file && fs::remove_all(path, ec) > 0 && !ec) return true;  // a folder or a link where a value belongs
    return false;
  }
  touch(target);
  cap_quarantine();
  return true;
}

bool DiskTier::quarantine(const Key& key, std::string_view tier, std::string_view why, std::string_view bytes) {
  const std::string folder = dir_ + "/quarantine";
  if (!make_folder(folder)) return false;
  const auto written =
      write_file_atomically(folder + "/" + key.hex() + "." + std::string(tier) + "." + std::string(why), bytes);
  cap_quarantine();
  return written.ok();
}

void DiskTier::cap_quarantine() {
  std::vector<Found> files;
  std::uint64_t total = 0;
  each_file(dir_ + "/quarantine", 0, [&](const Found& file) {
    total += file.bytes;
    files.push_back(file);
  });
  std::sort(files.begin(), files.end(), [](const Found& a, const Found& b) { return older(a.used, b.used); });
  for (std::size_t i = 0; i < files.size() && (files.size() - i > kQuarantineFiles || total > kQuarantineBytes); ++i) {
    ::unlink(files[i].path.c_str());
    total -= files[i].bytes;
  }
}

Result<FileLock> DiskTier::try_lock(const Key& key) {
  const std::string folder = dir_ + "/locks";
  if (!make_folder(folder)) return unavailable("cannot create '" + folder + "'");
  return FileLock::try_take(folder + "/" + key.hex(), FileLock::AtEnd::kRemoveFile);
}

std::vector<DiskTier::File> DiskTier::list(Result<void>* unread) const {
  std::vector<File> files;
  each_file(
      dir_ + "/1", 1,
      [&](const Found& file) {
        const std::string name = file.path.filename().native(),
                          rest = name.substr(std::min<std::size_t>(name.size(), 64));
        const auto key = Key::from_hex(std::string_view(name).substr(0, 64));
        const bool own = !secret_id_.empty() && rest == "." + secret_id_;
        if (!key || !(own || rest.empty())) return;
        files.push_back({*key, own ? Name::kOwn : Name::kShared, file.bytes,
                         static_cast<std::int64_t>(file.used.tv_sec) * 1000 + file.used.tv_nsec / 1'000'000});
      },
      unread);
  std::sort(files.begin(), files.end(),
            [](const File& a, const File& b) { return std::pair(a.key, a.name) < std::pair(b.key, b.name); });
  return files;
}

std::vector<std::string> DiskTier::quarantined() const {
  std::vector<std::string> names;
  each_file(dir_ + "/quarantine", 0, [&](const Found& file) { names.push_back(file.path.filename().native()); });
  std::sort(names.begin(), names.end());
  return names;
}

std::size_t DiskTier::empty_quarantine(Result<void>& emptied) {
  std::size_t removed = 0;
  each_file(dir_ + "/quarantine", 0, [&](const Found& file) {
    if (::unlink(file.path.c_str()) == 0)
      ++removed;
    else if (errno != ENOENT)
      emptied = cannot_remove(file.path);
  });
  return removed;
}

}  // namespace ditfleet::kernel_cache
