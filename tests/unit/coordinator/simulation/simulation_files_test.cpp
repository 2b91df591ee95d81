// The simulator's files: traces survive writing and reading, and errors name what is wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/paths.h"
#include "tests/unit/coordinator/simulation/simulation_fixture.h"

namespace ditfleet::simulation {
namespace {

using ::testing::HasSubstr;

TEST(CostTable, MatchesTheMeasurements) {
  const auto table = costs();
  // Steps of 121.0 ms at 1024² and 36.2 ms at 512², text 25 ms, VAE 25 ms at 1024².
  EXPECT_NEAR(static_cast<double>(table.run_us(1024, 1024, 28, false)), 28 * 121'040.0 + 25'000 + 25'050, 3'000);
  EXPECT_NEAR(static_cast<double>(table.run_us(512, 512, 4, false)), 4 * 36'224.0 + 25'000 + 25'050 / 4, 3'000);
  EXPECT_NEAR(static_cast<double>(table.run_us(1024, 1024, 28, true)), 28 * 121'040.0 * 1.036 + 25'000 + 25'050, 3'000);
}

TEST(CostTable, RejectsBadFiles) {
  EXPECT_EQ(read_cost_table("/nowhere/x.json").error().code, Code::kNotFound);
  EXPECT_THAT(read_cost_table(scratch("c1.json", "{")).error().message, HasSubstr("JSON"));
  EXPECT_THAT(read_cost_table(scratch("c2.json", R"({"text_uz":1})")).error().message, HasSubstr("text_us"));
  EXPECT_THAT(read_cost_table(scratch("c3.json", R"({"text_us":1})")).error().message,
              HasSubstr("has no field 'adapter_bytes'"));
  EXPECT_THAT(read_cost_table(scratch("c4.json", R"({"text_us":-1})")).error().message,
              HasSubstr("a whole number from 0 to 3600000000"));
}

// The committed table with one figure changed.
Result<CostTable> with_figure(const std::string& name, const std::string& value) {
  auto text = *read_file(source_path("tests/sim/h200.json"));
  const auto at = text.find("\n  \"" + name + "\": ");
  EXPECT_NE(at, std::string::npos) << name;
  const auto from = at + name.size() + 7, end = text.find_first_of(",\n", from);
  text.replace(from, end - from, value);
  return read_cost_table(scratch("changed.json", text));
}

TEST(CostTable, NamesTheFieldThatIsOutOfRange) {
  EXPECT_TRUE(with_figure("text_us", "25001").ok());
  const std::pair<const char*, const char*> kNonsense[] = {{"text_us", "1e300"},
                                                           {"text_us", "1e999"},
                                                           {"text_us", "0.5"},
                                                           {"step_us_per_token", "1e18"},
                                                           {"step_us_per_token2", "1e18"},
                                                           {"text_tokens", "1e12"},
                                                           {"run_spread", "5"},
                                                           {"run_spread", "1"},
                                                           {"lookahead", "1.9"},
                                                           {"lookahead", "0"},
                                                           {"cold_class_us", "9e18"},
                                                           {"adapter_bytes", "9e18"},
                                                           {"adapter_slots", "0"},
                                                           {"adapter_swap_us", "1e12"},
                                                           {"adapter_load_bytes_per_s", "0"},
                                                           {"host_adapter_bytes", "1e30"},
                                                           {"vae_us_per_pixel", "\"x\""},
                                                           {"adapter_step_ratio", "-1"}};
  for (const auto& [name, value] : kNonsense) {
    const auto table = with_figure(name, value);
    ASSERT_FALSE(table.ok()) << name << ' ' << value;
    EXPECT_EQ(table.error().code, Code::kInvalidArgument);
    if (std::string(value) != "1e999") {  // not a double: the JSON parser reports it
      EXPECT_THAT(table.error().message, HasSubstr(name)) << value;
      EXPECT_THAT(table.error().message, HasSubstr("number from")) << value;
    }
  }
  EXPECT_THAT(with_figure("step_us_per_token", "1e6").error().message, HasSubstr("days"));
  EXPECT_THAT(with_figure("adapter_load_bytes_per_s", "1").error().message, HasSubstr("days"));
  EXPECT_THAT(with_figure("host_adapter_bytes", "1000").error().message, HasSubstr("lookahead"));
}

TEST(Traces, SurviveWritingAndReading) {
  const auto trace = small_trace();
  const auto path = ::testing::TempDir() + "trace.csv";
  ASSERT_TRUE(write_trace(trace, path).ok());
  const auto again = read_trace(path);
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->workers, 4);
  ASSERT_EQ(again->jobs.size(), trace.jobs.size());
  for (std::size_t i = 0; i < trace.jobs.size(); ++i) {
    EXPECT_EQ(again->jobs[i].at_us, trace.jobs[i].at_us);
    EXPECT_EQ(again->jobs[i].adapter, trace.jobs[i].adapter);
    EXPECT_EQ(again->jobs[i].slo_us, trace.jobs[i].slo_us);
  }
}

TEST(Traces, ErrorsNameTheLine) {
  const std::string head = "# workers=2\nat_ms,tenant,width,height,steps,adapter,slo_ms\n";
  EXPECT_THAT(read_trace(scratch("t0.csv", "")).error().message, HasSubstr("no jobs"));
  EXPECT_THAT(read_trace(scratch("t1.csv", "1,2,3\n")).error().message, HasSubstr("line 1"));
  EXPECT_THAT(read_trace(scratch("t2.csv", head + "1,a,512,512,4,x,100\n2,a,512\n")).error().message,
              HasSubstr("line 4"));
  EXPECT_THAT(read_trace(scratch("t3.csv", head + "5,a,512,512,4,x,1\n2,a,512,512,4,x,1\n")).error().message,
              HasSubstr("order"));
  EXPECT_THAT(read_trace(scratch("t4.csv", head + "5,a,511,512,4,x,1\n")).error().message, HasSubstr("multiples"));
  EXPECT_THAT(read_trace(scratch("t5.csv", head + "5,a,512,512,4,x,1,9\n")).error().message, HasSubstr("line 3"));
  EXPECT_THAT(read_trace(scratch("t6.csv", head + "5,a,512,512,500,x,1\n")).error().message,
              HasSubstr("steps is '500'; it must be a whole number from 1 to 200"));
  EXPECT_THAT(read_trace(scratch("t7.csv", head + "5,a,512,512,4,x,9223372036854775807\n")).error().message,
              HasSubstr("slo_ms"));
  EXPECT_THAT(read_trace(scratch("t8.csv", head + "-5,a,512,512,4,x,1\n")).error().message, HasSubstr("at_ms"));
  const std::string long_name(300, 'n');
  EXPECT_THAT(read_trace(scratch("t9.csv", head + "5,a,512,512,4," + long_name + ",1\n")).error().message,
              HasSubstr("line 3: the adapter must be at most 128 bytes"));
  EXPECT_THAT(read_trace(scratch("ta.csv", head + "5,a,512,512,4,\xff,1\n")).error().message, HasSubstr("UTF-8"));
  EXPECT_THAT(read_trace(scratch("tb.csv", head + "5," + long_name + ",512,512,4,x,1\n")).error().message,
              HasSubstr("the tenant must be 1 to 128"));
  EXPECT_THAT(read_trace(scratch("tc.csv", "# workers=200000\n")).error().message, HasSubstr("100000"));
}

TEST(Traces, MayHaveWindowsLineEnds) {
  const auto trace = read_trace(
      scratch("crlf.csv", "# workers=2\r\nat_ms,tenant,width,height,steps,adapter,slo_ms\r\n1,a,512,512,4,x,100\r\n"));
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  EXPECT_EQ(trace->workers, 2);
  EXPECT_EQ(trace->jobs.at(0).slo_us, 100'000);
}

TEST(Traces, MayHaveAByteOrderMark) {
  const auto trace = read_trace(scratch("bom.csv",
                                        "\xef\xbb\xbf"
                                        "at_ms,tenant,width,height,steps,adapter,slo_ms\n1,a,512,512,4,x,0\n"));
  ASSERT_TRUE(trace.ok()) << trace.error().message;
  EXPECT_EQ(trace->jobs.size(), 1u);
}

TEST(Traces, GenerationRejectsOptionsOutOfRange) {
  const auto nan = std::nan("");
  const auto inf = std::numeric_limits<double>::infinity();
  const auto message = [](auto change) {
    TraceOptions options{.jobs = 10};
    change(options);
    const auto trace = generate_trace(options, costs());
    return trace.ok() ? std::string("no error") : trace.error().message;
  };
  EXPECT_EQ(message([](auto&) {}), "no error");
  for (const int steps : {0, 500, -4})
    EXPECT_THAT(message([&](auto& o) { o.steps = {4, steps}; }), HasSubstr("from 1 to 200")) << steps;
  for (const double burst : {nan, 0.5, 5.0})
    EXPECT_THAT(message([&](auto& o) { o.burst = burst; }), HasSubstr("burst is")) << burst;
  for (const double load : {nan, inf, 0.0, 1e-300})
    EXPECT_THAT(message([&](auto& o) { o.load = load; }), HasSubstr("load is")) << load;
  EXPECT_THAT(message([&](auto& o) { o.zipf = nan; }), HasSubstr("zipf is nan"));
  EXPECT_THAT(message([&](auto& o) { o.without_adapter = 5; }), HasSubstr("from 0 to 1"));
  EXPECT_THAT(message([](auto& o) { o.workers = 200'000; }), HasSubstr("from 1 to 100000"));
  EXPECT_THAT(message([](auto& o) { o = {.jobs = 200'000, .workers = 1, .load = 0.001, .steps = {200}}; }),
              HasSubstr("years"));
}

}  // namespace
}  // namespace ditfleet::simulation
