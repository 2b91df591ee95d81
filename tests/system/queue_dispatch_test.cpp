// Admission and assignment in one call, on a real Redis.
#include <map>
#include <thread>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;
using queue::CancelOutcome;
using queue::Dispatch;

class QueueDispatch : public QueueTest {
 protected:
  void SetUp() override { lead(); }

  Dispatch dispatch_of(const queue::IntakeEntry& entry, int units = 1) { return {admission(entry, units), {}}; }
  queue::Attempt place(Dispatch& job, int unit, const std::string& owner = "w0:boot0") {
    queue::Attempt attempt{{job.admission.id, unit}, new_nonce()};
    job.placements.push_back({owner, {attempt.ref, attempt.nonce, "warm"}});
    return attempt;
  }
  void submit_together(const std::vector<queue::Submission>& all) {
    const auto outcomes = wait(client_->submit_many(all, soon()));
    ASSERT_TRUE(outcomes.ok());
    for (const auto& outcome : *outcomes) EXPECT_TRUE(outcome.ok());
  }
  std::vector<bool> dispatch(const std::vector<Dispatch>& jobs) {
    auto done = wait(client_->dispatch(epoch_, jobs, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return done ? *done : std::vector<bool>();
  }
  std::vector<queue::MailboxEntry> mail(const std::string& owner = "w0:boot0") {
    auto found = wait(client_->read_mailbox(owner, "0", 100, std::chrono::milliseconds(1)));
    EXPECT_TRUE(found.ok());
    return found ? *found : std::vector<queue::MailboxEntry>();
  }
  // All keys but the intake and the leader's, as text: nothing may have happened.
  std::string stored() {
    std::string out;
    for (const auto& key : {keys_.units(), keys_.open(), keys_.specs(), keys_.last()}) {
      std::map<std::string, std::string> fields;
      const auto flat = redis({"HGETALL", key}).elements;
      for (std::size_t i = 0; i + 1 < flat.size(); i += 2) fields[flat[i].text] = flat[i + 1].text;
      for (const auto& [name, value] : fields) out += name + "=" + value + "\n";
    }
    for (const auto& key : {keys_.ready(), keys_.lease(), keys_.deadline()}) {
      for (const auto& e : redis({"ZRANGE", key, "0", "-1", "WITHSCORES"}).elements) out += e.text + "\n";
    }
    return out + std::to_string(redis({"XLEN", keys_.events()}).integer);
  }
};

TEST_F(QueueDispatch, AJobIsReadyAndAssignedInOneCallAndRunsToItsEnd) {
  auto s = submission("job-1");
  s.tenant = "acme";
  s.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  submit(s);
  Dispatch job = dispatch_of(intake().at(0));
  job.admission.priority = -3;
  job.admission.adapters = {"ink", "wash"};
  const auto attempt = place(job, 0);
  job.placements[0].unit.drop_from_host = {"old"};
  EXPECT_EQ(dispatch({job}), std::vector<bool>{true});

  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
  EXPECT_EQ(redis({"ZCARD", keys_.ready()}).integer, 0);
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer, 1);
  auto record = this->job("job-1");
  EXPECT_EQ(record.state, State::kAssigned);
  EXPECT_EQ(record.unit_records.at(0).owner, "w0:boot0");
  EXPECT_EQ(record.unit_records.at(0).nonce, attempt.nonce);
  EXPECT_GT(record.unit_records.at(0).assigned_ms, 0);
  EXPECT_EQ(record.class_key, "demo/256x256");
  EXPECT_EQ(record.cost_us, 1'000'000);
  const auto messages = mail();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].kind, queue::MailboxEntry::Kind::kAssign);
  EXPECT_EQ(messages[0].ref, attempt.ref);
  EXPECT_EQ(messages[0].nonce, attempt.nonce);
  EXPECT_EQ(messages[0].attempt, 1);
  EXPECT_EQ(messages[0].spec, kSpec);
  EXPECT_EQ(messages[0].tenant, "acme");
  EXPECT_EQ(messages[0].traceparent, s.traceparent);
  EXPECT_EQ(messages[0].class_key, "demo/256x256");
  EXPECT_EQ(messages[0].drop_from_host, std::vector<std::string>{"old"});
  EXPECT_GT(redis({"PTTL", keys_.mailbox("w0:boot0")}).integer, 0);

  // As a restarted scheduler finds it.
  const auto open = wait(client_->open_units(soon()));
  ASSERT_EQ(open->size(), 1u);
  EXPECT_EQ(open->at(0).state, State::kAssigned);
  EXPECT_EQ(open->at(0).priority, -3);
  EXPECT_EQ(open->at(0).adapters, (std::vector<std::string>{"ink", "wash"}));
  EXPECT_EQ(open->at(0).tenant, "acme");

  ASSERT_TRUE(start(attempt).ok());
  EXPECT_EQ(this->job("job-1").unit_records.at(0).attempt, 1);
  EXPECT_EQ(renew(attempt, 9, 28), queue::RenewOutcome::kOk);
  ASSERT_TRUE(complete(attempt).ok());
  EXPECT_EQ(event_types("job-1"), "queued ready:0 assigned:0 started:0 step:0 succeeded:0 succeeded");
  const auto events = wait(client_->events("job-1", "0", 100, soon()));
  EXPECT_EQ(events->at(2).fields.at("worker"), "w0");
  EXPECT_EQ(events->at(2).fields.at("reason"), "warm");
  EXPECT_EQ(events->at(2).fields.at("attempt"), "1");
  EXPECT_EQ(redis({"EXISTS", keys_.units(), keys_.open(), keys_.specs(), keys_.last(), keys_.lease()}).integer, 0);
}

