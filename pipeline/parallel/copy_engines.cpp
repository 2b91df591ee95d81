#include "pipeline/parallel/copy_engines.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/device/symbols.h"
#include "shared/core/deadline.h"

namespace ditfleet::pipeline::parallel {
namespace {

// Types and constants of cuda.h. The functions are those that its names stand for since CUDA 12.
using Address = unsigned long long;
constexpr int kUnified = 4;           // CU_MEMORYTYPE_UNIFIED
constexpr unsigned kMapped = 2;       // CU_MEMHOSTREGISTER_DEVICEMAP
constexpr unsigned kLazyPeers = 1;    // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
constexpr unsigned kAtLeast = 0;      // CU_STREAM_WAIT_VALUE_GEQ
constexpr unsigned kWithBarrier = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT
constexpr int kOutOfMemory = 2;       // CUDA_ERROR_OUT_OF_MEMORY

struct Side {
  std::size_t x = 0, y = 0;
  int type = kUnified;
  const void* host = nullptr;
  Address device = 0;
  void* array = nullptr;
  std::size_t pitch = 0;
};
struct Copy2d {  // CUDA_MEMCPY2D_v2
  Side source, destination;
  std::size_t width, height;
};
static_assert(sizeof(Copy2d) == 128 && offsetof(Side, device) == 32);

struct IpcHandle {  // CUipcMemHandle
  char bytes[64];
};

struct Library {
  int (*context)(void**);
  int (*can_access)(int*, int device, int peer);
  int (*allocate)(Address*, std::size_t bytes);
  int (*free)(Address);
  int (*handle)(IpcHandle*, Address);
  int (*open)(Address*, IpcHandle, unsigned flags);
  int (*close)(Address);
  int (*register_host)(void*, std::size_t bytes, unsigned flags);
  int (*unregister_host)(void*);
  int (*host_address)(Address*, void*, unsigned flags);
  int (*copy)(const Copy2d*, void* stream);
  int (*write)(void* stream, Address, std::uint32_t value, unsigned flags);
  int (*wait)(void* stream, Address, std::uint32_t value, unsigned flags);
  int (*error_name)(int, const char**);

  Result<void> check(int status, const char* function) const {
    if (status == 0) return {};
    const char* name = nullptr;
    if (error_name(status, &name) != 0 || !name) name = "unknown error";
    return Error{status == kOutOfMemory ? Code::kOutOfMemory : Code::kDeviceFault,
                 std::string("[copy engines] ") + function + ": " + name};
  }
};

const Library* library() {
  static const Library* const opened = open_library<Library>("libcuda.so.1", [](void* library, Library& t) {
    return bind(library, "cuCtxGetCurrent", t.context) && bind(library, "cuDeviceCanAccessPeer", t.can_access) &&
           bind(library, "cuMemAlloc_v2", t.allocate) && bind(library, "cuMemFree_v2", t.free) &&
           bind(library, "cuIpcGetMemHandle", t.handle) && bind(library, "cuIpcOpenMemHandle_v2", t.open) &&
           bind(library, "cuIpcCloseMemHandle", t.close) && bind(library, "cuMemHostRegister_v2", t.register_host) &&
           bind(library, "cuMemHostUnregister", t.unregister_host) &&
           bind(library, "cuMemHostGetDevicePointer_v2", t.host_address) &&
           bind(library, "cuMemcpy2DAsync_v2", t.copy) && bind(library, "cuStreamWriteValue32_v2", t.write) &&
           bind(library, "cuStreamWaitValue32_v2", t.wait) && bind(library, "cuGetErrorName", t.error_name);
  });
  return opened;
}

// What a rank tells the others: what it has not got, or its memory.
struct Offer {
  bool failed = false;
  char problem[200] = {};
  int gpu = 0;
  IpcHandle handle = {};
};
static_assert(std::is_trivially_copyable_v<Offer>);

class CopyEngines final : public CopyDevice {
 public:
  CopyEngines(HostGroup& host, c10::Device device)
      : host_(host),
        device_(device),
        guard_(device.type()),
        copies_(guard_.getStreamFromGlobalPool(device)),
        computed_(device.type()),
        copied_(device.type()),
        mapped_(static_cast<std::size_t>(host.size())) {}
  ~CopyEngines() override {
    if (!library()) return;
    close_all();
    if (own_) library()->free(own_);
    if (flags_) library()->unregister_host(&host_.flags());
  }

