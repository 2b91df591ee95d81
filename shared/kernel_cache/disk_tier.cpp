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
#include "shared/core/fd_io.h"
#include "shared/core/unique_fd.h"
#include "shared/kernel_cache/codec.h"

namespace ditfleet::kernel_cache {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;

constexpr int kWritesBetweenTrims = 64;
constexpr seconds kAbandonedTemporary = std::chrono::hours(1);
constexpr seconds kAbandonedLock = std::chrono::hours(24);

struct Found {
  fs::path path;
  std::uint64_t bytes = 0;
  timespec used{};
};

// Calls `take` with every regular file below `dir`, up to `depth` folders down. Files that vanish meanwhile are left
// out. `unread`: the error of a folder that exists and cannot be read.
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

bool older(const Found& a, const Found& b) {
  return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
}

bool abandoned(const Found& file, seconds age) {
  return std::chrono::system_clock::to_time_t(std::chrono::system_clock::now()) - file.used.tv_sec > age.count();
}

// By errno.
Error cannot_remove(const std::string& path) {
  return unavailable("cannot remove '" + path + "': " + std::strerror(errno));
}

}  // namespace

std::string DiskTier::path_of(const Key& key) const {
  const std::string hex = key.hex();
  return dir_ + "/1/" + hex.substr(0, 2) + "/" + hex;
}

bool DiskTier::make_folder(const std::string& path) {
  std::error_code ec;
  fs::create_directories(path, ec);
  return !ec;
}

Result<std::optional<std::string>> DiskTier::read(const Key& key) const {
  const std::string path = path_of(key);
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // opening a FIFO must not block
  if (!file.valid()) {
    if (errno == ENOENT || errno == ENOTDIR) return std::optional<std::string>();
    return cannot_read(path);
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return cannot_read(path);
  const bool possible = S_ISREG(info.st_mode) && static_cast<std::uint64_t>(info.st_size) <= kMaxValueBytes;
  auto bytes = read_up_to(file.get(), possible ? static_cast<std::size_t>(info.st_size) : 0);
  if (!bytes) return cannot_read(path);
  return bytes;
}

void DiskTier::used(const Key& key) const {
  const timespec now[2] = {{0, UTIME_NOW}, {0, UTIME_NOW}};
  (void)::utimensat(AT_FDCWD, path_of(key).c_str(), now, AT_SYMLINK_NOFOLLOW);
}

Result<void> DiskTier::write(const Key& key, std::string_view bytes) {
  if (bytes.size() > max_bytes_)
    return Error{Code::kPayloadTooLarge, "a program of " + std::to_string(bytes.size()) +
                                             " bytes exceeds cache.disk_bytes (" + std::to_string(max_bytes_) + ")"};
  const std::string path = path_of(key);
  if (!make_folder(fs::path(path).parent_path()))
    return unavailable("cannot create the folder of '" + path + "': " + std::strerror(errno));
  std::error_code ec;
  if (fs::is_directory(fs::symlink_status(path, ec))) fs::remove_all(path, ec);  // rename() would fail
  if (auto written = write_file_atomically(path, bytes); !written) return written;
  bool full = false;
  {
    const std::lock_guard lock(mutex_);
    bytes_ += bytes.size();
    full = bytes_ > max_bytes_ || --writes_until_trim_ <= 0;
  }
  if (full) trim();
  return {};
}

Result<bool> DiskTier::remove(const Key& key) {
  const std::string path = path_of(key);
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
    std::sort(values.begin(), values.end(), older);
    // A little below the bound, so that not every write trims. The newest value, just written, stays.
    const std::uint64_t goal = max_bytes_ - max_bytes_ / 10;
    for (std::size_t i = 0; i + 1 < values.size() && total > goal; ++i) {
      if (::unlink(values[i].path.c_str()) == 0 || errno == ENOENT) total -= values[i].bytes;
    }
  }
  const std::lock_guard lock(mutex_);
  bytes_ = total;
  writes_until_trim_ = kWritesBetweenTrims;
}

bool DiskTier::quarantine(const Key& key, std::string_view tier, std::string_view why, std::string_view bytes) {
  const std::string folder = dir_ + "/quarantine";
  if (!make_folder(folder)) return false;
  const auto written =
      write_file_atomically(folder + "/" + key.hex() + "." + std::string(tier) + "." + std::string(why), bytes);
  std::vector<Found> files;
  std::uint64_t total = 0;
  each_file(folder, 0, [&](const Found& file) {
    total += file.bytes;
    files.push_back(file);
  });
  std::sort(files.begin(), files.end(), older);
  for (std::size_t i = 0; i < files.size() && (files.size() - i > kQuarantineFiles || total > kQuarantineBytes); ++i) {
    ::unlink(files[i].path.c_str());
    total -= files[i].bytes;
  }
  return written.ok();
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
        if (const auto key = Key::from_hex(file.path.filename().native()))
          files.push_back(
              {*key, file.bytes, static_cast<std::int64_t>(file.used.tv_sec) * 1000 + file.used.tv_nsec / 1'000'000});
      },
      unread);
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.key < b.key; });
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