TEST_F(QueueDispatch, UnitsOfOneJobGoToSeveralWorkersAndTheRestIsReady) {
  submit(submission("four"));
  submit(submission("one"));
  const auto entries = intake();
  std::vector<Dispatch> jobs{dispatch_of(entries.at(0), 4), dispatch_of(entries.at(1))};
  std::vector<queue::Attempt> attempts;
  for (const auto& [unit, owner] : {std::pair{3, "w1:b"}, {0, "w0:b"}, {1, "w1:b"}})
    attempts.push_back(place(jobs[0], unit, owner));
  attempts.push_back(place(jobs[1], 0, "w0:b"));
  EXPECT_EQ(dispatch(jobs), (std::vector{true, true}));

  EXPECT_EQ(mail("w0:b").size(), 2u);
  EXPECT_EQ(mail("w1:b").size(), 2u);
  EXPECT_EQ(redis({"ZRANGE", keys_.ready(), "0", "-1"}).elements.at(0).text, "four:2");
  EXPECT_EQ(redis({"ZCARD", keys_.ready()}).integer, 1);
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer, 4);
  const auto record = job("four");
  ASSERT_EQ(record.unit_records.size(), 4u);
  EXPECT_EQ(record.unit_records[0].owner, "w0:b");
  EXPECT_EQ(record.unit_records[1].owner, "w1:b");
  EXPECT_EQ(record.unit_records[2].state, State::kReady);
  EXPECT_EQ(record.unit_records[3].owner, "w1:b");
  EXPECT_EQ(event_types("four"), "queued ready:0 ready:1 ready:2 ready:3 assigned:0 assigned:1 assigned:3");

  attempts.push_back(assign("four", 2, "w0:b"));  // the rest as ever
  for (const auto& attempt : attempts) {
    ASSERT_TRUE(start(attempt).ok()) << attempt.ref.job << ":" << attempt.ref.unit;
    ASSERT_TRUE(complete(attempt).ok());
  }
  EXPECT_EQ(job("four").state, State::kSucceeded);
  EXPECT_EQ(job("one").state, State::kSucceeded);
  EXPECT_EQ(event_types("one"), "queued ready:0 assigned:0 started:0 succeeded:0 succeeded");
  EXPECT_EQ(
      redis({"EXISTS", keys_.units(), keys_.open(), keys_.specs(), keys_.last(), keys_.lease(), keys_.ready()}).integer,
      0);
}

