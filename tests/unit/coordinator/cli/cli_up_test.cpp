// What `ditfleet up` is made of: child processes, restarts, the plan.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "coordinator/cli/up/logged_process.h"
#include "coordinator/cli/up/restart_policy.h"
#include "coordinator/cli/up/try_to_listen.h"
#include "coordinator/cli/up/up_plan.h"
#include "shared/core/bytes.h"

namespace ditfleet::cli {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using testing::HasSubstr;

TEST(TryToListen, FindsAFreePortAndSeesOneInUse) {
  const auto free = try_to_listen({"127.0.0.1", 0});
  ASSERT_TRUE(free.ok()) << free.error().message;
  EXPECT_GT(free->port, 0);

  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(fd, 1), 0);
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  const auto taken = try_to_listen({"127.0.0.1", ntohs(address.sin_port)});
  ::close(fd);
  ASSERT_FALSE(taken.ok());
  EXPECT_THAT(taken.error().message, HasSubstr("in use"));
}

TEST(RestartPolicy, BacksOffForgivesAndGivesUp) {
  RestartPolicy policy;
  EXPECT_EQ(policy.ended(milliseconds(10), false), milliseconds(100));
  EXPECT_EQ(policy.ended(milliseconds(10), false), milliseconds(200));
  for (int i = 0; i < 20; ++i) EXPECT_LE(policy.ended(milliseconds(10), false), RestartPolicy::kLongest);
  EXPECT_FALSE(policy.hopeless()) << "killed is not refusing";
  EXPECT_EQ(policy.ended(RestartPolicy::kStable, false), milliseconds(100));
  policy.ended(milliseconds(10), true);
  policy.ended(milliseconds(10), true);
  EXPECT_FALSE(policy.hopeless());
  policy.ended(milliseconds(10), true);
  EXPECT_TRUE(policy.hopeless());
}

