// The program key: each field changes it, nothing else does; compiled bytes are the same from process to process.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include "pipeline/families/flux/block_programs.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/compile/host_module.h"
#include "pipeline/region/key.h"
#include "shared/core/bytes.h"

namespace ditfleet::region {
namespace {

Plan plan_of(std::int64_t heads, std::int64_t head_dim, ElementType type) {
  return *fuse(*flux_single_block({.heads = heads, .head_dim = head_dim, .type = type}));
}

std::shared_ptr<const Compiler> compiler() {
  static const auto opened = open_cpu_jit();
  return opened ? *opened : nullptr;
}

class RegionKey : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!compiler()) GTEST_SKIP() << open_cpu_jit().error().message;
  }
  static ProgramIdentity identity() {
    const Plan plan = plan_of(2, 16, ElementType::kBF16);
    return identify(generate_cpp(plan), *compiler(), kHostArch);
  }
};

TEST_F(RegionKey, ChangesWithEachField) {
  const ProgramIdentity good = identity();
  const std::vector<std::pair<const char*, std::function<void(ProgramIdentity&)>>> changes = {
      {"schema", [](ProgramIdentity& id) { ++id.schema; }},
      {"generator", [](ProgramIdentity& id) { id.generator += "x"; }},
      {"source", [](ProgramIdentity& id) { id.source += "\n"; }},
      {"compiler", [](ProgramIdentity& id) { id.compiler += "x"; }},
      {"an option", [](ProgramIdentity& id) { id.options[0] += "x"; }},
      {"the options' order", [](ProgramIdentity& id) { std::swap(id.options[0], id.options[1]); }},
      {"one option less", [](ProgramIdentity& id) { id.options.pop_back(); }},
      {"options run together",
       [](ProgramIdentity& id) {
         id.options[0] += id.options[1];
         id.options.erase(id.options.begin() + 1);
       }},
      {"target", [](ProgramIdentity& id) { id.target = "sm_90a"; }},
      {"output kind", [](ProgramIdentity& id) { id.output_kind = "cubin"; }},
      {"a kernel", [](ProgramIdentity& id) { id.kernels[0] += "1"; }},
      {"one kernel less", [](ProgramIdentity& id) { id.kernels.pop_back(); }},
      {"a value that moves to the next field",
       [](ProgramIdentity& id) {
         id.target += id.output_kind;
         id.output_kind.clear();
       }},
  };
  std::set<std::string> keys{key_of(good).hex()};
  for (const auto& [what, change] : changes) {
    ProgramIdentity other = good;
    change(other);
    EXPECT_TRUE(keys.insert(key_of(other).hex()).second) << what << " is not in the key";
  }
}

TEST_F(RegionKey, IsOfTheProgramAlone) {
  const auto key = key_of(identity()).hex();
  EXPECT_EQ(key_of(identity()).hex(), key);
  // Another folder for temporary files and another working directory are no part of it.
  const auto before = std::filesystem::current_path();
  const char* old = std::getenv("TMPDIR");
  const std::string kept = old ? old : "";
  ::setenv("TMPDIR", "/var/tmp", 1);
  std::filesystem::current_path("/");
  EXPECT_EQ(key_of(identity()).hex(), key);
  std::filesystem::current_path(before);
  if (old)
    ::setenv("TMPDIR", kept.c_str(), 1);
  else
    ::unsetenv("TMPDIR");
}

TEST_F(RegionKey, DiffersByWidthTypeAndBlock) {
  std::set<std::string> keys;
  const auto add = [&](const Plan& plan) {
    return keys.insert(key_of(identify(generate_cpp(plan), *compiler(), kHostArch)).hex()).second;
  };
  EXPECT_TRUE(add(plan_of(2, 16, ElementType::kF32)));
  EXPECT_TRUE(add(plan_of(2, 16, ElementType::kBF16)));
  EXPECT_TRUE(add(plan_of(1, 32, ElementType::kBF16))) << "the same width in other heads";
  EXPECT_TRUE(add(*fuse(*flux_double_block({.heads = 2, .head_dim = 16}))));
  EXPECT_FALSE(add(plan_of(2, 16, ElementType::kF32)));
  EXPECT_FALSE(
      add(*fuse(*flux_single_block({.heads = 2, .head_dim = 16, .type = ElementType::kF32, .adapters = true}))))
      << "room for adapters is no kernel's";
}

// Run in a process of its own by the test below.
TEST_F(RegionKey, DISABLED_DigestOfAnotherProcess) {
  const char* file = std::getenv("DITFLEET_TEST_DIGEST");
  ASSERT_TRUE(file) << "runs as a child of BytesAreTheSameInEveryProcess";
  const Plan plan = plan_of(2, 16, ElementType::kBF16);
  const Source source = generate_cpp(plan);
  const auto compiled = compiler()->compile("flux.single", source, kHostArch);
  ASSERT_TRUE(compiled) << compiled.error().message;
  std::ofstream(file) << sha256_hex(source.text) << " " << sha256_hex(compiled->code) << " "
                      << key_of(identify(source, *compiler(), kHostArch)).hex();
}

TEST_F(RegionKey, BytesAreTheSameInEveryProcess) {
  const auto folder = std::filesystem::temp_directory_path() / ("ditfleet-digest-" + std::to_string(::getpid()));
  const std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  std::vector<std::string> digests;
  for (const char* name : {"one", "two"}) {
    const auto own = folder / name;  // also another TMPDIR
    std::filesystem::create_directories(own);
    const std::string command =
        "cd '" + own.string() + "' && TMPDIR='" + own.string() + "' DITFLEET_TEST_DIGEST='" +
        (own / "digest").string() + "' '" + self +
        "' --gtest_also_run_disabled_tests --gtest_filter=RegionKey.DISABLED_DigestOfAnotherProcess >/dev/null 2>&1";
    ASSERT_EQ(std::system(command.c_str()), 0);
    std::ifstream in(own / "digest");
    digests.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  std::filesystem::remove_all(folder);
  EXPECT_EQ(digests[0].size(), 3 * 64u + 2);
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(RegionKey, OnlyWholeProgramsAreLoaded) {
  const Plan plan = plan_of(1, 8, ElementType::kF32);
  auto compiled = compiler()->compile("flux.single", generate_cpp(plan), kHostArch);
  ASSERT_TRUE(compiled) << compiled.error().message;
  EXPECT_TRUE(HostModule::load(*compiled));
  Entry cut = *compiled;
  cut.code.resize(cut.code.size() / 2);
  EXPECT_FALSE(HostModule::load(cut));
  Entry renamed = *compiled;
  renamed.kernels[0].name += "x";
  ASSERT_FALSE(HostModule::load(renamed));
  EXPECT_EQ(HostModule::load(renamed).error().code, Code::kDataCorrupt);
  Entry cubin = *compiled;
  cubin.kind = kernel_cache::Kind::kCubin;
  EXPECT_FALSE(HostModule::load(cubin));
}

// Two programs with kernels of the same names, loaded at once: each keeps its own.
TEST_F(RegionKey, ProgramsLoadedTogetherStayApart) {
  const auto load = [](ElementType type) {
    const auto compiled = compiler()->compile("flux.single", generate_cpp(plan_of(1, 8, type)), kHostArch);
    EXPECT_TRUE(compiled);
    return *HostModule::load(*compiled);
  };
  const auto wide = load(ElementType::kF32), half = load(ElementType::kBF16);
  EXPECT_NE(wide->kernel(0), half->kernel(0));
}

}  // namespace
}  // namespace ditfleet::region