TEST_F(QueueDispatch, AJobThatIsNotQueuedAnyMoreIsLeftAlone) {
  submit(submission("canceled"));
  submit(submission("admitted"));
  submit(submission("good"));
  const auto entries = intake();
  EXPECT_EQ(*wait(client_->cancel("canceled", "", soon())), CancelOutcome::kCanceled);
  const auto before = admission(entries.at(1));
  ASSERT_TRUE(wait(client_->admit(epoch_, std::span(&before, 1), soon())).ok());
  std::vector<Dispatch> jobs;
  for (const auto& entry : entries) place(jobs.emplace_back(dispatch_of(entry)), 0);
  auto never = admission(entries.at(2));
  never.id = "never-submitted";
  place(jobs.emplace_back(Dispatch{never, {}}), 0);
  jobs.push_back(jobs[2]);  // twice in one call
  EXPECT_EQ(dispatch(jobs), (std::vector{false, false, true, false, false}));
  EXPECT_EQ(job("canceled").state, State::kCanceled);
  EXPECT_EQ(event_types("canceled"), "queued canceled");
  EXPECT_EQ(job("admitted").state, State::kReady);
  EXPECT_EQ(event_types("admitted"), "queued ready:0");
  EXPECT_EQ(event_types("good"), "queued ready:0 assigned:0");
  EXPECT_EQ(mail().size(), 1u);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);

  // Again, as after an answer that was lost: nothing changes.
  const auto was = stored();
  EXPECT_EQ(dispatch({jobs[2]}), std::vector{false});
  EXPECT_EQ(stored(), was);
  EXPECT_EQ(mail().size(), 1u);
}

// Several jobs submitted in one call are one entry of the intake, which stays until each of them has been seen to.
TEST_F(QueueDispatch, WhatWasSubmittedTogetherWaitsInOneEntry) {
  std::vector<queue::Submission> all;
  for (const char* id : {"a", "b", "c", "d", "e"}) {
    all.push_back(submission(id));
    all.back().spec = R"({"model":"demo","prompt":")" + std::string(id) + R"("})";
  }
  all[1].tenant = "acme";
  all[2].traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  submit_together(all);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);
  EXPECT_EQ(job("d").spec, all[3].spec);
  const auto page = wait(client_->list("", std::nullopt, 10, "", soon()));
  EXPECT_EQ(page->jobs.size(), 5u);
  for (const auto& listed : page->jobs) {
    EXPECT_EQ(listed.spec, R"({"model":"demo","prompt":")" + listed.id + R"("})");
  }
  // One is canceled while it waits: the others stay.
  EXPECT_EQ(*wait(client_->cancel("d", "", soon())), CancelOutcome::kCanceled);
  EXPECT_EQ(job("d").spec, all[3].spec);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);

  auto entries = intake();
  ASSERT_EQ(entries.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(entries[i].id, all[i].id);
    EXPECT_EQ(entries[i].spec, all[i].spec);
    EXPECT_EQ(entries[i].tenant, all[i].tenant);
    EXPECT_EQ(entries[i].traceparent, all[i].traceparent);
    EXPECT_FALSE(entries[i].raw);
  }
  EXPECT_TRUE(intake().empty());
  // Admitted, dispatched and rejected, each by a call of its own.
  const auto first = admission(entries[0]);
  ASSERT_TRUE(wait(client_->admit(epoch_, std::span(&first, 1), soon())).ok());
  auto second = dispatch_of(entries[1]);
  place(second, 0);
  EXPECT_EQ(dispatch({second}), std::vector{true});
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);

  // Another leader, before the rest was seen to: it reads all, and finds what is admitted admitted.
  client_->rewind_intake();
  entries = intake();
  ASSERT_EQ(entries.size(), 5u);
  std::vector<Dispatch> again;
  for (const std::size_t i : {0, 1, 3, 4}) place(again.emplace_back(dispatch_of(entries[i])), 0);
  EXPECT_EQ(dispatch(again), (std::vector{false, false, false, true}));
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);
  const queue::Rejection rejection{entries[2].entry_id, "c", invalid_argument("no"), false, "default",
                                   entries[2].spec,     {}};
  ASSERT_TRUE(wait(client_->reject(epoch_, std::span(&rejection, 1), soon())).ok());
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);

  EXPECT_EQ(job("a").state, State::kReady);
  EXPECT_EQ(job("b").state, State::kAssigned);
  EXPECT_EQ(job("b").tenant, "acme");
  EXPECT_EQ(job("c").state, State::kRejected);
  EXPECT_EQ(job("c").spec, all[2].spec);
  EXPECT_EQ(job("d").state, State::kCanceled);
  EXPECT_EQ(job("e").state, State::kAssigned);
  EXPECT_GT(job("e").created_ms, 0);
  EXPECT_EQ(mail().size(), 2u);
}

