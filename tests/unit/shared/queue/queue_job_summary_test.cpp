// Summaries of units and jobs from the events of a shard, and their spans.
#include "shared/queue/job_summary.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "shared/queue/records.h"

namespace ditfleet::queue {
namespace {

constexpr char kReady[] = R"(ready 0 {"tenant":"acme","class":"demo/256x256x1/none/64/fp32","units":1,)"
                          R"("steps":28,"adapters":2,"cost_us":700})";

// Applies lines of the feed as "<ms> <job> <type> <unit> <data>" and returns what ended, in order.
std::vector<JobSummary> apply(JobSummaries& jobs, const std::vector<std::pair<int, std::string>>& lines) {
  std::vector<JobSummary> out;
  for (const auto& [ms, line] : lines) {
    const auto space = line.find(' ');
    auto event = parse_feed_line(std::to_string(ms) + "-0", line.substr(0, space) + " -" + line.substr(space));
    EXPECT_TRUE(event.ok()) << line;
    std::vector<Event> events;
    append_events(std::move(*event), events);
    for (const Event& one : events) {
      auto ended = jobs.apply(one);
      if (ended.unit) out.push_back(std::move(*ended.unit));
      if (ended.job) out.push_back(std::move(*ended.job));
    }
  }
  return out;
}

std::string text_of(const std::vector<Span>& spans) {
  std::string out;
  for (const Span& span : spans)
    out += span.name + " " + std::to_string(span.begin_us / 1000) + "+" + std::to_string(span.us / 1000) + "; ";
  return out;
}

TEST(JobSummary, AJobThatWasTriedTwice) {
  JobSummaries jobs;
  const auto ended = apply(
      jobs, {{1000, R"(j queued -1 {"tenant":"acme"})"},
             {1010, std::string("j ") + kReady},
             {2000, R"(j assigned 0 {"attempt":1,"worker":"w1","reason":"warm"})"},
             {2010, R"(j started 0 {"attempt":1,"worker":"w1"})"},
             {2500, R"(j step 0 {"step":1,"total":28})"},
             {7000, R"(j ready 0 {"reason":"lease lapsed","owner":"w1:x","crashes":1})"},
             {9000, R"(j assigned 0 {"attempt":2,"worker":"w2","reason":"cold"})"},
             {9010, R"(j started 0 {"attempt":2,"worker":"w2"})"},
             {9500, R"(j succeeded 0 {"job":"succeeded","phases_us":{"vae":90000,"denoise":400000,"new":1000}})"}});
  ASSERT_EQ(ended.size(), 2u);
  for (const JobSummary& one : ended) {
    EXPECT_EQ(one.id, "j");
    EXPECT_EQ(one.tenant, "acme");
    EXPECT_EQ(one.class_key, "demo/256x256x1/none/64/fp32");
    EXPECT_EQ(one.model, "demo");
    EXPECT_EQ(one.state, job::State::kSucceeded);
    EXPECT_EQ(one.worker, "w2");
    EXPECT_EQ(one.steps, 28);
    EXPECT_EQ(one.adapters, 2);
    EXPECT_EQ(one.cost_us, 700);
    EXPECT_EQ(one.attempts, 2);
    EXPECT_EQ(one.created_ms, 1000);
    EXPECT_EQ(one.ready_ms, 1010);
    EXPECT_EQ(one.started_ms, 9010);
    EXPECT_EQ(one.ended_ms, 9500);
    EXPECT_EQ(text_of(spans_of(one, 99'999)),
              "admission 0+10; queue 10+990; earlier attempts 1000+5000; queued again 6000+2000; denoise 8000+400; vae "
              "8400+90; new 8490+1; "
              "hand-over 8491+9; ");
  }
  EXPECT_EQ(ended[0].unit, 0);
  EXPECT_EQ(ended[1].unit, -1);
  EXPECT_TRUE(jobs.open().empty());
}

TEST(JobSummary, AUnitThatIsHandedBackRevokedOrPausedHasNotFailed) {
  JobSummaries jobs;
  const auto ended = apply(jobs, {{1000, std::string("j ") + kReady},
                                  {2000, R"(j assigned 0 {"attempt":1,"worker":"w1"})"},
                                  {2200, R"(j ready 0 {"reason":"revoked"})"},
                                  {2500, R"(j assigned 0 {"attempt":1,"worker":"w2"})"},
                                  {2510, R"(j started 0 {"attempt":1,"worker":"w2"})"},
                                  {2900, R"(j ready 0 {"reason":"handed back"})"},
                                  {3000, R"(j assigned 0 {"attempt":1,"worker":"w1"})"},
                                  {3010, R"(j started 0 {"attempt":1,"worker":"w1"})"},
                                  {3100, R"(j ready 0 {"reason":"paused","not_before_ms":4102444800000})"},
                                  {3200, R"(j ready 0 {"reason":"resumed"})"},
                                  {6500, R"(j assigned 0 {"attempt":1,"worker":"w1"})"},
                                  {6600, R"(j ready 0 {"reason":"retry","not_before_ms":6700,"errors":1})"},
                                  {6700, R"(j ready 0 {"reason":"retry is due"})"},
                                  {6800, R"(j assigned 0 {"attempt":2,"worker":"w1"})"},
                                  {6810, R"(j started 0 {"attempt":2,"worker":"w1"})"},
                                  {7000, R"(j succeeded 0 {"job":"succeeded","phases_us":{"denoise":190000}})"}});
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1].attempts, 2);
  EXPECT_EQ(ended[1].last_unit, 0);
  EXPECT_EQ(text_of(spans_of(ended[1], 0)),
            "admission 0+0; queue 0+1000; earlier attempts 1000+800; queued again 1800+4000; denoise 5800+190; "
            "hand-over 5990+10; ");
}

TEST(JobSummary, ARunBeginsWhenTheWorkerHasEndedTheUnitBefore) {
  JobSummaries jobs;
  const std::string assigned = R"( assigned 0 {"attempt":1,"worker":"w1","reason":"warm"})";
  const auto ended = apply(jobs, {{1000, std::string("a ") + kReady},
                                  {1001, std::string("b ") + kReady},
                                  {1002, std::string("c ") + kReady},
                                  {1010, "a" + assigned},
                                  {1011, "b" + assigned},
                                  {1100, "a started 0 {}"},
                                  {1200, "b started 0 {}"},  // prepared while `a` runs
                                  {1500, R"(a succeeded 0 {"job":"succeeded"})"},
                                  {1900, R"(b succeeded 0 {"job":"succeeded"})"},
                                  {2000, R"(c canceled 0 {"job":"canceled"})"}});
  ASSERT_EQ(ended.size(), 6u);
  EXPECT_EQ(ended[1].run_ms, 400);
  EXPECT_EQ(ended[3].run_ms, 400);
  EXPECT_EQ(ended[5].run_ms, 0);
}

TEST(JobSummary, AnAdapterIsSetOrRestored) {
  JobSummaries jobs;
  jobs.set_adapter("a", "0123");  // not tracked
  UnitView view{.ref = {"b", 0}};
  view.adapters = {"4567", "89"};
  jobs.restore({view});
  const auto ended = apply(jobs, {{1000, std::string("a ") + kReady}, {1001, R"(b succeeded 0 {"job":"succeeded"})"}});
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1].adapter, "4567");
  jobs.set_adapter("a", "0123");
  EXPECT_EQ(jobs.open().at("a").summary.adapter, "0123");
}

