// Checks that the judge of the fault tests rejects invalid histories.
#include "tests/fault/job_history.h"

#include <gtest/gtest.h>

#include <sstream>

namespace ditfleet::testing {
namespace {

// Makes events from text such as "queued ready:0 assigned:0@a/1 started:0@a/1 step:0=3": TYPE[:UNIT][@WORKER][/ATTEMPT]
// or TYPE:UNIT=STEP.
std::vector<queue::Event> history(const std::string& words) {
  std::vector<queue::Event> out;
  std::istringstream in(words);
  int sequence = 0;
  for (std::string word; in >> word;) {
    queue::Event event;
    event.id = "1700000000000-" + std::to_string(sequence++);
    const auto cut = [&word](char mark) {
      const auto at = word.find(mark);
      std::string tail = at == std::string::npos ? "" : word.substr(at + 1);
      word = word.substr(0, at);
      return tail;
    };
    if (const auto step = cut('='); !step.empty()) event.fields["step"] = step;
    if (const auto attempt = cut('/'); !attempt.empty()) event.fields["attempt"] = attempt;
    if (const auto worker = cut('@'); !worker.empty()) event.fields["worker"] = worker;
    if (const auto unit = cut(':'); !unit.empty()) event.unit = std::stoi(unit);
    if (word == "delayed") {
      word = "ready";
      event.fields["not_before_ms"] = "1";
    }
    event.type = word;
    out.push_back(event);
  }
  return out;
}

const std::string kRun = "queued ready:0 assigned:0@a/1 started:0@a/1 step:0=1 step:0=2 ";

TEST(JobHistory, AcceptsValidHistories) {
  EXPECT_EQ(faults_in(history(kRun + "succeeded:0 succeeded")), "");
  EXPECT_EQ(faults_in(history(kRun + "step:0=2 succeeded:0 succeeded")), "");
  EXPECT_EQ(faults_in(history("queued rejected")), "");
  EXPECT_EQ(faults_in(history("queued ready:0 ready:1 canceled:0 canceled:1 canceled")), "");
  EXPECT_EQ(faults_in(history(kRun + "ready:0 assigned:0@b/2 started:0@b/2 step:0=1 succeeded:0 succeeded")), "");
  EXPECT_EQ(faults_in(history(kRun + "delayed:0 ready:0 assigned:0@b/2 started:0@b/2 failed:0 failed")), "");
}

TEST(JobHistory, NamesTheFaultOfInvalidHistories) {
  const auto wrong = [](const std::string& words, const std::string& why) {
    const auto found = faults_in(history(words));
    EXPECT_NE(found.find(why), std::string::npos) << words << "\nresult: " << found;
  };
  wrong("", "never queued");
  wrong(kRun, "has not ended");
  wrong(kRun + "succeeded:0", "has not ended");
  wrong(kRun + "succeeded:0 succeeded succeeded", "after the job had ended");
  wrong(kRun + "succeeded:0 failed:0 failed", "after its unit had ended");
  wrong(kRun + "succeeded", "while unit 0 is started");
  wrong("queued ready:0 ready:1 canceled:0 assigned:1@a/1 started:1@a/1 succeeded:1 succeeded", "not all");
  wrong("queued ready:0 canceled:0 failed", "none of its units");
  wrong("queued ready:0 started:0@a/1", "not assigned");
  wrong("queued ready:0 assigned:0@a/1 started:0@b/1", "is on b");
  wrong("queued ready:0 assigned:0@a/2 started:0@a/1", "is attempt 1");
  wrong("queued ready:0 assigned:0@a/1 step:0=1", "not started");
  wrong("queued ready:0 assigned:0@a/1 succeeded:0", "not started");
  wrong(kRun + "step:0=1", "from step 2 to 1");
  wrong("queued ready:0 ready:0", "twice in a row");
  wrong("queued queued", "not the first");
  wrong("ready:0", "before the job was queued");
  auto backwards = history(kRun + "succeeded:0 succeeded");
  std::swap(backwards[4].id, backwards[5].id);
  EXPECT_NE(faults_in(backwards).find("does not grow"), std::string::npos);
  std::string many = "queued";
  for (int i = 1; i <= 6; ++i)
    many += " ready:0 assigned:0@a/" + std::to_string(i) + " started:0@a/" + std::to_string(i);
  wrong(many, "start number 6");
}

}  // namespace
}  // namespace ditfleet::testing
