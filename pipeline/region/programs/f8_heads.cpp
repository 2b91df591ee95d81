#include "pipeline/region/programs/f8_heads.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/libraries/direct_attention.h"
#include "pipeline/region/programs/f8_heads_source.h"
#include "pipeline/region/programs/fixed_module.h"

namespace ditfleet::region {

F8Heads make_f8_heads(const RegionHost& host) {
  auto module = fixed_module(host, f8_heads_program());
  if (!module) return fp8_heads;
  return [module = std::move(module)](const at::Tensor& v) {
    if (!is_operand(v) || v.size(3) % 8 != 0) return fp8_heads(v);
    const std::int64_t batch = v.size(0), tokens = v.size(1), heads = v.size(2), size = v.size(3);
    const at::Tensor codes = at::empty(v.sizes(), v.options().dtype(c10::ScalarType::Float8_e4m3fn)),
                     scales = at::zeros({2, batch, heads}, v.options().dtype(c10::ScalarType::Float));
    const auto address = [](const at::Tensor& t) { return reinterpret_cast<long long>(t.const_data_ptr()); };
    // A thread has 8 vectors of 8 values.
    const std::int64_t per_block = std::int64_t{64} * module->launch_of(0).threads;
    const std::int64_t parts = std::max<std::int64_t>(1, tokens * size / per_block);
    for (const std::size_t kernel : {0, 1})
      pipeline::unwrap(module->start(kernel, GpuModule::kI64Vector, batch * heads * parts,
                                     {address(v), address(codes), address(scales[0]), address(scales[1]), tokens, heads,
                                      size, v.stride(0), v.stride(1), v.stride(2), parts},
                                     pipeline::current_stream(v.device())));
    return std::pair(codes, scales[1]);
  };
}

}  // namespace ditfleet::region
