#include "pipeline/device/memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/device/gpu_limit.h"
#include "shared/core/sha256.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kHeader = 64;  // before each allocation: its size; keeps the alignment that kernels expect

std::string mib(std::int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

// Counts and limits the CPU's tensors, as LibTorch's allocator does those of a GPU.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& get() {
    static auto* const made = [] {
      auto* const allocator = new CountingAllocator;  // never destroyed: tensors may outlive everything
      c10::SetCPUAllocator(allocator, /*priority=*/100);
      return allocator;
    }();
    return *made;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const auto device = c10::Device(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, device};
    const auto size = static_cast<std::int64_t>(bytes);
    const std::int64_t limit = limit_;
    std::int64_t before = now_;  // so that an allocation that fails takes nothing from another thread's
    while ((limit <= 0 || before + size <= limit) && !now_.compare_exchange_weak(before, before + size)) {
    }
    const std::int64_t now = before + size;
    const bool fits = limit <= 0 || now <= limit;
    void* const begin = fits ? std::aligned_alloc(kHeader, (bytes + 2 * kHeader - 1) / kHeader * kHeader) : nullptr;
    if (!begin) {
      if (fits) now_ -= size;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "cannot allocate ", mib(size), ": ", mib(now - size), " are in use",
                       limit > 0 ? " of a limit of " + mib(limit) : "");
    }
    for (std::int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    std::memcpy(begin, &size, sizeof size);
    void* const data = static_cast<std::byte*>(begin) + kHeader;
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  MemoryUse use() const { return {now_, peak_}; }
  void reset_peak() { peak_ = now_.load(); }
  void limit(std::int64_t bytes) { limit_ = bytes; }
  std::int64_t limit() const { return limit_; }

 private:
  static void release(void* data) {
    if (!data) return;
    void* const begin = static_cast<std::byte*>(data) - kHeader;
    std::int64_t size;
    std::memcpy(&size, begin, sizeof size);
    get().now_ -= size;
    std::free(begin);
  }

  std::atomic<std::int64_t> now_ = 0, peak_ = 0, limit_ = 0;
};

// A row of /proc/meminfo, such as "MemTotal:", in bytes; 0 if there is none.
std::int64_t host_memory_info(std::string_view row) {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with(row)) return std::atoll(line.c_str() + row.size()) * 1024;
  return 0;
}

std::int64_t available_host_memory() { return host_memory_info("MemAvailable:"); }

void check_host_memory(std::int64_t bytes) {
  if (const std::int64_t available = available_host_memory(); bytes > available)
    fail(Code::kOutOfMemory, "weights on the host need " + mib(bytes) + ", but only " + mib(available) +
                                 " of the host's memory are available");
}

// A function of the driver, or null.
template <class Function>
Function driver_function(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

bool lock_pages(void* data, std::size_t bytes) {
  constexpr unsigned kPortable = 1;
  static const auto lock = driver_function<int (*)(void*, std::size_t, unsigned)>("cuMemHostRegister_v2");
  return lock && lock(data, bytes, kPortable) == 0;
}

void unlock_pages(void* data) {
  static const auto unlock = driver_function<int (*)(void*)>("cuMemHostUnregister");
  if (unlock) unlock(data);
}

}  // namespace

MemoryUse memory_use(c10::Device device) {
  if (device.is_cpu()) return CountingAllocator::get().use();
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).allocated_bytes[kAll];
  return {stats.current, stats.peak};
}

