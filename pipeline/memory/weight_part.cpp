#include "pipeline/memory/weight_part.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "pipeline/device/device.h"
#include "pipeline/device/memory.h"

namespace ditfleet::pipeline {
namespace {

constexpr std::size_t kAlignment = 512;  // as LibTorch's allocator for GPUs

at::Tensor bytes_at(void* data, std::size_t bytes, c10::Device device) {
  return at::for_blob(data, {static_cast<std::int64_t>(bytes)})
      .options(at::TensorOptions(c10::ScalarType::Byte).device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

void WeightPart::add(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const c10::Storage& storage = tensor.storage();
  if (std::any_of(pieces_.begin(), pieces_.end(),
                  [&](const Piece& piece) { return piece.storage.is_alias_of(storage); }))
    return;
  const std::size_t offset = static_cast<std::size_t>(bytes_);
  pieces_.push_back({storage, offset, storage.nbytes()});
  bytes_ = static_cast<std::int64_t>((offset + storage.nbytes() + kAlignment - 1) / kAlignment * kAlignment);
}

void WeightPart::enter() {
  if (on_device_) return;
  c10::DataPtr memory = c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(bytes_));
  bytes_at(memory.get(), static_cast<std::size_t>(bytes_), device_)
      .copy_(bytes_at(host_.get(), static_cast<std::size_t>(bytes_), c10::Device(c10::DeviceType::CPU)),
             /*non_blocking=*/true);
  use(std::move(memory));
  on_device_ = true;
}

void WeightPart::use(c10::DataPtr memory) {
  for (Piece& piece : pieces_)
    piece.storage.set_data_ptr_noswap({static_cast<std::byte*>(memory.get()) + piece.offset, device_});
  memory_ = std::move(memory);
}

void WeightPart::pack() {
  c10::DataPtr memory = c10::GetAllocator(device_.type())->allocate(static_cast<std::size_t>(bytes_));
  for (const Piece& piece : pieces_)
    bytes_at(static_cast<std::byte*>(memory.get()) + piece.offset, piece.bytes, device_)
        .copy_(bytes_at(piece.storage.mutable_data(), piece.bytes, device_));
  use(std::move(memory));
}

void WeightPart::leave() {
  if (!on_device_) return;
  if (!host_) {
    const auto fill = [&](std::byte* to) {
      for (const Piece& piece : pieces_)
        bytes_at(to + piece.offset, piece.bytes, c10::Device(c10::DeviceType::CPU))
            .copy_(bytes_at(piece.storage.mutable_data(), piece.bytes, device_));
    };
    host_ = shared_host_memory(key_, bytes_, device_, fill);
  }
  for (Piece& piece : pieces_) piece.storage.set_data_ptr_noswap({nullptr, device_});
  memory_.clear();
  on_device_ = false;
}

}  // namespace ditfleet::pipeline
