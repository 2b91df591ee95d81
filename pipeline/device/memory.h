// A device's memory: how much tensors take, and a limit.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace ditfleet::pipeline {

// Bytes of all tensors of this process on the device. On a GPU as LibTorch's allocator rounds them.
struct MemoryUse {
  std::int64_t now = 0;
  std::int64_t peak = 0;  // since reset_memory_peak()
};

struct MemoryInfo {
  std::int64_t free = 0, total = 0;  // of the device, other processes included; of a CPU the host's
};

// On a CPU counts only tensors that were made after the first call of one of these functions. Thread-safe.
MemoryUse memory_use(c10::Device device);
void reset_memory_peak(c10::Device device);
MemoryInfo memory_info(c10::Device device);

// The most bytes that tensors may take on the device; 0: no limit. An allocation beyond it throws
// c10::OutOfMemoryError, as an allocation beyond the device's memory does. Throws Failure (kUnavailable) if this
// program was built without CUDA's headers and the device is a GPU. Thread-safe.
void limit_memory(c10::Device device, std::int64_t bytes);

// Bytes that this process's tensors may take in all: what they take now and what is free, but at most what `limit`
// leaves after the driver's own memory (0: no limit), less `reserve`.
std::int64_t available_memory(c10::Device device, std::int64_t limit, std::int64_t reserve);
// What the driver takes on a GPU for this process, which tensors cannot have; 0 on a CPU.
std::int64_t driver_memory(c10::Device device);

// Host memory that a GPU copies from at full speed (page-locked). Owned by the returned pointer. If the driver refuses
// to lock it, logs a warning once and returns pageable memory. Throws Failure (kOutOfMemory): the host has fewer bytes
// available; the message contains both numbers. On a GPU the device must be current.
std::shared_ptr<std::byte> host_memory(std::int64_t bytes, c10::Device device);

// The same for bytes that processes of this user have in common: calls with the same key and size share one copy in
// /dev/shm. The first caller runs `fill`; the others wait for it. The last user removes the copy, unless it is killed.
// Returns memory of this process, filled, if the key is empty or /dev/shm has no room. `fill` may throw.
std::shared_ptr<std::byte> shared_host_memory(const std::string& key, std::int64_t bytes, c10::Device device,
                                              const std::function<void(std::byte*)>& fill);

// Removes shared copies whose users have all been killed.
void remove_unused_host_copies();

// Bytes per second of a copy from host_memory() to the device, measured once per process; takes about 20 ms. 0 if there
// is no memory for it.
double copy_bandwidth(c10::Device device);

}  // namespace ditfleet::pipeline