TEST_F(QueueDispatch, ADeadlineOfOneSubmittedWithOthersTakesThatOneAlone) {
  std::vector<queue::Submission> all{submission("late"), submission("patient")};
  all[0].deadline_in_ms = 50;
  submit_together(all);
  for (int i = 0; i < 200 && job("late").state != State::kExpired; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    reap();
  }
  EXPECT_EQ(job("late").state, State::kExpired);
  EXPECT_EQ(job("late").spec, kSpec);
  EXPECT_EQ(job("patient").state, State::kQueued);
  EXPECT_EQ(intake().size(), 2u);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);
}

TEST_F(QueueDispatch, LongSpecsAreNotOneEntry) {
  std::vector<queue::Submission> all;
  for (int i = 0; i < 5; ++i) {
    all.push_back(submission("long-" + std::to_string(i)));
    all.back().spec = R"({"model":"demo","prompt":")" + std::string(40'000, 'x') + R"("})";
  }
  submit_together(all);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 3);
  EXPECT_EQ(intake().size(), 5u);
  EXPECT_EQ(job("long-4").spec, all[4].spec);
}

TEST_F(QueueDispatch, AnEntryOfAnotherJobDispatchesNothing) {
  submit(submission("a"));
  submit(submission("b"));
  const auto entries = intake();
  auto job = dispatch_of(entries.at(0));
  place(job, 0);
  job.admission.entry_id = "1-1";
  EXPECT_EQ(dispatch({job}), std::vector{false});
  for (const char* id : {"a", "b"}) EXPECT_EQ(event_types(id), "queued") << id;
  EXPECT_EQ(this->job("x-1-1").state, State::kRejected);  // whoever added it is told
  EXPECT_TRUE(mail().empty());
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 2);
}

TEST_F(QueueDispatch, AnotherEpochThanTheLeadersChangesNothing) {
  submit(submission("job-1"));
  auto job = dispatch_of(intake().at(0));
  place(job, 0);
  const auto was = stored();
  for (const std::int64_t epoch : {epoch_ - 1, epoch_ + 1}) {
    const auto done = wait(client_->dispatch(epoch, std::span(&job, 1), soon()));
    ASSERT_FALSE(done.ok());
    EXPECT_EQ(done.error().code, Code::kConflict);
  }
  EXPECT_EQ(stored(), was);
  EXPECT_TRUE(mail().empty());
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);
  EXPECT_EQ(dispatch({job}), std::vector{true});
}