TEST(JobSummary, AJobEndsWithItsLastUnit) {
  JobSummaries jobs;
  std::string ready = kReady;
  ready.replace(ready.find("\"units\":1"), 9, "\"units\":2");
  auto ended = apply(jobs, {{1000, R"(j queued -1 {"tenant":"acme"})"},
                            {1010, "j " + ready},
                            {1010, "j ready 1 {}"},
                            {1020, R"(j assigned 1 {"worker":"w2"})"},
                            {1030, R"(j started 1 {"worker":"w2"})"},
                            {1040, R"(j failed 1 {"code":"internal","message":"broken"})"}});
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].unit, 1);
  EXPECT_EQ(ended[0].error, "broken");
  EXPECT_EQ(text_of(spans_of(ended[0], 0)), "admission 0+10; queue 10+10; until started 20+10; run 30+10; ");
  ASSERT_NE(jobs.find("j", 0), nullptr);
  EXPECT_EQ(jobs.find("j", 0)->state, job::State::kReady);
  ended = apply(jobs, {{2000, R"(j assigned 0 {"worker":"w1"})"},
                       {2010, R"(j started 0 {"worker":"w1"})"},
                       {3000, R"(j succeeded 0 {"job":"failed","job_error":{"message":"broken"}})"}});
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1].state, job::State::kFailed);
  EXPECT_EQ(ended[1].error, "broken");
  EXPECT_EQ(ended[1].worker, "w1");
  EXPECT_EQ(ended[1].ended_ms, 3000);
}

