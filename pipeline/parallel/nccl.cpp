#include "pipeline/parallel/nccl.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/device/symbols.h"
#include "shared/core/deadline.h"
#include "shared/core/missing_peer.h"

namespace ditfleet::pipeline::parallel {
namespace {

// Constants of nccl.h, stable in NCCL 2.
enum : int { kSuccess = 0, kCudaError = 1, kInProgress = 7 };
constexpr int kInt8 = 0;
constexpr int kOldest = 21400;  // the first with non-blocking communicators
constexpr std::chrono::microseconds kPollInterval{100};

// ncclConfig_t as of 2.14. Newer versions use their defaults for what it lacks.
struct Config {
  std::size_t bytes = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = kOldest;
  int blocking = 0;
};

struct Library {
  int (*version)(int*);
  int (*unique_id)(NcclId*);
  int (*init)(void** comm, int size, NcclId id, int rank, Config* config);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, std::size_t count, int type, int peer, void* comm, void* stream);
  int (*receive)(void* data, std::size_t count, int type, int peer, void* comm, void* stream);
  int (*broadcast)(const void* send, void* receive, std::size_t count, int type, int root, void* comm, void* stream);
  int (*async_error)(void* comm, int* error);
  int (*abort)(void* comm);
  const char* (*error_string)(int);
  const char* (*last_error)(void* comm);

  Error error(int status, void* comm) const {
    std::string text = std::string("[nccl] ") + error_string(status);
    if (const char* details = last_error(comm); details && *details) text += std::string(": ") + details;
    return {status == kCudaError ? Code::kDeviceFault : Code::kUnavailable, std::move(text)};
  }
};

Result<const Library*> library() {
  // LibTorch's CUDA part has loaded it already, so its name alone finds it.
  static const Library* const opened = open_library<Library>("libnccl.so.2", [](void* library, Library& t) {
    return bind(library, "ncclGetVersion", t.version) && bind(library, "ncclGetUniqueId", t.unique_id) &&
           bind(library, "ncclCommInitRankConfig", t.init) && bind(library, "ncclGroupStart", t.group_start) &&
           bind(library, "ncclGroupEnd", t.group_end) && bind(library, "ncclSend", t.send) &&
           bind(library, "ncclRecv", t.receive) && bind(library, "ncclBroadcast", t.broadcast) &&
           bind(library, "ncclCommGetAsyncError", t.async_error) && bind(library, "ncclCommAbort", t.abort) &&
           bind(library, "ncclGetErrorString", t.error_string) && bind(library, "ncclGetLastError", t.last_error);
  });
  if (!opened)
    return unavailable(
        "[nccl] cannot load libnccl.so.2, a part of LibTorch with CUDA; deploy/setup.sh installs it where there is a "
        "GPU");
  int version = 0;
  if (opened->version(&version) != kSuccess || version < kOldest)
    return unavailable("[nccl] the version is " + std::to_string(version) + "; groups need " + std::to_string(kOldest) +
                       " or newer");
  return opened;
}

class NcclGroup final : public Group {
 public:
  NcclGroup(const Library& lib, void* comm, int rank, int size, c10::Device device, std::chrono::milliseconds timeout,
            std::shared_ptr<Group> host)
      : Group(rank, size, device), lib_(lib), comm_(comm), timeout_(timeout), host_(std::move(host)) {}
  ~NcclGroup() override { abort_comm(); }

  Result<void> all_to_all(std::span<const at::Tensor> send, std::span<const at::Tensor> receive) override {
    if (auto checked = check(send, receive); !checked) return checked;
    return enqueue([&](void* stream) {
      int status = kSuccess;
      for (int r = 0; r < size(); ++r) {
        const auto out = bytes_of(send[send.size() == 1 ? 0 : r]), in = bytes_of(receive[r]);
        if (r == rank() && out.data() == in.data()) continue;  // in its place already
        if (!out.empty()) first_error(status, lib_.send(out.data(), out.size(), kInt8, r, comm_, stream));
        if (!in.empty()) first_error(status, lib_.receive(in.data(), in.size(), kInt8, r, comm_, stream));
      }
      return status;
    });
  }

