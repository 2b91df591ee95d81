#include "pipeline/region/programs/grouped_gemm.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/driver.h"
#include "pipeline/region/programs/fixed_module.h"
#include "pipeline/region/programs/grouped_gemm_source.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::region {
namespace {

// CUtensorMap's enums.
constexpr int kBf16 = 9, kNoInterleave = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromote128 = 2, kFillZeros = 0;

bool aligned(const void* pointer, std::int64_t stride) {
  return (reinterpret_cast<std::uintptr_t>(pointer) | static_cast<std::uintptr_t>(stride * 2)) % 16 == 0;
}

class Hopper : public GroupedGemm {
 public:
  Hopper(std::shared_ptr<const GpuModule> module, const Driver& cuda, int device, int multiprocessors)
      : module_(std::move(module)),
        cuda_(cuda),
        device_(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device)),
        clusters_(multiprocessors / kGroupedGemmPair) {}

  // A cluster computes whole pairs of tiles, one after the other: with few rows most of the last ones' work is for
  // nothing.
  bool pays(const GroupedProduct& p) const override {
    constexpr std::int64_t kRows = kGroupedGemmPair * kGroupedGemmTile;
    const std::int64_t tiles = (p.rows + kRows - 1) / kRows * ((p.out + kGroupedGemmTile - 1) / kGroupedGemmTile),
                       rounds = (tiles + clusters_ - 1) / clusters_;
    const double mine = static_cast<double>(rounds * clusters_ * kRows * kGroupedGemmTile) *
                        static_cast<double>(p.in - p.apart + p.apart / p.groups);
    return mine <= 1.02 * static_cast<double>(p.rows) * static_cast<double>(p.out) * static_cast<double>(p.in);
  }

  bool run(const GroupedProduct& p, const GemmOperands& o) const override {
    const std::int64_t shared = p.in - p.apart, each = p.apart / p.groups;
    const bool fits = p.rows > 0 && p.apart > 0 && shared > 0 && p.apart % p.groups == 0 && p.out % p.groups == 0 &&
                      each % kGroupedGemmStep == 0 && shared % kGroupedGemmStep == 0 && aligned(o.x, p.x_stride) &&
                      aligned(o.weight, p.weight_stride) && aligned(o.out, p.out_stride) &&
                      reinterpret_cast<std::uintptr_t>(o.bias) % 4 == 0 && p.out % 2 == 0 &&
                      std::max({p.rows, p.in, p.out}) < std::numeric_limits<int>::max();
    if (!fits) return false;
    GroupedGemmArgument argument;
    argument.x = map(o.x, p.rows, p.in, p.x_stride, kGroupedGemmTile, kGroupedGemmStep, kSwizzle128);
    argument.weight =
        map(o.weight, p.out, p.in, p.weight_stride, kGroupedGemmTile / kGroupedGemmPair, kGroupedGemmStep, kSwizzle128);
    argument.out = map(o.out, p.rows, p.out, p.out_stride, 64, 32, kSwizzle64);
    argument.bias = reinterpret_cast<long long>(o.bias);
    argument.rows = p.rows, argument.columns = p.out;
    argument.steps = shared / kGroupedGemmStep, argument.groups = p.groups,
    argument.own_steps = each / kGroupedGemmStep;
    const auto words = std::bit_cast<std::array<long long, sizeof argument / 8>>(argument);
    pipeline::unwrap(module_->start(0, GpuModule::kI64Vector, clusters_ * kGroupedGemmPair,
                                    {words.begin(), words.end()}, pipeline::current_stream(device_)));
    return true;
  }

 private:
  std::array<long long, 16> map(const void* matrix, std::int64_t rows, std::int64_t columns, std::int64_t stride,
                                unsigned box_rows, unsigned box_columns, int swizzle) const {
    struct alignas(64) {
      long long words[16];
    } made;
    const std::uint64_t sizes[] = {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows)},
                        strides[] = {static_cast<std::uint64_t>(stride) * 2};
    const std::uint32_t box[] = {box_columns, box_rows}, element_strides[] = {1, 1};
    if (int e = cuda_.encode_tensor_map(&made, kBf16, 2, const_cast<void*>(matrix), sizes, strides, box,
                                        element_strides, kNoInterleave, swizzle, kPromote128, kFillZeros);
        e != 0)
      pipeline::fail(Code::kInternal, "[nvrtc] a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                                          " has no tensor map: " + cuda_.name_of(e));
    return std::to_array(made.words);
  }

  const std::shared_ptr<const GpuModule> module_;
  const Driver& cuda_;
  const c10::Device device_;
  const std::int64_t clusters_;
};

}  // namespace

std::shared_ptr<const GroupedGemm> make_grouped_gemm(RegionHost& host) {
  if (host.arch != kGroupedGemmArch || !compiles_for_gpu(host)) return nullptr;
  const auto cuda = driver();
  if (!cuda || !(*cuda)->encode_tensor_map) return nullptr;
  const auto gpu = gpu_identity(host.device);
  if (!gpu || gpu->multiprocessors < kGroupedGemmPair) return nullptr;
  auto module = load_fixed_module(host, grouped_gemm_program());
  if (!module) {
    spdlog::warn("adapters of q, k and v are multiplied with the zeros between them: {}", module.error().message);
    return nullptr;
  }
  return std::make_shared<Hopper>(std::move(*module), **cuda, host.device, gpu->multiprocessors);
}

}  // namespace ditfleet::region
