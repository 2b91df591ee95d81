// Compares the schedule with diffusers 0.42.1 (FlowMatchEulerDiscreteScheduler.set_timesteps with the sigmas and mu of
// FluxPipeline).
#include "pipeline/sampling/schedule.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "pipeline/device/failure.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "tests/paths.h"

namespace ditfleet::pipeline {
namespace {

class ScheduleTest : public ::testing::Test {
 protected:
  SchedulerConfig read(const std::string& text) {
    std::ofstream(path_) << text;
    return read_scheduler_config(ConfigFile(path_.string()));
  }
  std::string refusal(const std::string& text) {
    try {
      read(text);
    } catch (const Failure& e) {
      EXPECT_EQ(e.error().code, Code::kDataCorrupt);
      EXPECT_NE(e.error().message.find(path_.string()), std::string::npos) << "the message must name the file";
      return e.error().message;
    }
    return "";
  }
  void TearDown() override { std::filesystem::remove(path_); }
  const std::filesystem::path path_ =
      std::filesystem::temp_directory_path() / ("ditfleet_schedule_" + std::to_string(::getpid()) + ".json");
};

struct Known {
  const char* name;
  const char* config;
  int steps;
  int image_tokens;
  std::vector<float> sigmas, timesteps;
};

const std::vector<Known> kKnown = {
    {"dev_1024",
     R"({"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
          "use_dynamic_shifting": true, "shift": 3.0})",
     4,
     4096,
     {1.0f, 0.904530764f, 0.759510934f, 0.512844145f, 0.0f},
     {1000.0f, 904.530762f, 759.510925f, 512.844116f}},
    {"dev_below_base",
     R"({"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
          "use_dynamic_shifting": true, "shift": 3.0})",
     3,
     64,
     {1.0f, 0.761450291f, 0.443826348f, 0.0f},
     {1000.0f, 761.450317f, 443.826355f}},
    {"schnell", R"({"shift": 1.0})", 4, 1024, {1.0f, 0.75f, 0.5f, 0.25f, 0.0f}, {1000.0f, 750.0f, 500.0f, 250.0f}},
    {"static_3",
     R"({"shift": 3.0})",
     3,
     9,
     {1.0f, 0.857142806f, 0.599999964f, 0.0f},
     {1000.0f, 857.142822f, 599.999939f}},
    {"one_step",
     R"({"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
          "use_dynamic_shifting": true, "shift": 3.0})",
     1,
     256,
     {1.0f, 0.0f},
     {1000.0f}},
    {"linear",
     R"({"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
          "use_dynamic_shifting": true, "shift": 3.0, "time_shift_type": "linear"})",
     3,
     1024,
     {1.0f, 0.557522118f, 0.239543721f, 0.0f},
     {1000.0f, 557.522095f, 239.543716f}},
    {"terminal",
     R"({"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
          "use_dynamic_shifting": true, "shift": 3.0, "shift_terminal": 0.1})",
     3,
     1024,
     {1.0f, 0.63305074f, 0.100000024f, 0.0f},
     {1000.0f, 633.05072f, 100.000023f}},
    {"karras",
     R"({"shift": 2.5, "use_karras_sigmas": true, "num_train_timesteps": 500})",
     4,
     1,
     {1.0f, 0.776407123f, 0.59711194f, 0.454545468f, 0.0f},
     {500.0f, 388.203552f, 298.555969f, 227.272736f}},
    {"exponential",
     R"({"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15,
          "use_dynamic_shifting": true, "shift": 3.0, "use_exponential_sigmas": true})",
     4,
     256,
     {1.0f, 0.707844555f, 0.501043916f, 0.354661226f, 0.0f},
     {1000.0f, 707.844543f, 501.043915f, 354.661224f}},
    {"beta",
     R"({"shift": 3.0, "use_beta_sigmas": true})",
     4,
     9,
     {1.0f, 0.862293363f, 0.637706637f, 0.5f, 0.0f},
     {1000.0f, 862.293335f, 637.706665f, 500.0f}},
    {"beta_one_step", R"({"shift": 3.0, "use_beta_sigmas": true})", 1, 9, {1.0f, 0.0f}, {1000.0f}},
    {"inverted",
     R"({"shift": 1.0, "invert_sigmas": true})",
     3,
     1,
     {0.0f, 0.333333313f, 0.666666627f, 1.0f},
     {0.0f, 333.333313f, 666.666626f}},
    {"flow_static",
     R"({"shift": 2.0, "use_flow_sigmas": true})",
     3,
     1024,
     {1.0f, 0.66755408f, 0.00398803595f, 0.0f},
     {1000.0f, 667.554077f, 3.98803592f}},
    {"flow_dynamic",
     R"({"use_dynamic_shifting": true, "shift": 3.0, "use_flow_sigmas": true})",
     3,
     1024,
     {1.0f, 0.652942836f, 0.00187596434f, 0.0f},
     {1000.0f, 652.94281f, 1.87596428f}},
};

