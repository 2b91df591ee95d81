// The operations between a VAE's convolutions in channels-last layout, on a GPU: norms with activation, sums with
// biases, upsampling (channels_last_source.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "pipeline/region/compile/gpu_module.h"

namespace ditfleet::region {

struct RegionHost;
enum class ChannelsLastKernel;

// Every tensor is [N, C, H, W], stored as [N, H, W, C], bf16 or fp32, on one GPU. Weights and biases are [C] of the
// same type. Members run on the calling thread's current stream. They throw pipeline::Failure and what LibTorch throws.
// Thread-safe.
class ChannelsLast {
 public:
  // The statistics that a tensor's group norm needs, per channel.
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

  // Sums of x + bias (undefined: no bias).
  Sums sums(const at::Tensor& x, const at::Tensor& bias = {}) const;
  // Writes x + y + bias + bias_2, rounded once, to y and returns its sums. bias_2 may be undefined.
  Sums add(const at::Tensor& x, at::Tensor& y, const at::Tensor& bias, const at::Tensor& bias_2) const;
  // Group norm of x + bias, given its sums, followed by SiLU if `silu`. `in_place`: overwrites x.
  at::Tensor normalize(const at::Tensor& x, const Sums& sums, const at::Tensor& bias, const GroupNorm& norm, bool silu,
                       bool in_place) const;
  // Doubles height and width (nearest neighbour).
  at::Tensor upsample(const at::Tensor& x) const;

  // Writes x + y + bias + bias_2, rounded once, to y. Biases may be undefined.
  void add_pixels(const at::Tensor& x, at::Tensor& y, const at::Tensor& bias, const at::Tensor& bias_2) const;
  // Writes (x + bias) / |x + bias| · √C · weight for each pixel, followed by SiLU if `silu`, to `out`, which has x's
  // sizes. bias may be undefined.
  void normalize_pixels(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& weight, bool silu,
                        const at::Tensor& out) const;

 private:
  void start(ChannelsLastKernel kernel, const at::Tensor& x, std::int64_t blocks,
             const std::vector<long long>& argument) const;
  Sums sum_up(ChannelsLastKernel kernel, const at::Tensor& x, const at::Tensor& y, const at::Tensor& bias,
              const at::Tensor& bias_2) const;

  const std::shared_ptr<const GpuModule> module_;
};

// Null if compile.components excludes the VAE, the backend is not nvrtc, or the program is not available, which counts
// as a fallback. Throws as fixed_module() does.
std::shared_ptr<const ChannelsLast> make_channels_last(const RegionHost& host);

}  // namespace ditfleet::region
