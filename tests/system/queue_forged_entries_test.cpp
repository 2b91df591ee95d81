// Plain XADD entries that say what only the queue itself says: entries that look like those of `submit`, and ids that
// no clock gave.
#include <chrono>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;

class QueueForgedEntries : public QueueTest {
 protected:
  // XADD to the intake; the id of the entry.
  std::string add(std::vector<std::string> fields, const std::string& id = "*") {
    fields.insert(fields.begin(), {"XADD", keys_.in(), id});
    return redis(fields).text;
  }
};

TEST_F(QueueForgedEntries, AnEntryThatLooksSubmittedIsRejectedUnderItsOwnId) {
  const std::string id = submit(submission("real"));
  // One names no job, one names another's, one has its fields twice, and one is rejected for its spec.
  const auto unknown = add({"submitted", "mine default 0", "spec", kSpec, "traceparent", ""});
  const auto another =
      add({"submitted", id + " default 0", "spec", R"({"model":"demo","prompt":"another"})", "traceparent", ""});
  const auto two = add({"submitted", "a default 0", "spec", kSpec, "traceparent", "", "submitted", id + " default 0",
                        "spec", kSpec, "traceparent", ""});
  const auto bad = add({"submitted", "mine default 0", "spec", "{"});
  const auto after = add({"spec", kSpec, "id", "after"});
  lead();
  auto entries = intake();
  ASSERT_EQ(entries.size(), 6u);
  const queue::Rejection wrong{bad, "mine", invalid_argument("broken JSON"), false, "default", "{", {}};
  ASSERT_TRUE(wait(client_->reject(epoch_, std::span(&wrong, 1), soon())).ok());
  const std::vector<queue::Admission> rest = {admission(entries[1]), admission(entries[0]), admission(entries[2]),
                                              admission(entries[3]), admission(entries[5])};
  const auto done = wait(client_->admit(epoch_, rest, soon()));
  ASSERT_TRUE(done.ok()) << done.error().message;
  EXPECT_EQ(job(id).state, State::kReady);
  EXPECT_EQ(job(id).spec, kSpec);
  EXPECT_EQ(job("after").state, State::kReady);
  for (const std::string& told : {"x-" + unknown, "x-" + another, "x-" + two, "x-" + bad}) {
    ASSERT_EQ(job(told).state, State::kRejected) << told;
    EXPECT_NE(job(told).error->message.find("'submitted', which only the Function ditfleet_v3_submit writes"),
              std::string::npos)
        << told << job(told).error->message;
    EXPECT_EQ(event_types(told), "queued rejected") << told;
  }
  EXPECT_FALSE(wait(client_->job("mine", "", soon())).ok());
  EXPECT_EQ(event_types(id), "queued ready:0");
  // Nothing is left in the intake.
  client_->rewind_intake();
  EXPECT_TRUE(intake().empty());
}

// A leader may have read an entry before the job was canceled.
TEST_F(QueueForgedEntries, AnEntryWhoseJobHasEndedIsDropped) {
  for (const char* id : {"one", "two"}) submit(submission(id));
  lead();
  const auto entries = intake();
  ASSERT_EQ(entries.size(), 2u);
  const std::vector<queue::Admission> all = {admission(entries[0]), admission(entries[1])};
  ASSERT_TRUE(wait(client_->admit(epoch_, std::span(all).first(1), soon())).ok());
  ASSERT_TRUE(wait(client_->cancel("one", "", soon())).ok());
  ASSERT_TRUE(wait(client_->admit(epoch_, all, soon())).ok());
  EXPECT_EQ(job("one").state, State::kCanceled);
  EXPECT_EQ(job("two").state, State::kReady);
  EXPECT_EQ(event_types("one"), "queued ready:0 canceled:0 canceled");
  EXPECT_EQ(redis({"ZCARD", keys_.jobs()}).integer, 2);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
}