  // Of one rank, without the others.
  Result<void> set_up() {
    if (const char* off = std::getenv("NCCL_P2P_DISABLE"); off && *off && std::strcmp(off, "0") != 0)
      return unavailable("NCCL_P2P_DISABLE is set");
    if (!library()) return unavailable("the driver has no stream memory operations or no CUDA IPC");
    (void)at::empty({1}, at::TensorOptions(at::kByte).device(device_));  // makes LibTorch's context current
    void* context = nullptr;
    if (auto found = check(library()->context(&context), "cuCtxGetCurrent"); !found) return found;
    if (!context) return unavailable("the GPU is not current");
    auto* const flags = static_cast<void*>(&host_.flags());
    if (auto mapped = check(library()->register_host(flags, sizeof(ArrivalFlags), kMapped), "cuMemHostRegister");
        !mapped)
      return mapped;
    return check(library()->host_address(&flags_, flags, 0), "cuMemHostGetDevicePointer");
  }

  // Gathers the offers of all ranks. `problem_` is the first problem of any rank.
  Result<std::vector<Offer>> gather(const Result<void>& mine, Offer offer = {}) {
    offer.failed = !mine;
    offer.gpu = device_.index();
    if (!mine) mine.error().message.copy(offer.problem, sizeof offer.problem - 1);
    std::vector<Offer> offers(static_cast<std::size_t>(host_.size()));
    const auto tensor = [](Offer& o) { return at::from_blob(&o, {sizeof o}, at::TensorOptions(at::kByte)); };
    std::vector<at::Tensor> receive;
    for (Offer& one : offers) receive.push_back(tensor(one));
    if (auto gathered = host_.all_gather(tensor(offer), receive); !gathered) return gathered.error();
    problem_.clear();
    for (std::size_t r = 0; r < offers.size() && problem_.empty(); ++r)
      if (offers[r].failed) problem_ = "rank " + std::to_string(r) + ": " + offers[r].problem;
    return offers;
  }
  const std::string& problem() const { return problem_; }

  Result<bool> meet(std::size_t bytes) override {
    synchronize_current(device_);
    if (auto met = gather({}); !met) return met.error();  // nobody sends any more
    if (bytes <= bytes_) return true;
    close_all();
    bytes_ = 0;
    if (auto met = gather({}); !met) return met.error();  // nobody has opened what this rank frees
    Offer offer;
    const auto allocated = allocate(bytes, offer.handle);
    auto offers = gather(allocated, offer);
    if (!offers) return offers.error();
    if (problem_.empty()) {
      offers = gather(open_all(*offers));
      if (!offers) return offers.error();
    }
    if (!problem_.empty()) {
      close_all();
      if (auto met = gather({}); !met) return met.error();
      free_own();
      return false;
    }
    bytes_ = bytes;
    return true;
  }

  std::byte* memory(int rank) const override {
    return reinterpret_cast<std::byte*>(rank == host_.rank() ? own_ : mapped_[static_cast<std::size_t>(rank)]);
  }

  Result<void> copies_follow() override {
    computed_.record(guard_.getStream(device_));
    computed_.block(copies_);
    return {};
  }
  Result<void> follow_copies() override {
    copied_.record(copies_);
    copied_.block(guard_.getStream(device_));
    return {};
  }
  Result<void> copy(const Rows& from, std::byte* to, std::size_t to_pitch) override {
    const Copy2d copy{.source = {.device = reinterpret_cast<Address>(from.data), .pitch = from.pitch},
                      .destination = {.device = reinterpret_cast<Address>(to), .pitch = to_pitch},
                      .width = from.width,
                      .height = from.count};
    return check(library()->copy(&copy, copies_.native_handle()), "cuMemcpy2DAsync");
  }
  Result<void> raise(int rank, std::uint32_t round) override {
    return check(library()->write(copies_.native_handle(), flag(rank, host_.rank()), round, kWithBarrier),
                 "cuStreamWriteValue32");
  }
  Result<void> wait(int rank, std::uint32_t round) override {
    return check(library()->wait(current_stream(device_), flag(host_.rank(), rank), round, kAtLeast),
                 "cuStreamWaitValue32");
  }

 private:
  static Result<void> check(int status, const char* function) { return library()->check(status, function); }

  Address flag(int to, int from) const {
    return flags_ + sizeof(std::uint32_t) * static_cast<std::size_t>(to * kMostRanks + from);
  }

  Result<void> allocate(std::size_t bytes, IpcHandle& handle) {
    free_own();
    auto done = check(library()->allocate(&own_, bytes), "cuMemAlloc");
    if (!done && done.error().code == Code::kOutOfMemory) {
      release_cached_memory(device_);
      done = check(library()->allocate(&own_, bytes), "cuMemAlloc");
    }
    return done ? check(library()->handle(&handle, own_), "cuIpcGetMemHandle") : done;
  }
  void free_own() {
    if (own_) library()->free(own_);
    own_ = 0;
  }

