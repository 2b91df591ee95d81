// What the tests of blocks as regions share: the device, hosts, programs and inputs.
#pragma once

#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "pipeline/device/device.h"
#include "pipeline/device/failure.h"
#include "pipeline/families/flux/block_programs.h"
#include "pipeline/families/wan/block_program.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/run/region.h"
#include "tests/parity/region_inputs.h"

namespace ditfleet::region {

using Outputs = std::vector<at::Tensor>;

inline const c10::Device kCpu(c10::DeviceType::CPU);

// DITFLEET_TEST_DEVICE=cuda runs the compiled side through nvrtc on a GPU.
inline c10::Device device() {
  static const c10::Device chosen = [] {
    const char* wanted = std::getenv("DITFLEET_TEST_DEVICE");
    return pipeline::load_device(wanted ? wanted : "cpu").device;
  }();
  return chosen;
}

inline std::vector<at::Tensor> inputs_for(const Program& program, const Sizes& sizes, std::uint64_t seed,
                                          testing::InputStyle style = {}) {
  auto inputs = testing::random_inputs(program, sizes, seed, style);
  if (!device().is_cpu())
    for (at::Tensor& t : inputs) t = t.to(device());
  return inputs;
}

using Make = Result<Program> (*)(const BlockShape&);

inline Result<Program> wan_block_of(const BlockShape& s) {
  return wan_block({.heads = s.heads,
                    .head_dim = s.head_dim,
                    .ffn = s.mlp_width(),
                    .type = s.type,
                    .adapters = s.adapters,
                    .weights = s.weights});
}

inline Result<Program> wan_still_block_of(const BlockShape& s) {
  return wan_block({.heads = s.heads,
                    .head_dim = s.head_dim,
                    .ffn = s.mlp_width(),
                    .still = true,
                    .type = s.type,
                    .adapters = s.adapters,
                    .weights = s.weights});
}

inline Result<Program> wan_image_block_of(const BlockShape& s) {
  return wan_block({.heads = s.heads,
                    .head_dim = s.head_dim,
                    .ffn = s.mlp_width(),
                    .image = true,
                    .type = s.type,
                    .adapters = s.adapters,
                    .weights = s.weights});
}

inline Region::Recipe recipe(Make make, std::int64_t heads, std::int64_t head_dim) {
  return [=](ElementType type) { return make({.heads = heads, .head_dim = head_dim, .type = type}); };
}

inline std::shared_ptr<RegionHost> host(CompileOptions options = {}) {
  if (options.backend == "eager") options.backend = device().is_cpu() ? "cpu_jit" : "nvrtc";
  return make_region_host(options, device(), nullptr);
}

inline Program program_of(Make make, std::int64_t heads, std::int64_t head_dim, ElementType type) {
  return make({.heads = heads, .head_dim = head_dim, .type = type}).value();
}

// What a Failure says; "" if nothing was thrown.
template <class F>
std::string failure_of(F f) {
  try {
    f();
  } catch (const pipeline::Failure& e) {
    return e.error().message;
  }
  return "";
}

class RegionParity : public ::testing::Test {
 protected:
  void SetUp() override {
    if (auto compiler = open_cpu_jit(); !compiler) GTEST_SKIP() << compiler.error().message;
  }
  c10::InferenceMode inference_{true};
};

}  // namespace ditfleet::region