TEST_F(ScheduleTest, MatchesDiffusers) {
  for (const Known& known : kKnown) {
    SCOPED_TRACE(known.name);
    const Schedule got = make_schedule(read(known.config), known.steps, known.image_tokens);
    ASSERT_EQ(got.sigmas.size(), known.sigmas.size());
    ASSERT_EQ(got.timesteps.size(), known.timesteps.size());
    for (std::size_t i = 0; i < got.sigmas.size(); ++i) EXPECT_FLOAT_EQ(got.sigmas[i], known.sigmas[i]);
    for (std::size_t i = 0; i < got.timesteps.size(); ++i) EXPECT_FLOAT_EQ(got.timesteps[i], known.timesteps[i]);
  }
}

// The sigmas that FLUX.2 has, whose mu depends on the number of steps, too.
TEST_F(ScheduleTest, TakesAMuInPlaceOfItsOwn) {
  const std::string path = source_path("tests/fixtures/flux2/schedules.json");
  const auto known = parse_json(*read_file(path));
  ASSERT_TRUE(known) << path;
  ASSERT_GT(known->as_array().size(), 30u);
  const SchedulerConfig config = read(R"({"use_dynamic_shifting": true, "shift": 3.0, "base_shift": 0.1})");
  for (const json::value& one : known->as_array()) {
    const int steps = one.at("steps").to_number<int>();
    const auto tokens = one.at("tokens").to_number<std::int64_t>();
    SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(steps) + " steps");
    const auto sigmas = json::value_to<std::vector<float>>(one.at("sigmas"));
    const Schedule got = make_schedule(config, steps, tokens, {}, one.at("mu").to_number<double>());
    ASSERT_EQ(got.sigmas.size(), sigmas.size());
    for (std::size_t i = 0; i < sigmas.size(); ++i) EXPECT_FLOAT_EQ(got.sigmas[i], sigmas[i]);
    ASSERT_EQ(got.timesteps.size(), sigmas.size() - 1);
    for (std::size_t i = 0; i + 1 < sigmas.size(); ++i) EXPECT_FLOAT_EQ(got.timesteps[i], 1000 * sigmas[i]);
  }
}

TEST_F(ScheduleTest, RefusesUnsupportedSettings) {
  EXPECT_NE(refusal(R"({"_class_name": "DDIMScheduler"})").find("FlowMatchEulerDiscreteScheduler"), std::string::npos);
  EXPECT_NE(refusal(R"({"stochastic_sampling": true})").find("stochastic_sampling"), std::string::npos);
  EXPECT_NE(refusal(R"({"use_karras_sigmas": true, "use_exponential_sigmas": true})").find("at most one"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"use_karras_sigmas": true, "use_beta_sigmas": true})").find("at most one"), std::string::npos);
  EXPECT_NE(refusal(R"({"time_shift_type": "cubic"})").find("exponential or linear"), std::string::npos);
  EXPECT_NE(refusal(R"({"shift": "three"})").find("shift is \"three\"; it must be a number"), std::string::npos);
  EXPECT_NE(refusal(R"({"use_dynamic_shifting": true, "base_image_seq_len": 9, "max_image_seq_len": 9})")
                .find("two different"),
            std::string::npos);
  EXPECT_NE(refusal("[1]").find("JSON object"), std::string::npos);
  EXPECT_NE(refusal("{").find("not valid JSON"), std::string::npos);
}

}  // namespace
}  // namespace ditfleet::pipeline
