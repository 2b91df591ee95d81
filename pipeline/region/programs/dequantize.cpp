#include "pipeline/region/programs/dequantize.h"

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/programs/dequantize_source.h"
#include "pipeline/region/programs/fixed_module.h"

namespace ditfleet::region {
namespace {

class OnGpu : public Dequantizer {
 public:
  explicit OnGpu(std::shared_ptr<const GpuModule> module) : module_(std::move(module)) {}

  void run(const Dequantization& one) const override {
    const auto type = one.codes.scalar_type();
    const bool gguf = one.blocks != 0;
    const std::size_t format = gguf                                     ? one.blocks - std::size_t{1}
                               : type == c10::ScalarType::Byte          ? 0
                               : type == c10::ScalarType::Float8_e4m3fn ? 1
                                                                        : 2;
    const std::size_t kernel = 2 * format + (one.to.scalar_type() == c10::ScalarType::BFloat16 ? 0 : 1);
    const std::int64_t per_block = std::int64_t{kDequantizedPerThread} * module_->launch_of(kernel).threads;
    const auto address = [](const at::Tensor& t) { return reinterpret_cast<long long>(t.const_data_ptr()); };
    std::vector<long long> arguments{address(one.codes), address(one.to), one.to.numel()};
    if (!gguf) arguments = {arguments[0], address(one.scales), arguments[1], arguments[2], one.to.size(1)};
    pipeline::unwrap(module_->start(kernel, GpuModule::kI64Vector, (one.to.numel() + per_block - 1) / per_block,
                                    arguments, pipeline::current_stream(one.to.device())));
  }

 private:
  const std::shared_ptr<const GpuModule> module_;
};

}  // namespace

std::shared_ptr<const Dequantizer> make_dequantizer(const RegionHost& host, bool gguf) {
  auto module = fixed_module(host, gguf ? gguf_program() : dequantize_program());
  if (!module) return nullptr;
  return std::make_shared<const OnGpu>(std::move(module));
}

}  // namespace ditfleet::region