TEST_F(QueueDispatch, ACallOfAnotherShapeIsRefusedWhole) {
  submit(submission("job-1"));
  const auto entry = intake().at(0);
  const auto was = stored();
  const std::vector<std::string> keys = {keys_.leader(), keys_.in(),     keys_.ready(),        keys_.deadline(),
                                         keys_.lease(),  keys_.units(),  keys_.open(),         keys_.specs(),
                                         keys_.last(),   keys_.events(), keys_.mailbox("w0:b")};
  const std::string epoch = std::to_string(epoch_);
  const std::vector<std::string> good = {
      entry.entry_id, "job-1", "1", kSpec, "1|0|0", "c|b", "1", "0", "1", "nonce", "\"worker\":\"w0\"", ""};
  const auto call = [&](std::vector<std::string> arguments, std::size_t count) {
    redis::Command command("FCALL");
    command << "ditfleet_v1_dispatch" << static_cast<std::int64_t>(count);
    for (std::size_t i = 0; i < count; ++i) command << keys.at(i);
    for (const auto& a : arguments) command << a;
    return wait(connection_->execute(command, soon()));
  };
  const auto with = [&](std::vector<std::string> head, std::vector<std::string> rest) {
    head.insert(head.end(), rest.begin(), rest.end());
    return head;
  };
  const std::vector<std::string> head = {epoch, "5000", "60000", "1", "w0:b"};
  auto many = good, word = good, stray = good;
  many[6] = "2";
  word[6] = "x";
  stray[8] = "2";  // there is one owner
  auto no_number = good;
  no_number[2] = "x";
  auto short_one = good;
  short_one.pop_back();
  for (const auto& bad : {with(head, many),
                          with(head, word),
                          with(head, short_one),
                          with(head, stray),
                          with(head, no_number),
                          with({epoch, "5000", "60000", "2", "w0:b"}, good),
                          with({epoch, "x", "60000", "1", "w0:b"}, good),
                          {epoch}}) {
    const auto reply = call(bad, 11);
    ASSERT_FALSE(reply.ok()) << bad.size();
    EXPECT_NE(reply.error().message.find("BADARG"), std::string::npos) << reply.error().message;
  }
  EXPECT_FALSE(call(with(head, good), 10).ok());
  EXPECT_EQ(stored(), was);
  EXPECT_TRUE(call(with(head, good), 11).ok());
  EXPECT_EQ(job("job-1").state, State::kAssigned);
}

TEST_F(QueueDispatch, ItsLeasesLapseAndItsDeadlinesExpire) {
  options_.lease_ms = 200;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  auto s = submission("late");
  s.deadline_in_ms = 1500;
  submit(s);
  submit(submission("lost"));
  const auto entries = intake();
  std::vector<Dispatch> jobs{dispatch_of(entries.at(0), 2), dispatch_of(entries.at(1))};
  place(jobs[0], 0);
  const auto lost = place(jobs[1], 0);
  reap();  // knows this Redis' run from here on
  EXPECT_EQ(dispatch(jobs), (std::vector{true, true}));
  std::this_thread::sleep_for(std::chrono::milliseconds(260));
  EXPECT_GE(reap(), 2);  // both leases
  EXPECT_EQ(job("lost").state, State::kReady);
  EXPECT_FALSE(start(lost).ok());
  EXPECT_EQ(event_types("lost"), "queued ready:0 assigned:0 ready:0");
  for (int i = 0; i < 100 && job("late").state != State::kExpired; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    reap();
  }
  EXPECT_EQ(job("late").state, State::kExpired);
  EXPECT_EQ(redis({"ZCARD", keys_.deadline()}).integer, 0);
}

TEST_F(QueueDispatch, ManyUnitsOnOneWorkerAndNoneAtAll) {
  submit(submission("big"));
  submit(submission("none"));
  const auto entries = intake();
  std::vector<Dispatch> jobs{dispatch_of(entries.at(0), 1024), dispatch_of(entries.at(1), 3)};
  for (int i = 0; i < 1024; ++i) place(jobs[0], i);
  EXPECT_EQ(dispatch(jobs), (std::vector{true, true}));
  EXPECT_EQ(mail().size(), 1024u);  // in more entries than one
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer, 1024);
  EXPECT_EQ(redis({"ZCARD", keys_.ready()}).integer, 3);
  EXPECT_EQ(dispatch({}), std::vector<bool>());
}

TEST_F(QueueDispatch, ACancelBehindItReachesTheWorker) {
  submit(submission("job-1"));
  auto job = dispatch_of(intake().at(0));
  const auto attempt = place(job, 0);
  EXPECT_EQ(dispatch({job}), std::vector{true});
  EXPECT_EQ(*wait(client_->cancel("job-1", "", soon())), CancelOutcome::kCanceled);  // it had not started
  EXPECT_FALSE(start(attempt).ok());
  const auto messages = mail();
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[1].kind, queue::MailboxEntry::Kind::kCancel);
  EXPECT_EQ(event_types("job-1"), "queued ready:0 assigned:0 canceled:0 canceled");
}

}  // namespace
}  // namespace ditfleet::testing
