// What lies between the convolutions of a picture in channels-last layout, on a GPU: group norm with activation, sums
// with biases, upsampling (channels_last_source.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "pipeline/region/compile/gpu_module.h"

namespace ditfleet::region {

struct RegionHost;
enum class ChannelsLastKernel;

// Every tensor is [N, C, H, W] in memory as [N, H, W, C], bf16 or fp32, on one GPU; weights and biases are [C] of the
// same type. Members run on the calling thread's current stream and throw pipeline::Failure and what LibTorch throws.
// Thread safe.
class ChannelsLast {
 public:
  // Of a tensor's channels: what its group norm needs of it.
  struct Sums {
    at::Tensor shifts, sums;
    std::int64_t chunks = 0;
  };
  struct GroupNorm {
    at::Tensor weight, bias;
    std::int64_t groups = 0;  // divides C
    double eps = 0;
  };

  explicit ChannelsLast(std::shared_ptr<const GpuModule> module) : module_(std::move(module)) {}

  // Of x + bias (undefined: none).
  Sums sums(const at::Tensor& x, const at::Tensor& bias = {}) const;
  // x + y + bias + bias_2, rounded once, in y's memory; and its sums. bias_2 may be undefined.
  Sums add(const at::Tensor& x, at::Tensor& y, const at::Tensor& bias, const at::Tensor& bias_2) const;
  // The norm of x + bias, whose sums are given, and SiLU after it if wanted. `in_place`: in x's memory.
  at::Tensor normalize(const at::Tensor& x, const Sums& sums, const at::Tensor& bias, const GroupNorm& norm, bool silu,
                       bool in_place) const;
  // Twice as large, each pixel four times.
  at::Tensor upsample(const at::Tensor& x) const;

 private:
  void start(ChannelsLastKernel kernel, const at::Tensor& x, std::int64_t blocks,
             const std::vector<long long>& argument) const;
  Sums sum_up(ChannelsLastKernel kernel, const at::Tensor& x, const at::Tensor& y, const at::Tensor& bias,
              const at::Tensor& bias_2) const;

  const std::shared_ptr<const GpuModule> module_;
};

// Null where compile.components does not ask for it or the backend is not nvrtc, and, counted, where the program cannot
// be had; throws as fixed_module() does.
std::shared_ptr<const ChannelsLast> make_channels_last(RegionHost& host);

}  // namespace ditfleet::region
