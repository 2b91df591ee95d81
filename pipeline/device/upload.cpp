#include "pipeline/device/upload.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>

namespace ditfleet::pipeline {
namespace {

constexpr std::int64_t kPiece = 8 << 20, kLanes = 8;

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
      piece.host = at::empty({size < kPiece ? std::max<std::int64_t>(size, 1 << 16) : kPiece},
                             at::TensorOptions(at::kByte).pinned_memory(true));
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

Upload::Upload(c10::Device gpu) : device_(gpu) {}
Upload::~Upload() {
  for (const auto& lane : lanes_)
    for (Lane::Piece& piece : lane->pieces)
      if (piece.used) piece.copied.synchronize();
}
Upload::Upload(Upload&&) noexcept = default;
Upload& Upload::operator=(Upload&&) noexcept = default;

void Upload::fill(const at::Tensor& to, const Read& read) {
  const std::int64_t size = to.numel(), pieces = (size + kPiece - 1) / kPiece, lanes = std::min(pieces, kLanes);
  if (size == 0) return;
  while (static_cast<std::int64_t>(lanes_.size()) < lanes) lanes_.push_back(std::make_unique<Lane>(device_));
  // The memory may have belonged to work that the current stream has not finished.
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  c10::Event free(device_.type());
  free.record(current);
  const auto run = [&](std::int64_t first, std::int64_t last) {
    const c10::DeviceGuard guard(device_);
    for (std::int64_t l = first; l < last; ++l) {
      Lane& lane = *lanes_[static_cast<std::size_t>(l)];
      free.block(lane.stream);
      for (std::int64_t piece = l; piece < pieces; piece += lanes)
        lane.copy(to, piece * kPiece, std::min(size, (piece + 1) * kPiece), read);
      lane.done.record(lane.stream);
    }
  };
  if (lanes == 1)
    run(0, 1);
  else
    at::parallel_for(0, lanes, 1, run);
  for (std::int64_t l = 0; l < lanes; ++l) lanes_[static_cast<std::size_t>(l)]->done.block(current);
}

}  // namespace ditfleet::pipeline