TEST(JobSummary, JobsThatEndBeforeTheyAreAdmitted) {
  JobSummaries jobs;
  const auto ended = apply(jobs, {{1, R"(a queued -1 {"tenant":"acme"})"},
                                  {2, R"(a rejected -1 {"code":"invalid_argument","message":"no such model"})"},
                                  {3, R"(b queued -1 {"tenant":"bolt"})"},
                                  {4, R"(b canceled -1 {})"},
                                  {5, R"(unknown canceled -1 {})"}});
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[0].state, job::State::kRejected);
  EXPECT_EQ(ended[0].error, "no such model");
  EXPECT_EQ(ended[1].tenant, "bolt");
  EXPECT_EQ(text_of(spans_of(ended[1], 0)), "admission 0+1; ");
}

TEST(JobSummary, SpansOfAnOpenUnitEndNow) {
  JobSummary unit{.created_ms = 1000, .ready_ms = 1010};
  EXPECT_EQ(text_of(spans_of(unit, 3000)), "admission 0+10; queue 10+1990; ");
  unit.first_assigned_ms = unit.assigned_ms = 2000;
  EXPECT_EQ(text_of(spans_of(unit, 3000)), "admission 0+10; queue 10+990; not started 1000+1000; ");
  unit.started_ms = 2100;
  EXPECT_EQ(text_of(spans_of(unit, 3000)), "admission 0+10; queue 10+990; until started 1000+100; run 1100+900; ");
  unit.assigned_ms = unit.started_ms = 0;  // it waits for its second attempt
  unit.earlier_ms = 300;
  EXPECT_EQ(text_of(spans_of(unit, 3000)),
            "admission 0+10; queue 10+990; earlier attempts 1000+300; queued again 1300+700; ");
  // The worker's phases may add up to a little more than what lies between two rounded times.
  unit = {.created_ms = 1000, .ready_ms = 1010, .first_assigned_ms = 2000, .assigned_ms = 2000, .ended_ms = 2500};
  unit.phases_us = {{"denoise", 400'000}, {"vae", 100'000}, {"store", 1'500}};
  EXPECT_EQ(text_of(spans_of(unit, 3000)),
            "admission 0+10; queue 10+990; denoise 1000+400; vae 1400+100; store 1500+0; ");
}

TEST(JobSummary, OpenJobsAreBoundedAndRestored) {
  JobSummaries jobs(2);
  apply(jobs, {{1, "a queued -1 {}"}, {2, "b queued -1 {}"}, {3, "c queued -1 {}"}});
  EXPECT_EQ(jobs.open().size(), 2u);
  EXPECT_TRUE(jobs.full());
  UnitView view{.ref = {"d", 1}, .state = job::State::kRunning, .tenant = "acme", .class_key = "c", .model = "demo"};
  view.owner = "w1:run";
  jobs.restore({view});
  ASSERT_EQ(jobs.open().size(), 1u);
  ASSERT_NE(jobs.find("d", 1), nullptr);
  EXPECT_EQ(jobs.find("d", 1)->worker, "w1");
  const auto ended = apply(jobs, {{9, R"(d succeeded 1 {"job":"succeeded"})"}});
  ASSERT_EQ(ended.size(), 2u);
  EXPECT_EQ(ended[1].tenant, "acme");
  EXPECT_EQ(ended[1].first_assigned_ms, 0);
}

}  // namespace
}  // namespace ditfleet::queue
