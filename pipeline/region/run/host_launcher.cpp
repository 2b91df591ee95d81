#include <ATen/Parallel.h>

#include <algorithm>

#include "pipeline/region/run/row_launcher.h"

namespace ditfleet::region {
namespace {

// Elements per thread that justify waking it (20 to 40 µs of work).
constexpr std::int64_t kGrainElements = 65536;

class HostLauncher : public RowLauncher {
 public:
  HostLauncher(std::shared_ptr<const HostModule> module, std::vector<std::int64_t> widths)
      : module_(std::move(module)), widths_(std::move(widths)) {}

  void launch(const ResolvedRows& step, const std::vector<std::vector<long long>>& instances) const override {
    const HostKernel kernel = module_->kernel(static_cast<std::size_t>(step.kernel));
    const std::int64_t grain =
        std::max<std::int64_t>(1, kGrainElements / widths_[static_cast<std::size_t>(step.kernel)]);
    at::parallel_for(0, step.rows, grain, [&](std::int64_t begin, std::int64_t end) {
      std::int64_t first = 0;  // of the instance
      for (std::size_t i = 0; i < instances.size(); ++i) {
        const std::int64_t last = first + step.instances[i].rows;
        if (begin < last && end > first)
          kernel(instances[i].data(), std::max(begin, first) - first, std::min(end, last) - first);
        first = last;
      }
    });
  }

 private:
  const std::shared_ptr<const HostModule> module_;
  const std::vector<std::int64_t> widths_;
};

}  // namespace

std::unique_ptr<RowLauncher> host_launcher(std::shared_ptr<const HostModule> module, std::vector<std::int64_t> widths) {
  return std::make_unique<HostLauncher>(std::move(module), std::move(widths));
}

}  // namespace ditfleet::region
