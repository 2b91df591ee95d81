// The record of a worker's heartbeat: what a worker of any version, or anybody else, may have written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

ModelMemory memory_of(const std::string& fields) {
  const auto info = parse_worker(R"({"name":"w","models":["flux"],"memory":{"flux":)" + fields + "}}");
  EXPECT_TRUE(info.ok());
  return info && info->memory.contains("flux") ? info->memory.at("flux") : ModelMemory{.bytes = -1};
}

TEST(WorkerRecord, the_memory_of_each_model_survives) {
  WorkerInfo info{.name = "w", .boot = "1", .models = {"flux", "wan"}};
  info.memory["flux"] = {.limits = {{"resident", 1 << 20}, {"block", 4 << 20}},
                         .available_bytes = 12'000'000'000,
                         .bytes = 9'000'000'000,
                         .resident = false,
                         .load_us = 400'000};
  const auto parsed = parse_worker(worker_json(info));
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(parsed->memory, info.memory);
  const auto& memory = parsed->memory.at("flux");
  EXPECT_EQ(memory.plan_for(1 << 20)->plan, "resident");
  EXPECT_EQ(memory.plan_for((1 << 20) + 1)->plan, "block");
  EXPECT_EQ(memory.plan_for((4 << 20) + 1), nullptr);
}

TEST(WorkerRecord, a_worker_of_an_older_version_reports_no_memory) {
  const auto parsed = parse_worker(R"({"name":"w","models":["flux"],"state":"ready"})");
  ASSERT_TRUE(parsed.ok());
  EXPECT_THAT(parsed->memory, IsEmpty());
}

TEST(WorkerRecord, forged_memory_is_bounded) {
  const auto huge = memory_of(
      R"({"limits":[{"plan":"block","max_pixels":9223372036854775807}],"available_bytes":9223372036854775807,
          "bytes":9223372036854775807,"load_us":9223372036854775807,"resident":"no"})");
  ASSERT_THAT(huge.limits, SizeIs(1));
  EXPECT_EQ(huge.limits[0].max_pixels, std::int64_t{1} << 50);
  EXPECT_EQ(huge.bytes, std::int64_t{1} << 50);
  EXPECT_EQ(huge.load_us, 3'600'000'000);
  EXPECT_TRUE(huge.resident);
  const auto negative = memory_of(R"({"limits":[{"plan":"block","max_pixels":-5}],"bytes":-1,"load_us":-7})");
  EXPECT_EQ(negative, ModelMemory());
  for (const char* limits : {R"({"plan":"block"})", R"([{"max_pixels":5}])", R"([{"plan":"a\nb","max_pixels":5}])",
                             R"([{"plan":"abcdefghijklmnopq","max_pixels":5}])", R"([["block",5],7,null])",
                             R"([{"plan":"block","max_pixels":18446744073709551615}])"})
    EXPECT_THAT(memory_of(std::string(R"({"limits":)") + limits + "}").limits, IsEmpty()) << limits;
  std::string many;
  for (int i = 0; i < 1000; ++i) many += R"({"plan":"block","max_pixels":5},)";
  EXPECT_THAT(memory_of(R"({"limits":[)" + many + "5]}").limits, SizeIs(8));
  std::string models;
  for (int i = 0; i < 1000; ++i) models += "\"m" + std::to_string(i) + "\":{},";
  EXPECT_THAT(parse_worker("{\"memory\":{" + models + "\"x\":7}}")->memory, SizeIs(64));
}

}  // namespace
}  // namespace ditfleet::queue