  Result<void> broadcast(const at::Tensor& tensor, int root) override {
    const std::vector<at::Tensor> receive(size(), tensor);
    if (auto checked = check({&tensor, 1}, receive); !checked) return checked;
    const auto bytes = bytes_of(tensor);
    return enqueue([&](void* stream) {
      return lib_.broadcast(bytes.data(), bytes.data(), bytes.size(), kInt8, root, comm_, stream);
    });
  }

  void abort() noexcept override {
    if (host_) host_->abort();
    abort_comm();
  }

 private:
  void abort_comm() noexcept {
    const std::lock_guard lock(mutex_);
    if (comm_) lib_.abort(comm_);
    comm_ = nullptr;
  }

  Group& on_host() override { return *host_; }

  static void first_error(int& status, int next) {
    if (status == kSuccess || status == kInProgress) status = next;
  }

  // Calls `work(stream)`, which returns NCCL's status, as one group of operations and waits until they are enqueued.
  Result<void> enqueue(const std::function<int(void*)>& work) {
    if (auto joined = wait(); !joined) return joined;
    {
      const std::lock_guard lock(mutex_);
      if (!comm_) return aborted();
      int status = lib_.group_start();
      first_error(status, work(current_stream(device())));
      first_error(status, lib_.group_end());
      if (status != kSuccess && status != kInProgress) return lib_.error(status, comm_);
    }
    return wait();
  }

  // Polls until NCCL has nothing left to do on the host.
  Result<void> wait() {
    const Deadline deadline = Deadline::after(timeout_), busy = Deadline::after(kPollInterval);
    for (;;) {
      {
        const std::lock_guard lock(mutex_);
        if (!comm_) return aborted();
        int status = kSuccess;
        if (const int failed = lib_.async_error(comm_, &status); failed != kSuccess) status = failed;
        if (status != kSuccess && status != kInProgress) return lib_.error(status, comm_);
        if (status == kSuccess) return {};
      }
      if (deadline.passed()) {
        abort();
        return missing_peer("[parallel] the other ranks did not arrive within " + std::to_string(timeout_.count()) +
                            " ms at rank " + std::to_string(rank()) + " of " + std::to_string(size()));
      }
      if (busy.passed())
        std::this_thread::sleep_for(kPollInterval);
      else
        std::this_thread::yield();
    }
  }

  static Error aborted() { return missing_peer("[parallel] the group was aborted"); }

  const Library& lib_;
  std::mutex mutex_;  // for each use of comm_; no call under it waits for other ranks
  void* comm_;        // null: aborted
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Group> host_;
};

}  // namespace

void set_nccl_environment() {
  ::setenv("NCCL_NVLS_ENABLE", "0", 0);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}

Result<NcclId> make_nccl_id() {
  auto lib = library();
  if (!lib) return lib.error();
  NcclId id{};
  if (const int status = (*lib)->unique_id(&id); status != kSuccess) return (*lib)->error(status, nullptr);
  return id;
}

Result<std::unique_ptr<Group>> join_nccl(const NcclId& id, int rank, int size, c10::Device device,
                                         std::chrono::milliseconds timeout, std::shared_ptr<Group> host) {
  auto lib = library();
  if (!lib) return lib.error();
  const c10::DeviceGuard current(device);
  Config config;
  void* comm = nullptr;
  const int status = (*lib)->init(&comm, size, id, rank, &config);
  if ((status != kSuccess && status != kInProgress) || !comm) return (*lib)->error(status, comm);
  return std::unique_ptr<Group>(std::make_unique<NcclGroup>(**lib, comm, rank, size, device, timeout, std::move(host)));
}

}  // namespace ditfleet::pipeline::parallel
