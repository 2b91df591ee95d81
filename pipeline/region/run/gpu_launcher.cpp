#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/region/run/row_launcher.h"

namespace ditfleet::region {
namespace {

class GpuLauncher : public RowLauncher {
 public:
  GpuLauncher(std::shared_ptr<const GpuModule> module, std::vector<RowKernel> kernels)
      : module_(std::move(module)), kernels_(std::move(kernels)) {}

  void launch(const ResolvedRows& step, const std::vector<std::vector<long long>>& instances) const override {
    const auto index = static_cast<std::size_t>(step.kernel);
    const RowKernel& kernel = kernels_[index];
    const KernelLaunch& launch = module_->launch_of(index);
    bool vectors = kernel.width % launch.vector == 0, narrow = step.rows < kMost;
    std::vector<long long> argument;
    argument.reserve(launch.argument_words);
    std::int64_t end = 0;
    for (int i = 0; i < kernel.instances; ++i) {  // a launch may have fewer instances than the kernel allows
      if (static_cast<std::size_t>(i) < step.instances.size()) end += step.instances[static_cast<std::size_t>(i)].rows;
      argument.push_back(end);
    }
    for (const auto& words : instances) {
      inspect(kernel, launch, words, vectors, narrow);
      argument.insert(argument.end(), words.begin(), words.end());
    }
    argument.resize(launch.argument_words, 1);
    const auto variant = !vectors ? GpuModule::kI64Scalar : narrow ? GpuModule::kI32Vector : GpuModule::kI64Vector;
    const std::int64_t blocks = (step.rows + launch.rows_per_block - 1) / launch.rows_per_block;
    // Kernels count rows in 32 bits, up to the end of the last block.
    if (blocks > std::numeric_limits<int>::max() ||
        step.rows + launch.rows_per_block > std::numeric_limits<unsigned>::max())
      pipeline::fail(Code::kInvalidArgument,
                     "[region] " + std::to_string(step.rows) + " rows are too many for one launch");
    const c10::Device device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
    pipeline::unwrap(module_->start(index, variant, blocks, argument, pipeline::current_stream(device)));
  }

 private:
  static constexpr std::int64_t kMost = std::numeric_limits<int>::max();

  // Whether vector accesses are aligned, and whether offsets fit 31 bits.
  static void inspect(const RowKernel& kernel, const KernelLaunch& launch, const std::vector<long long>& words,
                      bool& vectors, bool& narrow) {
    for (std::size_t o = 0; o < kernel.operands(); ++o) {
      const std::int64_t bytes = bytes_of(kernel.type_of(o)),
                         vector_bytes = std::min<std::int64_t>(16, launch.vector * bytes);
      const long long* operand = words.data() + kOuterAxes + o * (kOuterAxes + 1);
      if (kernel.one_per_row(o)) continue;  // as many elements as rows
      vectors = vectors && operand[0] % vector_bytes == 0;
      std::int64_t furthest = kernel.width;
      for (std::size_t a = 0; a < kOuterAxes; ++a) {
        vectors = vectors && operand[1 + a] * bytes % vector_bytes == 0;
        furthest += (words[a] - 1) * std::abs(operand[1 + a]);
      }
      narrow = narrow && furthest < kMost;
    }
  }

  const std::shared_ptr<const GpuModule> module_;
  const std::vector<RowKernel> kernels_;
};

}  // namespace

std::unique_ptr<RowLauncher> gpu_launcher(std::shared_ptr<const GpuModule> module, std::vector<RowKernel> kernels) {
  return std::make_unique<GpuLauncher>(std::move(module), std::move(kernels));
}

}  // namespace ditfleet::region
