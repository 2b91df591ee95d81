// `ditfleet-worker compile`: a model's regions ahead of time, on a machine without a GPU, and what workers find then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shared/core/json.h"
#include "shared/redis/connection.h"
#include "tests/paths.h"
#include "tests/system/program.h"
#include "tests/system/redis_server.h"
#include "tests/system/temporary_folder.h"

namespace ditfleet::testing {
namespace {

using ::testing::HasSubstr;

const std::string kModel = source_path("tests/fixtures/flux/dev/model");
using Words = std::vector<std::string>;

class WorkerCompile : public FolderTest {
 protected:
  Words compile(const Words& more, const std::string& model = kModel) const {
    Words words = {"compile", "--model", model, "--set", "cache.dir=" + dir_ + "/cache"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  // What was compiled ahead is what a worker asks for: its picture compiles nothing. The compiler is out of reach then.
  void find_compiled(const std::string& model, const std::string& block, int programs) const {
    SCOPED_TRACE(model);
    const Words draw = {"generate",
                        "--model",
                        model,
                        "--prompt",
                        "x",
                        "--device",
                        "cpu",
                        "--size",
                        "64x64",
                        "--steps",
                        "1",
                        "--seed",
                        "1",
                        "--set",
                        "cache.dir=" + dir_ + "/cache",
                        "--set",
                        "compile.backend=cpu_jit",
                        "--set",
                        "compile.fullgraph=true"};
    auto draw_to = [&](const std::string& name) {
      Words words = draw;
      words.insert(words.end(), {"--out", dir_ + "/" + name});
      return words;
    };
    {
      Program ahead("ditfleet-worker", compile({"--arch", "cpu"}, model));
      ASSERT_EQ(ahead.wait(), 0) << ahead.err();
      EXPECT_THAT(ahead.out(), HasSubstr(std::to_string(programs) + " compiled, 0 already in the cache"));
    }
    // A compiler that tells what it is and then fails: only a program from the cache can run.
    const std::string wrapper = dir_ + "/c++";
    std::ofstream(wrapper) << "#!/bin/sh\ncase \"$*\" in *--version*|*--help=target*) exec c++ \"$@\";; esac\nexit 1\n";
    std::filesystem::permissions(wrapper, std::filesystem::perms::owner_all);
    {
      Program program("ditfleet-worker", draw_to("found.png"), {.environment = {"DITFLEET_CXX=" + wrapper}});
      EXPECT_EQ(program.wait(), 0) << program.err();
    }
    {
      Words words = draw_to("missing.png");
      words.insert(words.end(), {"--set", "cache.dir=" + dir_ + "/empty"});
      Program program("ditfleet-worker", words, {.environment = {"DITFLEET_CXX=" + wrapper}});
      EXPECT_NE(program.wait(), 0);
      EXPECT_THAT(program.err(), HasSubstr("compile.fullgraph is set and region " + block));
    }
  }
};

TEST_F(WorkerCompile, FillsTheCacheOnceForTheHost) {
  for (const bool first : {true, false}) {
    Program program("ditfleet-worker", compile({"--arch", "cpu", "--json"}));
    ASSERT_EQ(program.wait(), 0) << program.err();
    const json::object report = json::parse(program.out()).as_object();
    EXPECT_EQ(report.at("compiled").to_number<int>(), first ? 2 : 0);
    EXPECT_EQ(report.at("hits").to_number<int>(), first ? 0 : 2);
    ASSERT_EQ(report.at("regions").as_array().size(), 2u);
    for (const auto& region : report.at("regions").as_array()) {
      EXPECT_EQ(region.at("arch"), "cpu");
      EXPECT_GT(region.at("kernels").to_number<int>(), 3);
      EXPECT_EQ(region.at("spills").to_number<int>(), 0);
      EXPECT_GT(region.at("source_bytes").to_number<int>(), 1000);
      EXPECT_GT(region.at("cubin_bytes").to_number<int>(), 1000);
    }
  }
}

TEST_F(WorkerCompile, TakesEachArchitectureOnceWithBlanksAroundIt) {
  Program program("ditfleet-worker", compile({"--arch", " cpu,cpu , cpu", "--json"}));
  ASSERT_EQ(program.wait(), 0) << program.err();
  EXPECT_EQ(json::parse(program.out()).as_object().at("regions").as_array().size(), 2u);
}

TEST_F(WorkerCompile, AWorkerFindsWhatWasCompiled) {
  for (const auto& [folder, block, programs] :
       {std::tuple("flux/dev", "flux.", 2), {"z_image/base", "z_image.", 1}, {"flux2/klein", "flux2.", 2}})
    find_compiled(source_path(std::string("tests/fixtures/") + folder + "/model"), block, programs);
}

TEST_F(WorkerCompile, BuildsForGpusWithoutOne) {
  Program program("ditfleet-worker", compile({"--arch", "sm_80,sm_90a", "--json", "--explain"}));
  const int status = program.wait();
  if (status != 0 && program.err().find("libnvrtc.so.13 was not found") != std::string::npos)
    GTEST_SKIP() << program.err();
  ASSERT_EQ(status, 0) << program.err();
  const json::object report = json::parse(program.out()).as_object();
  EXPECT_EQ(report.at("compiled").to_number<int>(),
            8);  // two blocks (the same with adapters), what copies these, and the VAE's; for two architectures
  for (const auto& region : report.at("regions").as_array()) {
    EXPECT_EQ(region.at("spills").to_number<int>(), 0);
    EXPECT_GT(region.at("registers").to_number<int>(), 0);
    EXPECT_EQ(region.at("dtype"), "bf16");
    const std::string text(region.at("explain").as_string());
    EXPECT_THAT(text, HasSubstr("bytes spilled"));
    if (region.at("name") == "matrix_copies" || region.at("name") == "channels_last") continue;  // no block
    for (const char* part : {"gemm       ", "rows       ", "registers", "bytes spilled", "moves "})
      EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST_F(WorkerCompile, BuildsOnlyWhatWorkersWithTheseSettingsAskFor) {
  const std::vector<std::string> without_nvrtc = {"no nvrtc"};
  const auto names = [&](const Words& more) {
    Words words = compile({"--json"});
    words.insert(words.end(), more.begin(), more.end());
    Program program("ditfleet-worker", words);
    const int status = program.wait();
    if (status != 0 && program.err().find("libnvrtc.so.13 was not found") != std::string::npos) return without_nvrtc;
    EXPECT_EQ(status, 0) << program.err();
    std::vector<std::string> found;
    if (status != 0) return found;
    const json::value report = json::parse(program.out());
    for (const auto& region : report.at("regions").as_array()) found.emplace_back(region.at("name").as_string());
    return found;
  };
  EXPECT_EQ(names({"--arch", "cpu,cpu"}).size(), 2u) << "an architecture that is named twice";
  EXPECT_EQ(names({"--arch", "cpu", "--set", "compile.dynamic=false"}).size(), 2u) << "every size has the same kernels";
  const auto vae_alone = names({"--arch", "sm_90a", "--set", "compile.components.transformer=false"});
  if (vae_alone == without_nvrtc) GTEST_SKIP() << "there is no NVRTC here";
  EXPECT_THAT(vae_alone, ::testing::ElementsAre("channels_last"));
  const auto blocks_alone = names({"--arch", "sm_90a", "--set", "compile.components.vae=false"});
  EXPECT_EQ(blocks_alone.size(), 3u);
  EXPECT_THAT(blocks_alone, ::testing::Not(::testing::Contains("channels_last")));
}

// On a CPU in bf16 auto runs eagerly, so programs for it would be unused.
TEST_F(WorkerCompile, BuildsNothingForACpuInBf16UnlessToldTo) {
  const Words bf16 = {"--arch", "cpu", "--dtype", "bf16", "--json"};
  const auto regions = [&](const Words& more, int status) {
    Words words = compile(bf16);
    words.insert(words.end(), more.begin(), more.end());
    Program program("ditfleet-worker", words);
    EXPECT_EQ(program.wait(), status) << program.err();
    if (status != 0) {
      EXPECT_THAT(program.err(), HasSubstr("nothing is compiled for cpu in bf16 with compile.backend=auto"));
      EXPECT_EQ(program.out(), "");
      EXPECT_FALSE(std::filesystem::exists(dir_ + "/cache/1"));
      return std::size_t{0};
    }
    return json::parse(program.out()).at("regions").as_array().size();
  };
  regions({}, 2);
  EXPECT_EQ(regions({"--set", "compile.backend=cpu_jit"}, 0), 2u);
  EXPECT_EQ(regions({"--set", "compile.fullgraph=true"}, 0), 2u);
  // Beside an architecture that has programs it is left out.
  Program both("ditfleet-worker", compile({"--arch", "cpu,sm_90a", "--dtype", "bf16", "--json", "--set",
                                           "compile.components.transformer=false"}));
  const int status = both.wait();
  if (status != 0 && both.err().find("libnvrtc.so.13 was not found") != std::string::npos)
    GTEST_SKIP() << "there is no NVRTC here";
  ASSERT_EQ(status, 0) << both.err();
  EXPECT_THAT(both.err(), HasSubstr("nothing is compiled for cpu in bf16"));
  const json::value report = json::parse(both.out());
  ASSERT_EQ(report.at("regions").as_array().size(), 1u);
  EXPECT_EQ(report.at("regions").as_array()[0].at("arch"), "sm_90a");
}

// Nodes with separate disks and one Redis: what the first has compiled the second takes from there.
TEST_F(WorkerCompile, ASecondNodeCompilesNothing) {
  const RedisServer redis({.appendfsync = "no"});
  for (const bool first : {true, false}) {
    Words words = compile({"--arch", "cpu", "--json", "--set", "redis.url=" + redis.url(), "--set",
                           "cache.dir=" + dir_ + (first ? "/a" : "/b")});
    Program program("ditfleet-worker", words,
                    {.environment = {"DITFLEET_CACHE__SECRET=0123456789abcdef0123456789abcdef"}});
    ASSERT_EQ(program.wait(), 0) << program.err();
    const json::object report = json::parse(program.out()).as_object();
    EXPECT_EQ(report.at("compiled").to_number<int>(), first ? 2 : 0);
    EXPECT_EQ(report.at("hits").to_number<int>(), first ? 0 : 2);
  }
}

TEST_F(WorkerCompile, RefusesWhatItCannotBuild) {
  const auto refused = [&](const Words& more, const std::vector<std::string>& environment, int status,
                           const std::string& said) {
    Program program("ditfleet-worker", compile(more), {.environment = environment});
    EXPECT_EQ(program.wait(), status) << said;
    EXPECT_THAT(program.err(), HasSubstr(said));
    EXPECT_EQ(program.out(), "");
  };
  refused({"--arch", "cpu,sm_70"}, {}, 2,
          "'sm_70' is not an architecture for regions; it must be one of sm_80, sm_86, sm_89, sm_90a, sm_100a, "
          "sm_120a, cpu");
  refused({"--arch", ","}, {}, 2, "is not an architecture");
  refused({"--arch", "cpu", "--dtype", "fp8"}, {}, 2, "dtype is \"fp8\"");
  refused({"--arch", "sm_80"}, {"DITFLEET_NVRTC=/nowhere/libnvrtc.so.13"}, 1,
          "libnvrtc.so.13 was not found (/nowhere/libnvrtc.so.13)");
  refused({"--arch", "sm_80", "--set", "compile.nvrtc=/elsewhere/libnvrtc.so.13"},
          {"DITFLEET_NVRTC=/nowhere/libnvrtc.so.13"}, 1, "was not found (/elsewhere/libnvrtc.so.13)");
  refused({"--arch", "cpu", "--set", "compile.cxx=/elsewhere/c++"}, {"DITFLEET_CXX=/nowhere/c++"}, 1,
          "/elsewhere/c++ cannot be used");
  refused({"--arch", "cpu"}, {"DITFLEET_CXX=/nowhere/c++"}, 1, "/nowhere/c++ cannot be used");
  // Nor what no worker with these settings would ask for.
  refused({"--arch", "cpu", "--set", "compile.backend=eager"}, {}, 2,
          "nothing can be compiled ahead of time with compile.backend=eager");
  refused(
      {"--arch", "sm_90a", "--set", "compile.components.transformer=false", "--set", "compile.components.vae=false"},
      {}, 2, "nothing can be compiled ahead of time");
  refused({"--arch", "cpu", "--set", "compile.components.transformer=false"}, {}, 2, "nothing to compile for 'cpu'");
  // Nor what it could not keep. What it logs goes to standard error.
  refused({"--arch", "cpu", "--json", "--set", "cache.dir=/proc/nowhere"}, {}, 1,
          "2 of 2 programs were compiled but could not be stored");
  refused({"--arch", "cpu", "--model", "/nowhere"}, {}, 2, "");  // --model twice
  // Nor what no worker could load.
  const std::string cut = dir_ + "/cut";
  std::ofstream(cut)
      << "#!/bin/sh\nc++ \"$@\" || exit\nfor last; do :; done\ncase $last in *.so) truncate -s 3000 \"$last\";; esac\n";
  std::filesystem::permissions(cut, std::filesystem::perms::owner_all);
  refused({"--arch", "cpu", "--set", "cache.dir=" + dir_ + "/cut-cache", "--set", "compile.cxx=" + cut}, {}, 1,
          "cannot be loaded: it is not a complete ELF file");
  const std::string silent = dir_ + "/silent";
  std::ofstream(silent) << "#!/bin/sh\ncase \"$*\" in *--version*|*--help=target*) exec c++ \"$@\";; esac\nexit 0\n";
  std::filesystem::permissions(silent, std::filesystem::perms::owner_all);
  refused({"--arch", "cpu", "--set", "cache.dir=" + dir_ + "/cut-cache", "--set", "compile.cxx=" + silent},
          {"TMPDIR=" + dir_}, 1, "ended with 0: it wrote no file; it printed nothing");
  Program missing("ditfleet-worker",
                  {"compile", "--model", "/nowhere", "--arch", "cpu", "--set", "cache.dir=" + dir_ + "/cache"});
  EXPECT_EQ(missing.wait(), 1);
  EXPECT_THAT(missing.err(), HasSubstr("/nowhere/model_index.json"));
}

}  // namespace
}  // namespace ditfleet::testing
