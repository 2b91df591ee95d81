#include "shared/core/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <thread>

#include "shared/core/bytes.h"

namespace ditfleet {
namespace {

using std::chrono::seconds;

Result<ProgramRun> shell(const std::string& script, seconds limit = seconds(60)) {
  ProcessSpec spec;
  spec.argv = {"sh", "-c", script};
  return run_program(spec, Deadline::after(limit));
}

TEST(RunProgram, ReturnsTheStatusAndBothOutputs) {
  const auto run = shell("echo out; echo err >&2; exit 3");
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->exit_code, 3);
  EXPECT_EQ(run->output, "out\nerr\n");
  EXPECT_EQ(shell("kill -9 $$")->exit_code, 128 + 9);
}

TEST(RunProgram, AProgramThatCannotBeExecutedIsAnError) {
  ProcessSpec spec;
  spec.argv = {"/nowhere/program"};
  const auto run = run_program(spec, Deadline::after(seconds(60)));
  ASSERT_FALSE(run);
  EXPECT_EQ(run.error().code, Code::kNotFound);
  EXPECT_EQ(run.error().message, "cannot execute /nowhere/program: No such file or directory");
}

TEST(RunProgram, TheSpecSetsEnvironmentAndInput) {
  const std::string file = testing::TempDir() + "ditfleet-input-" + std::to_string(::getpid());
  ASSERT_TRUE(write_file_atomically(file, "a line\n"));
  ProcessSpec spec;
  spec.argv = {"/bin/sh", "-c", "read line; echo \"$line, $NAME, $HOME\""};
  spec.environment = {"NAME=value"};
  spec.input = file;
  const auto run = run_program(spec, Deadline::after(seconds(60)));
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->output, "a line, value, \n");
  std::filesystem::remove(file);
}

TEST(RunProgram, ReadsMoreThanAPipeHoldsAndKeepsABoundedPart) {
  const auto run = shell("head -c 3000000 /dev/zero; exit 5");
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->exit_code, 5);
  EXPECT_EQ(run->output.size(), std::size_t{1} << 20);
}

TEST(RunProgram, WaitsForTheProgramAlone) {
  const auto run = shell("sleep 5 & echo done", seconds(2));  // its child keeps the pipe open
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(run->output, "done\n");
}

TEST(RunProgram, KillsTheProcessGroupPastTheDeadline) {
  for (const char* script : {"sleep 60", "exec >&- 2>&-; sleep 60", "yes"}) {
    const auto run = shell(script, seconds(0));
    ASSERT_FALSE(run) << script;
    EXPECT_EQ(run.error().code, Code::kDeadlineExceeded) << script;
  }
}

TEST(ChildProcess, AppendsItsOutputToAFile) {
  const std::string file = testing::TempDir() + "ditfleet-output-" + std::to_string(::getpid());
  for (const char* text : {"one", "two"}) {
    ProcessSpec spec;
    spec.argv = {"echo", text};
    spec.output_file = file;
    auto child = ChildProcess::start(spec);
    ASSERT_TRUE(child) << child.error().message;
    EXPECT_EQ(child->output_fd(), -1);
    EXPECT_EQ(child->wait().text(), "exited with status 0");
    EXPECT_FALSE(child->running());
  }
  EXPECT_EQ(*read_file(file), "one\ntwo\n");
  std::filesystem::remove(file);
}

// The kernel sends the death signal when the thread that forked ends.
TEST(ChildProcess, OutlivesTheThreadThatStartedIt) {
  std::array<int, 2> go{};
  ASSERT_EQ(::pipe2(go.data(), O_CLOEXEC), 0);
  ProcessSpec spec;
  spec.argv = {"/bin/sh", "-c", "echo ready; read line <&" + std::to_string(go[0]) + "; exit 7"};
  spec.inherited_fd = go[0];
  ChildProcess child;
  std::filesystem::path thread;
  std::thread starter([&] {
    thread = "/proc/self/task/" + std::to_string(::syscall(SYS_gettid));
    auto started = ChildProcess::start(spec);
    ASSERT_TRUE(started) << started.error().message;
    child = std::move(*started);
    pollfd output{child.output_fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&output, 1, 10'000), 1);
  });
  starter.join();
  while (std::filesystem::exists(thread)) std::this_thread::yield();  // join() returns a little earlier
  ASSERT_EQ(::write(go[1], "go\n", 3), 3);
  const ProcessEnd end = child.wait();
  EXPECT_EQ(end.status, 7) << end.text();
  ::close(go[0]);
  ::close(go[1]);
}

TEST(ChildProcess, ReceivesItsDeathSignalWhenTheParentDies) {
  std::array<int, 2> alive{};
  ASSERT_EQ(::pipe2(alive.data(), O_CLOEXEC), 0);
  const pid_t parent = ::fork();
  if (parent == 0) {
    ProcessSpec spec;
    spec.argv = {"sleep", "60"};
    spec.inherited_fd = alive[1];
    const auto child = ChildProcess::start(spec);
    ::_exit(child ? 0 : 1);
  }
  ::close(alive[1]);
  pollfd closed{alive[0], POLLIN, 0};
  EXPECT_EQ(::poll(&closed, 1, 10'000), 1) << "the child still holds the pipe";
  ::close(alive[0]);
}

}  // namespace
}  // namespace ditfleet