// One that was refused and then runs is taken for working as soon as it got clearly further than its tries, not half a
// minute later: until then another worker's failure would end the service that it serves.
TEST(RestartPolicy, OneThatRecoveredWorks) {
  RestartPolicy policy;
  EXPECT_TRUE(policy.works(milliseconds(0))) << "none has failed";
  for (int i = 0; i < 5; ++i) policy.ended(milliseconds(1'500), true);
  EXPECT_FALSE(policy.works(milliseconds(1'400)));
  EXPECT_FALSE(policy.works(milliseconds(3'900))) << "a slow try";
  EXPECT_TRUE(policy.works(milliseconds(4'000)));
  EXPECT_EQ(policy.ended(milliseconds(5'000), false), milliseconds(100)) << "killed when it was well";
  EXPECT_TRUE(policy.works(milliseconds(0)));
  for (int i = 0; i < 3; ++i) policy.ended(milliseconds(20'000), true);
  EXPECT_FALSE(policy.works(milliseconds(29'000)));
  EXPECT_TRUE(policy.works(RestartPolicy::kStable)) << "however long it was tried";
  // What crashes a while after each start is not well, and not started ever so often.
  RestartPolicy crashing;
  crashing.ended(milliseconds(5'000), false);
  crashing.ended(milliseconds(5'000), false);
  EXPECT_GT(crashing.ended(milliseconds(5'000), false), milliseconds(100));
}

class Children : public testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(testing::TempDir()) / ("ditfleet-children-" + std::to_string(::getpid()));
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }

  LoggedProcessSpec shell(const std::string& script) {
    return {
        .label = "test",
        .program = {.argv = {"/bin/sh", "-c", script}, .environment = std::vector<std::string>{"PATH=/usr/bin:/bin"}},
        .log_file = (dir_ / "log").string(),
        .echo = false};
  }
  // Bounded by the child's own end: its output closes then.
  ProcessEnd wait(LoggedProcess& child) {
    for (;;) {
      if (child.output_fd() >= 0) {
        pollfd fd{child.output_fd(), POLLIN, 0};
        ::poll(&fd, 1, 10'000);
        child.drain_output();
      }
      if (const auto end = child.reap()) return *end;
    }
  }
  fs::path dir_;
};

TEST_F(Children, OutputGoesToTheLogAndTheEndIsReported) {
  LoggedProcess child(shell("echo one; echo two >&2; printf last; exit 3"));
  ASSERT_TRUE(child.start().ok());
  const ProcessEnd end = wait(child);
  EXPECT_EQ(end.status, 3);
  EXPECT_EQ(end.text(), "exited with status 3");
  EXPECT_EQ(child.last_line(), "last");
  EXPECT_EQ(*read_file((dir_ / "log").string()), "one\ntwo\nlast\n");
  EXPECT_FALSE(child.running());
  EXPECT_FALSE(child.reap().has_value());
}

TEST_F(Children, TheLogIsRotatedWhileTheChildRunsAndLongLinesAreCut) {
  LoggedProcess child(
      shell("yes 0123456789012345678901234567890123456789 | head -c 20000000; head -c 200000 /dev/zero | tr '\\0' x; "
            "echo; echo last"));
  ASSERT_TRUE(child.start().ok());
  int turns = 0;
  while (child.output_fd() >= 0) {
    pollfd fd{child.output_fd(), POLLIN, 0};
    ASSERT_EQ(::poll(&fd, 1, 10'000), 1);
    child.drain_output();
    ++turns;
  }
  EXPECT_EQ(wait(child).text(), "exited with status 0");
  EXPECT_GE(turns, 20'000'000 / (64 * 8192)) << "one child must not starve the others";
  const auto older = fs::file_size(dir_ / "log.1"), newer = fs::file_size(dir_ / "log");
  EXPECT_GT(older, 16u << 20);
  EXPECT_LT(older, 17u << 20);
  EXPECT_GE(older + newer, 20'200'000u);
  EXPECT_LT(older + newer, 20'201'000u);
  EXPECT_EQ(child.last_line(), "last");
}

TEST_F(Children, ASignalIsReportedAndAChildCanStartAgain) {
  LoggedProcess child(shell("kill -9 $$"));
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(child.start().ok());
    const ProcessEnd end = wait(child);
    EXPECT_EQ(end.signal, SIGKILL);
  }
}

TEST_F(Children, AProgramThatIsNotThereEndsWith127) {
  LoggedProcessSpec spec = shell("");
  spec.program.argv = {"/nonexistent/program"};
  LoggedProcess child(spec);
  ASSERT_TRUE(child.start().ok());
  EXPECT_EQ(wait(child).status, 127);
  EXPECT_EQ(child.last_line(), "cannot execute /nonexistent/program: No such file or directory");
}

class Plans : public Children {
 protected:
  UpFlags flags() {
    UpFlags f;
    f.sources.environment = false;
    f.data = (dir_ / "data").string();
    f.listen = "127.0.0.1:0";
    f.workers = 0;
    const fs::path model = dir_ / "model";
    for (const auto& [name, text] :
         std::map<std::string, std::string>{{"model_index.json", R"({"_class_name":"FluxPipeline"})"},
                                            {"vae/config.json", R"({"block_out_channels":[8,8]})"},
                                            {"transformer/config.json", "{}"},
                                            {"scheduler/scheduler_config.json", "{}"}}) {
      fs::create_directories((model / name).parent_path());
      std::ofstream(model / name) << text;
    }
    f.models = {"tiny=" + model.string()};
    return f;
  }
};

TEST_F(Plans, APrivateRedisAndAFreePort) {
  if (!find_program("redis-server")) GTEST_SKIP() << "redis-server is not on PATH";
  const auto plan = plan_up(flags());
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_GT(ListenAddress::parse(plan->settings.gateway.listen)->port, 0);
  EXPECT_TRUE(plan->settings.redis.url.starts_with("unix:///")) << plan->settings.redis.url;
  EXPECT_THAT(*read_file(plan->data_dir + "/redis/redis.conf"), HasSubstr("appendonly yes"));
  const auto children = config::load({.file = plan->data_dir + "/effective.yaml", .sets = {}, .environment = false});
  ASSERT_TRUE(children.ok()) << children.error().message;
  EXPECT_EQ(children->gateway.listen, plan->settings.gateway.listen);
  EXPECT_EQ(children->redis.url, plan->settings.redis.url);

  const auto second = plan_up(flags());
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(second.error().message, testing::AllOf(HasSubstr("another `ditfleet up`"),
                                                     HasSubstr(std::to_string(::getpid())), HasSubstr("--data")));
}

TEST_F(Plans, ALongFolderGetsAShortSocket) {
  if (!find_program("redis-server")) GTEST_SKIP() << "redis-server is not on PATH";
  UpFlags f = flags();
  f.data = (dir_ / std::string(120, 'd')).string();
  const auto plan = plan_up(f);
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_LT(plan->redis_socket.size(), 100u);
  fs::remove_all(fs::path(plan->redis_socket).parent_path());
}

TEST_F(Plans, ASecretForCompiledProgramsWhereTheRedisIsOurs) {
  UpFlags f = flags();
  f.redis = "redis://127.0.0.1:1";
  const auto external = plan_up(f);
  ASSERT_TRUE(external.ok()) << external.error().message;
  EXPECT_EQ(external->settings.cache.secret_file, "") << "nobody said which nodes of that Redis belong together";
  EXPECT_EQ(external->settings.cache.dir, external->data_dir + "/kernels");
  if (!find_program("redis-server")) GTEST_SKIP() << "redis-server is not on PATH";
  f = flags();
  f.data = (dir_ / "own").string();
  const auto own = plan_up(f);
  ASSERT_TRUE(own.ok()) << own.error().message;
  EXPECT_EQ(own->settings.cache.secret_file, own->data_dir + "/kernels/secret");
  EXPECT_EQ(fs::status(own->settings.cache.secret_file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  f.data = (dir_ / "named").string();
  f.sources.sets = {"cache.secret=the secret of the cluster"};
  const auto named = plan_up(f);
  ASSERT_TRUE(named.ok()) << named.error().message;
  EXPECT_EQ(named->settings.cache.secret_file, "");
}

TEST_F(Plans, EachWorkerServesItsMetricsOnAPortOfItsOwn) {
  fs::create_directories(dir_ / "bin");
  std::ofstream(dir_ / "bin/ditfleet-worker") << "#!/bin/sh\n";
  fs::permissions(dir_ / "bin/ditfleet-worker", fs::perms::owner_all);
  const char* path = std::getenv("PATH");
  const std::string before = path ? path : "";
  ::setenv("PATH", (dir_ / "bin").c_str(), 1);
  UpFlags f = flags();
  f.redis = "redis://127.0.0.1:1";
  f.workers = 2;
  f.sources.sets = {"worker.metrics_listen=127.0.0.1:9464"};
  const auto plan = plan_up(f);
  ::setenv("PATH", before.c_str(), 1);
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  ASSERT_EQ(plan->workers.size(), 2u);
  EXPECT_THAT(plan->workers[0].program.argv, testing::Contains("worker.metrics_listen=127.0.0.1:9464"));
  EXPECT_THAT(plan->workers[1].program.argv, testing::Contains("worker.metrics_listen=127.0.0.1:9465"));
}

TEST_F(Plans, SayWhatIsWrong) {
  UpFlags f = flags();
  f.redis = "redis://127.0.0.1:1";
  f.models = {"tiny"};
  EXPECT_THAT(plan_up(f).error().message, HasSubstr("NAME=DIR"));
  f.models = {"tiny=/nonexistent"};
  EXPECT_EQ(plan_up(f).error().code, Code::kNotFound);
  EXPECT_THAT(plan_up(f).error().message, HasSubstr("/nonexistent/model_index.json"));
  f = flags();
  f.redis = "redis://127.0.0.1:1";
  f.quantize = "nf4";
  EXPECT_THAT(plan_up(f).error().message, HasSubstr("models.tiny.quantize"));
  f.quantize = "";
  f.data = (dir_ / "model/model_index.json/x").string();
  EXPECT_THAT(plan_up(f).error().message, HasSubstr("--data"));
  f = flags();
  f.redis = "redis://127.0.0.1:1";
  f.quantize = "transformer=nf4";
  const auto external = plan_up(f);
  ASSERT_TRUE(external.ok());
  EXPECT_EQ(external->settings.models.at("tiny").quantize,
            (std::map<std::string, std::string>{{"transformer", "nf4"}}));
  EXPECT_TRUE(external->redis.program.argv.empty());
}

}  // namespace
}  // namespace ditfleet::cli
