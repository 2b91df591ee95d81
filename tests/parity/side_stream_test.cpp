// Work beside the current stream keeps the order that start() and join() promise.
#include "pipeline/device/side_stream.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

TEST_F(RegionParity, WorkAsideBeginsAfterWhatIsThereAndEndsBeforeWhatJoins) {
  const auto options = at::TensorOptions(c10::ScalarType::Float).device(device());
  const at::Tensor large = at::ones({device().is_cpu() ? 64 : 4096, device().is_cpu() ? 64 : 4096}, options);
  at::Tensor first = at::zeros({1}, options), second = at::zeros({1}, options), third = at::zeros({1}, options),
             scratch = at::mm(large, large);
  const auto slowly = [&] {
    for (int i = 0; i < 8; ++i) at::mm_out(scratch, large, large);
  };
  pipeline::SideStream aside(device());
  for (int round = 1; round <= 3; ++round) {
    slowly();
    first.add_(1);
    aside.start([&] {
      slowly();
      second.copy_(first);
    });
    aside.join();
    third.copy_(second);
    pipeline::synchronize(device());
    EXPECT_EQ(third.item<float>(), static_cast<float>(round));
  }
  aside.start([&] { second.add_(1); });
  aside.start([&] { second.add_(1); });  // nobody has joined the one before: waited for
  aside.join();
  EXPECT_EQ((second + 0).item<float>(), 5.0f);
  EXPECT_THROW(aside.start([] { throw std::runtime_error("no"); }), std::runtime_error);
  aside.join();
}

}  // namespace
}  // namespace ditfleet::region