  Result<void> open_all(const std::vector<Offer>& offers) {
    for (int r = 0; r < host_.size(); ++r) {
      if (r == host_.rank()) continue;
      const Offer& offer = offers[static_cast<std::size_t>(r)];
      int can = 0;
      if (auto asked = check(library()->can_access(&can, device_.index(), offer.gpu), "cuDeviceCanAccessPeer"); !asked)
        return asked;
      if (!can)
        return unavailable("GPU " + std::to_string(device_.index()) + " cannot access GPU " +
                           std::to_string(offer.gpu));
      if (auto opened = check(library()->open(&mapped_[static_cast<std::size_t>(r)], offer.handle, kLazyPeers),
                              "cuIpcOpenMemHandle");
          !opened)
        return opened;
    }
    return {};
  }
  void close_all() {
    for (Address& one : mapped_)
      if (one) library()->close(std::exchange(one, 0));
  }

  HostGroup& host_;
  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream copies_;
  c10::Event computed_, copied_;
  Address flags_ = 0;            // ArrivalFlags, as the GPU sees them
  Address own_ = 0;              // this rank's memory
  std::vector<Address> mapped_;  // that of the others
  std::size_t bytes_ = 0;
  std::string problem_;
};

// Sends rows to all ranks, there and back, and compares what arrives. kUnavailable: something else, or nothing.
Result<void> try_out(Exchange& exchange, HostGroup& host, c10::Device device) {
  constexpr std::int64_t kRows = 64, kWidth = 1024, kPitch = 2 * kWidth;
  const int size = host.size(), me = host.rank();
  const auto expected = [&](int from, int to) { return static_cast<std::uint8_t>(16 * from + to + 1); };
  const auto options = at::TensorOptions(at::kByte).device(device);
  std::vector<at::Tensor> sent;
  at::Tensor arrived = at::empty({2, size * kRows, kWidth}, options);
  for (int way = 0; way < 2; ++way) {
    for (int i = 1; i <= size; ++i) {
      const int to = (me + i) % size;
      sent.push_back(at::empty({kRows, kPitch}, options).fill_(expected(me, to) + way));
    }
    if (way == 1)
      if (auto turned = exchange.turn(); !turned) return turned;
    if (way == 0) {
      auto begun = exchange.begin(
          0, size, {static_cast<std::size_t>(size * kRows * kWidth), static_cast<std::size_t>(size * kRows * kWidth)});
      if (!begun) return begun.error();
      if (!*begun) return unavailable("no memory");
    }
    for (int i = 1; i <= size; ++i) {
      const int to = (me + i) % size;
      const at::Tensor& rows = sent[static_cast<std::size_t>(way * size + i - 1)];
      if (auto done = exchange.send(to, {static_cast<const std::byte*>(rows.const_data_ptr()), kPitch, kWidth, kRows},
                                    static_cast<std::size_t>(me * kRows * kWidth), kWidth);
          !done)
        return done;
      if (to == me) continue;
      if (auto done = exchange.raise(to); !done) return done;
    }
    auto slot = exchange.wait();
    if (!slot) return slot.error();
    arrived.select(0, way).copy_(at::from_blob(*slot, {size * kRows, kWidth}, options));
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const Deadline deadline = Deadline::after(host.timeout() / 2);  // the others wait for the result
  while (!guard.queryStream(guard.getStream(device))) {
    if (deadline.passed()) {
      exchange.release();
      synchronize_current(device);
      return unavailable("rows of other ranks do not arrive");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  const at::Tensor here = arrived.cpu();
  const auto* bytes = here.const_data_ptr<std::uint8_t>();
  for (int way = 0; way < 2; ++way)
    for (int from = 0; from < size; ++from)
      for (std::int64_t i = 0; i < kRows * kWidth; ++i)
        if (*bytes++ != static_cast<std::uint8_t>(expected(from, me) + way))
          return unavailable("rows of rank " + std::to_string(from) + " arrive damaged");
  return {};
}

}  // namespace

Result<std::unique_ptr<Exchange>> open_copy_engines(HostGroup& host, c10::Device device) {
  auto made = std::make_unique<CopyEngines>(host, device);
  CopyEngines& engines = *made;
  const auto all = [&](const Result<void>& mine) -> Result<void> {
    if (auto gathered = engines.gather(mine); !gathered) return gathered.error();
    return engines.problem().empty() ? Result<void>() : unavailable(engines.problem());
  };
  if (auto ready = all(engines.set_up()); !ready) return ready.error();
  // What the trial needs, so that a problem is not taken for want of memory.
  auto met = engines.meet(1 << 20);
  if (!met) return met.error();
  if (!*met) return unavailable(engines.problem());
  auto exchange = std::make_unique<Exchange>(host, std::move(made));
  if (auto tried = all(try_out(*exchange, host, device)); !tried) return tried.error();
  return exchange;
}

}  // namespace ditfleet::pipeline::parallel