void reset_memory_peak(c10::Device device) {
  if (device.is_cpu()) return CountingAllocator::get().reset_peak();
  c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

MemoryInfo memory_info(c10::Device device) {
  if (device.is_cpu()) {
    const auto& allocator = CountingAllocator::get();
    MemoryInfo info{available_host_memory(), host_memory_info("MemTotal:")};
    if (const std::int64_t limit = allocator.limit(); limit > 0)
      info = {std::min(info.free, std::max<std::int64_t>(0, limit - allocator.use().now)), limit};
    return info;
  }
  const auto [free, total] = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
}

void limit_memory(c10::Device device, std::int64_t bytes) {
  if (device.is_cpu()) return CountingAllocator::get().limit(bytes);
  const double total = static_cast<double>(memory_info(device).total);
  limit_gpu_memory(device.index(), bytes > 0 ? std::min(1.0, static_cast<double>(bytes) / total) : 1.0);
}

// On an H100 0.83 to 0.97 GiB after the first image: the context, the libraries' kernels and ours.
std::int64_t driver_memory(c10::Device device) { return device.is_cpu() ? 0 : std::int64_t{1} << 30; }

std::int64_t available_memory(c10::Device device, std::int64_t limit, std::int64_t reserve) {
  // The limit of limit_memory() is already less the reserve.
  if (device.is_cpu() && CountingAllocator::get().limit() > 0) return memory_use(device).now + memory_info(device).free;
  std::int64_t held = memory_use(device).now;
  if (!device.is_cpu()) {
    constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    held = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index()).reserved_bytes[kAll].current;
  }
  std::int64_t bytes = held + memory_info(device).free;
  if (limit > 0) bytes = std::min(bytes, limit - driver_memory(device));
  return bytes - reserve;
}

namespace {

// Locks the pages at `data`. The returned pointer unlocks them and destroys `owner`.
template <class Owner>
std::shared_ptr<std::byte> locked_memory(void* data, std::size_t bytes, c10::Device device, Owner owner) {
  const bool locked = !device.is_cpu() && lock_pages(data, bytes);
  static std::once_flag warned;
  if (!device.is_cpu() && !locked)
    std::call_once(warned, [&] {
      spdlog::warn(
          "cannot lock {} of host memory: offloaded weights are copied more slowly; see `ulimit -l` and the "
          "container's memory limit",
          mib(static_cast<std::int64_t>(bytes)));
    });
  return {static_cast<std::byte*>(data), [locked, owner = std::move(owner)](std::byte* begin) {
            if (locked) unlock_pages(begin);
          }};
}

struct Mapping {
  void* data;
  std::size_t bytes;
  Mapping(void* begin, std::size_t size) : data(begin), bytes(size) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(data, bytes); }
};

// A file in /dev/shm with a mark at its end as soon as its bytes are complete. Everybody who uses it has a shared lock;
// an exclusive lock means that it is being filled, or that nobody uses it.
class SharedFile {
 public:
  // Null: no room, or the file is not this user's.
  static std::unique_ptr<SharedFile> open(const std::string& path, std::int64_t bytes) {
    const auto size = static_cast<std::size_t>(bytes) + sizeof kComplete;
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1 + ::getpid() % 7))) {
      UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
      struct stat status = {};
      const auto look = [&] { return ::fstat(fd.get(), &status) == 0 && status.st_uid == ::geteuid(); };
      const auto mapped = [&]() -> std::unique_ptr<SharedFile> {
        void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        if (data == MAP_FAILED) return nullptr;
        return std::unique_ptr<SharedFile>(new SharedFile(path, std::move(fd), data, size));
      };
      // Waits for the one who fills it.
      if (!fd.valid() || ::flock(fd.get(), LOCK_SH) != 0 || !look()) return nullptr;
      if (status.st_nlink > 0 && static_cast<std::size_t>(status.st_size) == size) {
        auto file = mapped();
        if (!file || file->complete()) return file;
        fd = std::move(file->fd_);
      }
      // Nobody has filled it. The lock is lost if another wants to fill it too, or if its last user has just removed
      // it.
      if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 || !look() || status.st_nlink == 0) continue;
      check_host_memory(bytes);
      if (::posix_fallocate(fd.get(), 0, static_cast<off_t>(size)) != 0) {
        ::unlink(path.c_str());
        static std::once_flag told;
        std::call_once(told, [&] {
          spdlog::info("/dev/shm has no room for {}: this worker's host copies of weights are its own", mib(bytes));
        });
        return nullptr;
      }
      auto file = mapped();
      if (file && file->complete()) ::flock(file->fd_.get(), LOCK_SH);
      return file;
    }
  }
  ~SharedFile() {
    struct stat own = {}, named = {};
    if (::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0 && ::fstat(fd_.get(), &own) == 0 &&
        ::stat(path_.c_str(), &named) == 0 && own.st_ino == named.st_ino)
      ::unlink(path_.c_str());
  }
  std::byte* data() const { return static_cast<std::byte*>(mapping_.data); }
  bool complete() const { return std::memcmp(data() + mark(), kComplete, sizeof kComplete) == 0; }
  void set_complete() {
    std::memcpy(data() + mark(), kComplete, sizeof kComplete);
    ::flock(fd_.get(), LOCK_SH);
  }

 private:
  static constexpr char kComplete[8] = {'c', 'o', 'm', 'p', 'l', 'e', 't', 'e'};
  SharedFile(std::string path, UniqueFd fd, void* data, std::size_t size)
      : path_(std::move(path)), fd_(std::move(fd)), mapping_(data, size) {}
  std::size_t mark() const { return mapping_.bytes - sizeof kComplete; }

  const std::string path_;
  UniqueFd fd_;
  const Mapping mapping_;
};

