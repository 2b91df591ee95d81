// What LibTorch's convolutions on a CPU depend on.
#pragma once

namespace ditfleet::pipeline {

// Whether oneDNN uses AVX-512: in blocks of 16 channels, and in bf16 (mkldnn_bf16_device_check).
inline bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return true;
#endif
}

}  // namespace ditfleet::pipeline
