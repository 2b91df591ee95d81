#include "pipeline/device/upload.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <exception>
#include <future>

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kLeast = 1 << 20, kMost = 8 << 20, kLanes = 8;  // kLeast, kMost: bytes of a piece

}  // namespace

// A thread's stream and the two pieces that it fills in turn.
struct Upload::Lane {
  struct Piece {
    at::Tensor host;
    c10::Event copied;
    bool used = false;
  };
  explicit Lane(c10::Device device)
      : stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device)),
        done(device.type()),
        pieces{Piece{{}, c10::Event(device.type())}, Piece{{}, c10::Event(device.type())}} {}

  void copy(const at::Tensor& to, std::int64_t begin, std::int64_t end, const Read& read) {
    Piece& piece = pieces[next];
    next ^= 1;
    if (piece.used) piece.copied.synchronize();
    const std::int64_t size = end - begin;
    if (!piece.host.defined() || piece.host.numel() < size)
      piece.host = at::empty({size > kLeast ? kMost : kLeast}, at::TensorOptions(at::kByte).pinned_memory(true));
    read(begin, {static_cast<std::byte*>(piece.host.mutable_data_ptr()), static_cast<std::size_t>(size)});
    const c10::StreamGuard current(stream);
    to.narrow(0, begin, size).copy_(piece.host.narrow(0, 0, size), /*non_blocking=*/true);
    piece.copied.record(stream);
    piece.used = true;
  }

  c10::Stream stream;
  c10::Event done;
  std::array<Piece, 2> pieces;
  std::size_t next = 0;
};

Upload::Upload(c10::Device gpu) : device_(gpu), threads_("upload", kLanes) {}

Upload::~Upload() {
  for (const auto& lane : lanes_)
    for (Lane::Piece& piece : lane->pieces)
      if (piece.used) piece.copied.synchronize();
}

void Upload::fill(const at::Tensor& to, const Read& read) {
  const std::int64_t size = to.numel(), each = (size + kLanes - 1) / kLanes,
                     piece = std::clamp((each + kLeast - 1) / kLeast * kLeast, kLeast, kMost),
                     pieces = (size + piece - 1) / piece;
  const auto lanes = static_cast<std::size_t>(std::min<std::int64_t>(pieces, kLanes));
  while (lanes_.size() < lanes) lanes_.push_back(std::make_unique<Lane>(device_));
  // The memory may have belonged to work that the current stream has not finished.
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  c10::Event free(device_.type());
  free.record(current);
  const auto run = [&](std::size_t first) {
    const c10::InferenceMode inference(true);
    const c10::DeviceGuard guard(device_);
    Lane& lane = *lanes_[first];
    free.block(lane.stream);
    for (auto i = static_cast<std::int64_t>(first); i < pieces; i += static_cast<std::int64_t>(lanes))
      lane.copy(to, i * piece, std::min(size, (i + 1) * piece), read);
    lane.done.record(lane.stream);
  };
  std::vector<std::future<void>> others;
  for (std::size_t l = 1; l < lanes; ++l) others.push_back(threads_.run([&run, l] { run(l); }));
  std::exception_ptr failure;
  const auto keep_first = [&](const auto& work) {
    try {
      work();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  };
  if (lanes > 0) keep_first([&] { run(0); });
  for (auto& other : others) keep_first([&] { other.get(); });  // they use this function's variables
  if (failure) {
    for (std::size_t l = 0; l < lanes; ++l) lanes_[l]->stream.synchronize();  // the caller may release the memory
    std::rethrow_exception(failure);
  }
  for (std::size_t l = 0; l < lanes; ++l) lanes_[l]->done.block(current);
}

}  // namespace ditfleet::pipeline