std::string shared_prefix() { return "/dev/shm/ditfleet-" + std::to_string(::geteuid()) + "-"; }

}  // namespace

void remove_unused_host_copies() {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    const std::string path = entry.path().string();
    if (!path.starts_with(shared_prefix())) continue;
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
    if (fd.valid() && ::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  }
}

std::shared_ptr<std::byte> host_memory(std::int64_t bytes, c10::Device device) {
  check_host_memory(bytes);
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) fail(Code::kOutOfMemory, "cannot reserve " + mib(bytes) + " of host memory");
  return locked_memory(data, size, device, std::make_shared<Mapping>(data, size));
}

std::shared_ptr<std::byte> shared_host_memory(const std::string& key, std::int64_t bytes, c10::Device device,
                                              const std::function<void(std::byte*)>& fill) {
  Sha256 hash;
  hash.update(key + '/' + std::to_string(bytes));
  auto file = key.empty() ? nullptr : SharedFile::open(shared_prefix() + hash.hex(), bytes);
  if (!file) {
    auto memory = host_memory(bytes, device);
    fill(memory.get());
    return memory;
  }
  if (!file->complete()) {
    fill(file->data());
    file->set_complete();
  }
  std::byte* const data = file->data();
  return locked_memory(data, static_cast<std::size_t>(bytes), device, std::shared_ptr(std::move(file)));
}

double copy_bandwidth(c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, double> known;
  const std::lock_guard lock(mutex);
  double& rate = known[device.is_cpu() ? c10::DeviceIndex{-1} : device.index()];
  if (rate > 0) return rate;
  try {
    const std::int64_t bytes = device.is_cpu() ? 8 << 20 : 128 << 20;
    const c10::DeviceGuard guard(device);
    const auto host = host_memory(bytes, device);
    std::memset(host.get(), 0, static_cast<std::size_t>(bytes));
    const at::Tensor from = at::from_blob(host.get(), {bytes}, c10::ScalarType::Byte);
    const at::Tensor to = at::empty({bytes}, at::TensorOptions(c10::ScalarType::Byte).device(device));
    for (int i = 0; i < 3; ++i) {
      const auto start = std::chrono::steady_clock::now();
      to.copy_(from, /*non_blocking=*/true);
      synchronize_current(device);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      rate = std::max(rate, static_cast<double>(bytes) / took.count());
    }
  } catch (const c10::OutOfMemoryError&) {  // later, then
    rate = 0;
  }
  return rate;
}

}  // namespace ditfleet::pipeline