TEST_F(QueueForgedEntries, AnIdOfTheFutureIsAJobOfNow) {
  const auto now_ms = [] {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
        .count();
  };
  const auto began = now_ms();
  const auto future = add({"spec", kSpec}, "99999999999999-7");
  const auto bad = add({"spec", "{", "idempotency_key", std::string(256, 'k')});  // by *, behind it
  const std::string submitted = submit();
  lead();
  auto entries = intake();
  ASSERT_EQ(entries.size(), 3u);
  for (const auto& e : entries) {
    EXPECT_GE(e.created_ms, began);
    EXPECT_LE(e.created_ms, now_ms());
  }
  const std::vector<queue::Admission> good = {admission(entries[0]), admission(entries[2])};
  ASSERT_TRUE(wait(client_->admit(epoch_, good, soon())).ok());
  const queue::Rejection r{bad, entries[1].id, invalid_argument("no"), true, "default", "{", {}};
  ASSERT_TRUE(wait(client_->reject(epoch_, std::span(&r, 1), soon())).ok());
  EXPECT_EQ(job("x-" + future).state, State::kReady);
  EXPECT_EQ(job("x-" + bad).state, State::kRejected);
  EXPECT_EQ(job(submitted).state, State::kReady);
  for (const std::string& id : {"x-" + future, "x-" + bad, submitted}) {
    EXPECT_GE(job(id).created_ms, began) << id;
    EXPECT_LE(job(id).created_ms, now_ms()) << id;
    // What the index says is what `sweep` goes by.
    EXPECT_LE(std::stoll(redis({"ZSCORE", keys_.jobs(), id}).text), now_ms()) << id;
  }
}

TEST_F(QueueForgedEntries, TheLastIdThereIsIsRejectedAndOthersFollow) {
  const std::string last = "18446744073709551615-18446744073709551615";
  const auto before = add({"spec", kSpec, "id", "before"});
  lead();
  const auto used = [&] { return (*wait(client_->use(soon())))["default"].units; };
  for (int again = 0; again < 2; ++again) {
    ASSERT_EQ(add({"spec", kSpec}, last), last);
    const auto used_before = used();
    // Nothing can be added now; a key that is used meanwhile is not used up.
    auto s = submission();
    s.idempotency_key = "once-" + std::to_string(again);
    auto refused = wait(client_->submit(s, soon()));
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kUnavailable) << refused.error().message;
    EXPECT_EQ(wait(client_->job(s.id, "", soon())).error().code, Code::kNotFound);
    EXPECT_EQ(used(), used_before) << "a refused job takes nothing of its tenant's quota";
    auto entries = intake();
    ASSERT_EQ(entries.size(), again == 0 ? 2u : 1u);
    const auto& bad = entries.back();
    EXPECT_NE(bad.problem.find("use * as the id"), std::string::npos) << bad.problem;
    const queue::Rejection r{bad.entry_id, bad.id, invalid_argument(bad.problem), bad.raw, bad.tenant, bad.spec, {}};
    ASSERT_TRUE(wait(client_->reject(epoch_, std::span(&r, 1), soon())).ok());
    EXPECT_EQ(job("x-" + last).state, State::kRejected);
    // `before`, which waits still, is read again, as after a reconnect.
    EXPECT_EQ(submit(s), s.id);
    const auto next = add({"spec", kSpec});
    EXPECT_LT(next, "9");
    EXPECT_GT(next, before);
    entries = intake();
    ASSERT_EQ(entries.size(), again == 0 ? 3u : 2u);
    std::vector<queue::Admission> all;
    for (const auto& e : entries) all.push_back(admission(e));
    ASSERT_TRUE(wait(client_->admit(epoch_, all, soon())).ok());
    EXPECT_EQ(job("before").state, State::kReady);
    EXPECT_EQ(job(s.id).state, State::kReady);
    EXPECT_EQ(job("x-" + next).state, State::kReady);
    EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
  }
}

}  // namespace
}  // namespace ditfleet::testing
