#include "pipeline/region/programs/channels_last.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>

#include "pipeline/device/failure.h"
#include "pipeline/region/programs/channels_last_source.h"
#include "pipeline/region/programs/fixed_module.h"
#include "pipeline/region/run/region.h"

namespace ditfleet::region {
namespace {

constexpr std::int64_t kMostChunks = 1024, kPixelsOfChunk = 64;  // enough blocks for a large GPU, enough work per block
constexpr std::int64_t kMostBlocks = 4096;                       // of kernels that take any number

long long address(const at::Tensor& t) { return t.defined() ? reinterpret_cast<long long>(t.const_data_ptr()) : 0; }

std::int64_t pixels(const at::Tensor& x) { return x.size(2) * x.size(3); }
// Depends only on the image size, so that every GPU adds in the same order.
std::int64_t chunks_of(const at::Tensor& x) {
  return std::clamp<std::int64_t>(pixels(x) / kPixelsOfChunk, 1, kMostChunks);
}
std::int64_t blocks_of(const at::Tensor& x, std::int64_t chunks) {
  return x.size(0) * chunks * channels_last_slices(x.size(1), static_cast<std::int64_t>(x.element_size()));
}

std::int64_t blocks_of_elements(const at::Tensor& x) {
  return std::clamp<std::int64_t>(x.numel() / 2048, 1, kMostBlocks);
}

at::TensorOptions fp32_beside(const at::Tensor& x) {
  return at::TensorOptions(c10::ScalarType::Float).device(x.device());
}

}  // namespace

void ChannelsLast::start(ChannelsLastKernel kernel, const at::Tensor& x, std::int64_t blocks,
                         const std::vector<long long>& argument) const {
  if (x.is_meta()) return;
  if (!x.is_contiguous(c10::MemoryFormat::ChannelsLast))
    pipeline::fail(Code::kInternal, "[region] a tensor of the VAE is not in channels-last layout");
  const auto index =
      static_cast<std::size_t>(kernel) +
      (x.scalar_type() == c10::ScalarType::BFloat16 ? 0 : static_cast<std::size_t>(ChannelsLastKernel::kCount));
  const c10::impl::VirtualGuardImpl guard(x.device().type());
  pipeline::unwrap(
      module_->start(index, GpuModule::kI64Vector, blocks, argument, guard.getStream(x.device()).native_handle()));
}

ChannelsLast::Sums ChannelsLast::sum_up(ChannelsLastKernel kernel, const at::Tensor& x, const at::Tensor& y,
                                        const at::Tensor& bias, const at::Tensor& bias_2) const {
  const std::int64_t chunks = chunks_of(x);
  Sums made{at::empty({x.size(0), x.size(1)}, fp32_beside(x)),
            at::empty({x.size(0), chunks, x.size(1), 2}, fp32_beside(x)), chunks};
  start(kernel, x, blocks_of(x, chunks),
        {address(x), address(y), address(bias), address(bias_2), address(y), address(made.shifts), address(made.sums),
         pixels(x), x.size(1), x.size(0), chunks});
  return made;
}

ChannelsLast::Sums ChannelsLast::sums(const at::Tensor& x, const at::Tensor& bias) const {
  return sum_up(ChannelsLastKernel::kSums, x, {}, bias, {});
}

ChannelsLast::Sums ChannelsLast::add(const at::Tensor& x, at::Tensor& y, const at::Tensor& bias,
                                     const at::Tensor& bias_2) const {
  return sum_up(ChannelsLastKernel::kAddSums, x, y, bias, bias_2);
}

at::Tensor ChannelsLast::normalize(const at::Tensor& x, const Sums& sums, const at::Tensor& bias, const GroupNorm& norm,
                                   bool silu, bool in_place) const {
  const at::Tensor table = at::empty({x.size(0), x.size(1), 2}, fp32_beside(x));
  start(
      ChannelsLastKernel::kScales, x, x.size(0) * norm.groups,
      {address(sums.shifts), address(sums.sums), address(norm.weight), address(norm.bias), address(bias),
       address(table), pixels(x), x.size(1), x.size(0), sums.chunks, norm.groups, std::bit_cast<long long>(norm.eps)});
  at::Tensor out = in_place ? x : at::empty_like(x);
  const std::int64_t chunks = chunks_of(x);
  start(ChannelsLastKernel::kApply, x, blocks_of(x, chunks),
        {address(x), address(table), address(out), pixels(x), x.size(1), x.size(0), chunks, silu});
  return out;
}

at::Tensor ChannelsLast::upsample(const at::Tensor& x) const {
  at::Tensor out =
      at::empty({x.size(0), x.size(1), 2 * x.size(2), 2 * x.size(3)}, x.options(), c10::MemoryFormat::ChannelsLast);
  start(ChannelsLastKernel::kUpsample, x, blocks_of_elements(x),
        {address(x), address(out), x.size(2), x.size(3), x.size(1), x.size(0)});
  return out;
}

void ChannelsLast::add_pixels(const at::Tensor& x, at::Tensor& y, const at::Tensor& bias,
                              const at::Tensor& bias_2) const {
  start(ChannelsLastKernel::kAddPixels, x, blocks_of_elements(x),
        {address(x), address(y), address(bias), address(bias_2), x.size(0) * pixels(x), x.size(1)});
}

void ChannelsLast::normalize_pixels(const at::Tensor& x, const at::Tensor& bias, const at::Tensor& weight, bool silu,
                                    const at::Tensor& out) const {
  start(ChannelsLastKernel::kNormPixels, x, blocks_of_elements(x),
        {address(x), address(bias), address(weight), address(out), x.size(0) * pixels(x), x.size(1), silu});
}

std::shared_ptr<const ChannelsLast> make_channels_last(const RegionHost& host) {
  if (!host.options.vae.value_or(true)) return nullptr;
  auto module = fixed_module(host, channels_last_program());
  return module ? std::make_shared<ChannelsLast>(std::move(module)) : nullptr;
}

}  // namespace ditfleet::region
