// Runs a model's own code on tensors without memory (c10::DeviceType::Meta), to find out how much memory it needs.
//
// Meta tensors have sizes, types and storages, but no data. Code that reads or writes data directly must skip meta
// tensors, as kernels of compiled regions and of quantized weights do.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>

namespace ditfleet::pipeline {

inline const c10::Device kDryDevice(c10::DeviceType::Meta);

// Hold it while you measure bytes: the counts cover the whole process.
std::mutex& dry_run_mutex();

// Bytes of the meta tensors of this process. Tensors that were made before the first call are not counted.
// Thread-safe; a measurement is right only if no other thread makes meta tensors meanwhile.
std::int64_t dry_bytes();
// The most bytes since the last call of start_dry_peak().
std::int64_t dry_peak();
void start_dry_peak();

}  // namespace ditfleet::pipeline
