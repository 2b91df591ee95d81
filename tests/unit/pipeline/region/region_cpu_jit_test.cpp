// The host's compiler as a child process: what it is called by, what it says, and what is not there for it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "pipeline/families/flux/block_programs.h"
#include "pipeline/region/compile/cached.h"
#include "pipeline/region/compile/cpu_jit.h"
#include "pipeline/region/key.h"
#include "shared/kernel_cache/cache.h"

namespace ditfleet::region {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TemporaryFiles {
 public:
  explicit TemporaryFiles(const char* folder) {
    if (const char* old = std::getenv("TMPDIR")) before_ = old;
    ::setenv("TMPDIR", folder, 1);
  }
  ~TemporaryFiles() {
    if (before_)
      ::setenv("TMPDIR", before_->c_str(), 1);
    else
      ::unsetenv("TMPDIR");
  }

 private:
  std::optional<std::string> before_;
};

class RegionCpuJit : public ::testing::Test {
 protected:
  RegionCpuJit() : folder_(std::filesystem::temp_directory_path() / ("ditfleet-cxx-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~RegionCpuJit() override { std::filesystem::remove_all(folder_); }

  // A compiler that answers --version with its name and `version`, and a program with `on_source`.
  std::string compiler(const std::string& name, const std::string& version,
                       const std::string& on_source = "exit 1") const {
    const std::string path = folder_ / name;
    std::ofstream(path) << "#!/bin/sh\ncase \"$*\" in *--version*) echo \"" << version
                        << "\"; exit 0;; *--help=target*) echo options; exit 0;; esac\n"
                        << on_source << "\n";
    std::filesystem::permissions(path, std::filesystem::perms::owner_all);
    return path;
  }
  static Error refusal(const std::string& program) {
    const auto opened = open_cpu_jit(program);
    EXPECT_TRUE(opened) << opened.error().message;
    const auto compiled = (*opened)->compile("flux.single", {.text = "int f();\n"}, kHostArch);
    EXPECT_FALSE(compiled);
    return compiled ? Error{} : compiled.error();
  }

  const std::filesystem::path folder_;
};

TEST_F(RegionCpuJit, IsKnownByWhatItIsNotByItsName) {
  const auto identity = [&](const std::string& name, const std::string& version) {
    return (*open_cpu_jit(compiler(name, version)))->identity();
  };
  EXPECT_EQ(identity("c++", "c++ (Debian 12.2.0-14) 12.2.0"), "(Debian 12.2.0-14) 12.2.0");
  EXPECT_EQ(identity("g++-12", "g++-12 (Debian 12.2.0-14) 12.2.0"), "(Debian 12.2.0-14) 12.2.0");
  EXPECT_EQ(identity("clang++", "Debian clang version 14.0.6"), "Debian clang version 14.0.6");
  EXPECT_EQ(identity("clang", "clang version 14.0.6 (x)"), "clang version 14.0.6 (x)")
      << "whatever the driver is called";
}

// Which options -march=native comes to is GCC's help text, in the user's language and as wide as the terminal.
TEST_F(RegionCpuJit, IsTheSameInEveryLanguageAndTerminal) {
  const auto target = [&](const std::string& name) {
    const std::string path = compiler(name, "words (x) 1");
    std::ofstream(path) << "#!/bin/sh\ncase \"$*\" in *--version*) echo 'words (x) 1';; *) echo \"$LC_ALL $LANGUAGE "
                           "$COLUMNS $HOME\";; esac\n";
    return (*open_cpu_jit(path))->target(kHostArch);
  };
  const std::string plain = target("plain");
  for (const char* variable : {"LC_ALL", "LANGUAGE", "COLUMNS"}) {
    const char* old = std::getenv(variable);
    const std::string before = old ? old : "";
    ::setenv(variable, "44", 1);
    EXPECT_EQ(target(variable), plain) << variable;
    if (old)
      ::setenv(variable, before.c_str(), 1);
    else
      ::unsetenv(variable);
  }
}

TEST_F(RegionCpuJit, SaysTheCompilersError) {
  const Error refused = refusal(
      compiler("c++", "c++ (x) 1",
               "echo \"<stdin>: In function 'int f()':\"; echo '<stdin>:3:1: error: no return'; echo more; exit 1"));
  EXPECT_EQ(refused.code, Code::kInternal);
  EXPECT_THAT(refused.message, AllOf(HasSubstr(" ended with 1: <stdin>:3:1: error: no return; the source is saved in "),
                                     Not(HasSubstr("In function"))));
  std::filesystem::remove(refused.message.substr(refused.message.rfind(' ') + 1));
  EXPECT_EQ(first_error("a.s: Assembler messages:\na.s: Fatal error: can't write"), "a.s: Fatal error: can't write");
  EXPECT_EQ(first_error("killed\nby whom"), "killed");
  EXPECT_EQ(first_error(""), "");
  EXPECT_EQ(first_error("error: " + std::string(1 << 20, 'x')).size(), 500u);
  EXPECT_EQ(first_error(std::string(1 << 20, 'x')).size(), 500u);
}

TEST_F(RegionCpuJit, SaysThatThereIsNoRoom) {
  const Error refused = refusal(
      compiler("full", "full (x) 1", "echo 'as: Fatal error: cannot write 46 bytes: No space left on device'; exit 1"));
  EXPECT_EQ(refused.code, Code::kUnavailable) << "no fault of the source's";
  EXPECT_THAT(refused.message,
              AllOf(HasSubstr("region flux.single: No space left on device in "), Not(HasSubstr("kept"))));
}

// A program that was compiled before is found without any room for files; the compiler is only asked what it is.
TEST_F(RegionCpuJit, NeedsNoTemporaryFileForAWarmCache) {
  if (const auto opened = open_cpu_jit("c++"); !opened) GTEST_SKIP() << opened.error().message;
  const auto cache = make_memory_cache();
  const Plan plan = *fuse(*flux_single_block({.heads = 1, .head_dim = 8}));
  const Source source = generate_cpp(plan);
  const auto find_or_compile = [&](const Compiler& compiler) {
    return compile_cached(*cache, key_of(identify(source, compiler, kHostArch)), "flux.single", source, compiler,
                          kHostArch);
  };
  ASSERT_TRUE(find_or_compile(**open_cpu_jit("c++")));
  ASSERT_TRUE(open_cpu_jit(compiler("another", "another (x) 1"))) << "so that the first is asked anew";
  const TemporaryFiles nowhere("/nowhere");
  const auto opened = open_cpu_jit("c++");
  ASSERT_TRUE(opened) << opened.error().message;
  const auto found = find_or_compile(**opened);
  ASSERT_TRUE(found) << found.error().message;
  EXPECT_FALSE(found->compiled);
  const auto compiled = (*opened)->compile("flux.single", source, kHostArch);
  ASSERT_FALSE(compiled);
  EXPECT_EQ(compiled.error().code, Code::kUnavailable);
  EXPECT_THAT(compiled.error().message, HasSubstr("cannot create a folder in /nowhere: No such file or directory"));
}

}  // namespace
}  // namespace ditfleet::region
