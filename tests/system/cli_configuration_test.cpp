// --set, --config and DITFLEET_SECTION__KEY of every command of `ditfleet`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/system/program.h"

namespace ditfleet::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Words = std::vector<std::string>;

const std::vector<Words> kCommands = {{"generate", "a red circle"},
                                      {"jobs", "list"},
                                      {"jobs", "show", "a"},
                                      {"jobs", "watch", "a"},
                                      {"jobs", "cancel", "a"},
                                      {"workers"},
                                      {"explain", "a"},
                                      {"config", "check"},
                                      {"config", "show"},
                                      {"up"},
                                      {"coordinator"},
                                      {"version"},
                                      {"cache", "stats"},
                                      {"cache", "list"},
                                      {"cache", "verify"},
                                      {"cache", "purge"}};

struct CliConfiguration : ::testing::TestWithParam<Words> {
  static Words with(Words words, const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
};

TEST_P(CliConfiguration, AnUnknownKeyIsRefusedWithTheNearestRightOne) {
  Program program("ditfleet", with(GetParam(), {"--set", "gateway.lisen=127.0.0.1:1"}));
  EXPECT_EQ(program.wait(), 2);
  EXPECT_THAT(program.err(), AllOf(HasSubstr("gateway.lisen"), HasSubstr("gateway.listen")));
}

TEST_P(CliConfiguration, AWrongValueIsRefused) {
  Program program("ditfleet", with(GetParam(), {"--set", "worker.count=several"}));
  EXPECT_EQ(program.wait(), 2);
  EXPECT_THAT(program.err(), AllOf(HasSubstr("worker.count"), HasSubstr("several")));
}

TEST_P(CliConfiguration, TheEnvironmentCounts) {
  Program program("ditfleet", GetParam(),
                  {.environment = {"DITFLEET_WORKER__THREDS=1"}, .input = {}, .stdout_path = {}});
  EXPECT_EQ(program.wait(), 2);
  EXPECT_THAT(program.err(), AllOf(HasSubstr("DITFLEET_WORKER__THREDS"), HasSubstr("DITFLEET_WORKER__THREADS")));
}

TEST_P(CliConfiguration, AFileThatIsNotThereIsNamed) {
  Program program("ditfleet", with(GetParam(), {"--config", "/no/such/fleet.yaml"}));
  EXPECT_NE(program.wait(), 0);
  EXPECT_THAT(program.err(), HasSubstr("/no/such/fleet.yaml"));
}

INSTANTIATE_TEST_SUITE_P(Commands, CliConfiguration, ::testing::ValuesIn(kCommands), [](const auto& info) {
  std::string name = info.param[0];
  if (name == "jobs" || name == "config" || name == "cache") name += "_" + info.param[1];
  return name;
});

// A port where nobody listens, named by each source in turn.
TEST(CliTarget, TheGatewayIsWhereTheConfigurationSays) {
  const auto expect_asked = [](const Words& words, const Words& environment, const std::string& url) {
    Program program("ditfleet", words, {.environment = environment, .input = {}, .stdout_path = {}});
    EXPECT_EQ(program.wait(), 1);
    EXPECT_THAT(program.err(), HasSubstr("cannot reach " + url));
  };
  expect_asked({"workers", "--set", "gateway.listen=127.0.0.1:9"}, {}, "http://127.0.0.1:9:");
  expect_asked({"workers", "--set", "gateway.listen=0.0.0.0:9"}, {}, "http://127.0.0.1:9:");
  expect_asked({"jobs", "list"}, {"DITFLEET_GATEWAY__LISTEN=127.0.0.1:10"}, "http://127.0.0.1:10:");
  expect_asked({"jobs", "list", "--set", "gateway.public_url=http://127.0.0.1:11"}, {}, "http://127.0.0.1:11:");
  expect_asked({"jobs", "list", "--url", "http://127.0.0.1:12"}, {"DITFLEET_GATEWAY__LISTEN=127.0.0.1:10"},
               "http://127.0.0.1:12:");
  Program program("ditfleet", {"workers", "--set", "gateway.listen=127.0.0.1:0"});
  EXPECT_EQ(program.wait(), 2);
  EXPECT_THAT(program.err(), HasSubstr("--url"));
}

}  // namespace
}  // namespace ditfleet::testing
