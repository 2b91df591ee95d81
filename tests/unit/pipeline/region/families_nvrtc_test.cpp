// The blocks of families whose programs stand in their TransformerSpec, in the sizes of published models, through
// NVRTC: no kernel spills registers on any architecture. Needs no GPU; skipped where libnvrtc.so.13 is not there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "pipeline/engine/family.h"
#include "pipeline/families/flux2/flux2.h"
#include "pipeline/families/qwen_image/qwen_image.h"
#include "pipeline/families/z_image/z_image.h"
#include "pipeline/region/compile/cached.h"
#include "pipeline/region/compile/nvrtc.h"
#include "pipeline/region/key.h"
#include "shared/kernel_cache/cache.h"
#include "tests/programs.h"

// NVRTC keeps what it allocates; the leak checker need not tell.
extern "C" const char* __lsan_default_suppressions() { return "leak:libnvrtc\n"; }

namespace ditfleet::region {
namespace {

using pipeline::BlockSpec;
using Weight = BlockSpec::Weight;

std::shared_ptr<const Compiler> compiler() {
  static const auto opened = open_nvrtc();
  return opened ? *opened : nullptr;
}

pipeline::TransformerSpec spec_of(const pipeline::Family& family, const std::string& config) {
  const auto path = std::filesystem::temp_directory_path() / ("ditfleet-config-" + std::to_string(::getpid()));
  std::ofstream(path) << config;
  const pipeline::ConfigFile file(path.string());
  auto spec = family.spec(file, file);
  std::filesystem::remove(path);
  return spec;
}

// Of each block that is compiled: with and without adapters, as stored, in fp8, and dequantized before the products.
// Programs with the same source are left out.
const std::vector<std::pair<std::string, Source>>& programs() {
  static const auto all = [] {
    std::vector<std::pair<std::string, Source>> made;
    std::set<std::string> texts;
    const auto add = [&](const std::string& model, const pipeline::TransformerSpec& spec, Weight weight) {
      for (const BlockSpec& block : spec.blocks) {
        const auto linears = std::count_if(block.linears.begin(), block.linears.end(),
                                           [](const auto& linear) { return !linear.input.empty(); });
        for (const bool adapters : {false, true}) {
          if (block.apart) continue;
          const auto program = block.program(ElementType::kBF16, adapters, {static_cast<std::size_t>(linears), weight});
          ASSERT_TRUE(program) << model << ": " << program.error().message;
          Source source = generate_cuda(*fuse(*program, compiler()->fuse_options()));
          if (texts.insert(source.text).second)
            made.emplace_back(model + " " + program->block + (weight == Weight::kF8 ? " fp8" : ""), std::move(source));
        }
      }
    };
    const auto z_image = spec_of(pipeline::z_image_family(), "{}"),
               qwen_image = spec_of(pipeline::qwen_image_family(), "{}"),
               qwen_edit = spec_of(pipeline::qwen_image_family(), R"({"zero_cond_t":true})"),
               klein_4b = spec_of(pipeline::flux2_family(), R"({"num_attention_heads":24,"joint_attention_dim":7680})"),
               klein_9b =
                   spec_of(pipeline::flux2_family(), R"({"num_attention_heads":32,"joint_attention_dim":12288})");
    add("klein 4B", klein_4b, Weight::kOwn);
    add("Qwen-Image-Edit", qwen_edit, Weight::kOwn);
    for (const Weight weight : {Weight::kOwn, Weight::kApart, Weight::kWide, Weight::kF8}) {
      add("Z-Image", z_image, weight);
      add("Qwen-Image", qwen_image, weight);
      add("klein 9B", klein_9b, weight);
    }
    return made;
  }();
  return all;
}

class FamilyCubin : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!compiler()) GTEST_SKIP() << open_nvrtc().error().message;
  }
};

TEST_P(FamilyCubin, HasEveryKernelWithoutSpills) {
  EXPECT_GE(programs().size(), 5u);
  for (const auto& [name, source] : programs()) {
    SCOPED_TRACE(name);
    if (name.ends_with("fp8") && (GetParam() == "sm_80" || GetParam() == "sm_86")) continue;  // no fp8 products
    const auto made = compile_cached(*testing::shared_programs(), key_of(identify(source, *compiler(), GetParam())),
                                     "region", source, *compiler(), GetParam());
    ASSERT_TRUE(made) << made.error().message;
    EXPECT_FALSE(made->entry->kernels.empty());
    for (const auto& kernel : made->entry->kernels) EXPECT_EQ(kernel.spill_bytes, 0u) << kernel.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, FamilyCubin, ::testing::ValuesIn(gpu_architectures()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ditfleet::region
