// Admission and assignment on a real Redis: one job, many units, several workers, jobs that are gone.
#include <map>
#include <set>
#include <thread>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;
using queue::CancelOutcome;

class QueueAssign : public QueueTest {
 protected:
  void SetUp() override { lead(); }

  Result<void> admit(const std::vector<queue::Admission>& admissions) {
    return wait(client_->admit(epoch_, admissions, soon()));
  }
  std::vector<bool> assign_units(const std::string& owner, const std::vector<queue::AssignRequest>& units) {
    auto done = wait(client_->assign(epoch_, owner, units, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return done ? *done : std::vector<bool>();
  }
  std::vector<queue::MailboxEntry> mail(const std::string& owner = "w0:boot0") {
    auto found = wait(client_->read_mailbox(owner, "0", 100, std::chrono::milliseconds(1)));
    EXPECT_TRUE(found.ok());
    return found ? *found : std::vector<queue::MailboxEntry>();
  }
  // All keys but the intake and the leader's, as text.
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

TEST_F(QueueAssign, AnAssignmentCarriesEverythingAboutTheJob) {
  auto s = submission("job-1");
  s.tenant = "acme";
  s.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  submit(s);
  auto admitted = admission(intake().at(0));
  admitted.priority = -3;
  admitted.adapters = {"ink", "wash"};
  ASSERT_TRUE(admit({admitted}).ok());
  const queue::Attempt attempt{{"job-1", 0}, new_nonce()};
  EXPECT_EQ(assign_units("w0:boot0", {{attempt.ref, attempt.nonce, "warm", {"old"}}}), std::vector<bool>{true});

  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
  EXPECT_EQ(redis({"ZCARD", keys_.ready()}).integer, 0);
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer, 1);
  auto record = job("job-1");
  EXPECT_EQ(record.state, State::kAssigned);
  EXPECT_EQ(record.unit_records.at(0).owner, "w0:boot0");
  EXPECT_EQ(record.unit_records.at(0).nonce, attempt.nonce);
  EXPECT_GT(record.unit_records.at(0).assigned_ms, 0);
  EXPECT_EQ(record.class_key, "demo/256x256x1/none/64/fp32");
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
  EXPECT_EQ(messages[0].class_key, "demo/256x256x1/none/64/fp32");
  EXPECT_EQ(messages[0].drop_from_host, std::vector<std::string>{"old"});
  EXPECT_GT(redis({"PTTL", keys_.mailbox("w0:boot0")}).integer, 0);

  // As a restarted scheduler finds it.
  const auto open = wait(client_->open_units(std::chrono::seconds(10)));
  ASSERT_EQ(open->size(), 1u);
  EXPECT_EQ(open->at(0).state, State::kAssigned);
  EXPECT_EQ(open->at(0).priority, -3);
  EXPECT_EQ(open->at(0).adapters, (std::vector<std::string>{"ink", "wash"}));
  EXPECT_EQ(open->at(0).tenant, "acme");

  ASSERT_TRUE(start(attempt).ok());
  EXPECT_EQ(job("job-1").unit_records.at(0).attempt, 1);
  EXPECT_EQ(renew(attempt, 9, 28), queue::RenewOutcome::kOk);
  ASSERT_TRUE(complete(attempt).ok());
  EXPECT_EQ(event_types("job-1"), "queued ready:0 assigned:0 started:0 step:0 succeeded:0 succeeded");
  const auto events = wait(client_->events("job-1", "0", 100, soon()));
  EXPECT_EQ(events->at(2).fields.at("worker"), "w0");
  EXPECT_EQ(events->at(2).fields.at("reason"), "warm");
  EXPECT_EQ(events->at(2).fields.at("attempt"), "1");
  EXPECT_EQ(redis({"EXISTS", keys_.units(), keys_.open(), keys_.specs(), keys_.last(), keys_.lease()}).integer, 0);
}

TEST_F(QueueAssign, UnitsOfOneJobRunOnSeveralWorkers) {
  submit(submission("four"));
  submit(submission("one"));
  const auto entries = intake();
  ASSERT_TRUE(admit({admission(entries.at(0), 4), admission(entries.at(1))}).ok());
  std::vector<queue::Attempt> attempts;
  for (const auto& [unit, owner] : {std::pair{3, "w1:b"}, {0, "w0:b"}, {1, "w1:b"}})
    attempts.push_back(assign("four", unit, owner));
  attempts.push_back(assign("one", 0, "w0:b"));

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
  EXPECT_EQ(event_types("four"), "queued ready:0 ready:1 ready:2 ready:3 assigned:3 assigned:0 assigned:1");

  attempts.push_back(assign("four", 2, "w0:b"));
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

// The scheduler sends an admission and the assignments of its units without waiting in between.
TEST_F(QueueAssign, AJobWithAFailedUnitFails) {
  const auto poison = running(2);
  const std::string& id = poison.ref.job;
  const auto last = assign(id, 1);
  ASSERT_TRUE(start(last).ok());
  const queue::Failure failure{.attempt = poison, .error = {Code::kInvalidArgument, "[test] poison"}};
  ASSERT_TRUE(wait(client_->fail(failure, soon())).ok());
  EXPECT_EQ(job(id).state, State::kRunning);
  ASSERT_TRUE(complete(last).ok());
  EXPECT_EQ(job(id).state, State::kFailed);
  EXPECT_EQ(job(id).error->message, "[test] poison");
}

TEST_F(QueueAssign, CallsOutstandingOnOneConnectionRunInTheirOrder) {
  submit(submission("job-1"));
  const std::vector<queue::Admission> admissions{admission(intake().at(0), 2)};
  const std::vector<queue::AssignRequest> first{{{"job-1", 0}, "n0", "warm"}}, second{{{"job-1", 1}, "n1", "warm"}};
  int done = 0;
  std::vector<bool> assigned;
  asio::co_spawn(
      io_,
      [&]() -> asio::awaitable<void> {
        EXPECT_TRUE((co_await client_->admit(epoch_, admissions, soon())).ok());
        ++done;
      },
      asio::detached);
  for (const auto* units : {&first, &second}) {
    asio::co_spawn(
        io_,
        [&, units]() -> asio::awaitable<void> {
          const auto result = co_await client_->assign(epoch_, "w0:boot0", *units, soon());
          EXPECT_TRUE(result.ok());
          assigned.push_back(result.ok() && result->at(0));
          ++done;
        },
        asio::detached);
  }
  io_.restart();
  while (done < 3 && io_.run_one() > 0) {
  }
  EXPECT_EQ(assigned, (std::vector{true, true}));
  EXPECT_EQ(event_types("job-1"), "queued ready:0 ready:1 assigned:0 assigned:1");
}

TEST_F(QueueAssign, AJobThatIsNotQueuedAnyMoreIsLeftAlone) {
  for (const char* id : {"canceled", "admitted", "good"}) submit(submission(id));
  const auto entries = intake();
  EXPECT_EQ(*wait(client_->cancel("canceled", "", soon())), CancelOutcome::kCanceled);
  ASSERT_TRUE(admit({admission(entries.at(1))}).ok());
  std::vector<queue::Admission> all;
  for (const auto& entry : entries) all.push_back(admission(entry));
  all.push_back(all[2]);  // twice in one call
  ASSERT_TRUE(admit(all).ok());
  std::vector<queue::AssignRequest> units;
  for (const char* id : {"canceled", "good", "never-submitted", "good"}) units.push_back({{id, 0}, new_nonce(), ""});
  EXPECT_EQ(assign_units("w0:boot0", units), (std::vector{false, true, false, false}));
  EXPECT_EQ(job("canceled").state, State::kCanceled);
  EXPECT_EQ(event_types("canceled"), "queued canceled");
  EXPECT_EQ(job("admitted").state, State::kReady);
  EXPECT_EQ(event_types("admitted"), "queued ready:0");
  EXPECT_EQ(event_types("good"), "queued ready:0 assigned:0");
  EXPECT_EQ(mail().size(), 1u);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);

  // Repeated, as after a reply that was lost: nothing changes.
  const auto before = stored();
  ASSERT_TRUE(admit({all[2]}).ok());
  EXPECT_EQ(assign_units("w0:boot0", {units[1]}), std::vector{false});
  EXPECT_EQ(stored(), before);
  EXPECT_EQ(mail().size(), 1u);
}

TEST_F(QueueAssign, AnEntryOfAnotherJobAdmitsNothing) {
  submit(submission("a"));
  submit(submission("b"));
  auto wrong = admission(intake().at(0));
  wrong.entry_id = "1-1";
  ASSERT_TRUE(admit({wrong}).ok());
  for (const char* id : {"a", "b"}) EXPECT_EQ(event_types(id), "queued") << id;
  EXPECT_EQ(job("x-1-1").state, State::kRejected);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 2);
}

TEST_F(QueueAssign, AnotherEpochThanTheLeadersChangesNothing) {
  submit(submission("job-1"));
  const std::vector<queue::Admission> admissions{admission(intake().at(0))};
  const std::vector<queue::AssignRequest> units{{{"job-1", 0}, new_nonce(), "warm"}};
  const auto before = stored();
  for (const std::int64_t epoch : {epoch_ - 1, epoch_ + 1}) {
    const auto admitted = wait(client_->admit(epoch, admissions, soon()));
    ASSERT_FALSE(admitted.ok());
    EXPECT_EQ(admitted.error().code, Code::kConflict);
    const auto assigned = wait(client_->assign(epoch, "w0:boot0", units, soon()));
    ASSERT_FALSE(assigned.ok());
    EXPECT_EQ(assigned.error().code, Code::kConflict);
  }
  EXPECT_EQ(stored(), before);
  EXPECT_TRUE(mail().empty());
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 1);
  ASSERT_TRUE(admit(admissions).ok());
  EXPECT_EQ(assign_units("w0:boot0", units), std::vector{true});
}

// Its end costs no unit a lapse, whether the assignment comes just before it or just after.
TEST_F(QueueAssign, AWorkerThatLeavesReleasesWhatItHasNotReadAndGetsNothingMore) {
  auto s = submission("job-1");
  s.units = 2;
  submit(s);
  queue::Admission a = admission(intake().at(0));
  a.units = 2;
  const std::vector<queue::Admission> admissions{a};
  ASSERT_TRUE(admit(admissions).ok());
  const std::vector<queue::AssignRequest> first{{{"job-1", 0}, new_nonce(), "warm"}},
      second{{{"job-1", 1}, new_nonce(), "warm"}};
  ASSERT_EQ(assign_units("w0:boot0", first), std::vector{true});
  ASSERT_TRUE(wait(client_->deregister("w0", "boot0", soon())).ok());
  EXPECT_EQ(assign_units("w0:boot0", second), std::vector{false});
  const auto open = wait(client_->open_units(std::chrono::seconds(1)));
  ASSERT_TRUE(open.ok());
  for (const auto& view : *open) {
    EXPECT_EQ(view.state, job::State::kReady) << view.ref.unit;
    EXPECT_EQ(view.lapses, 0);
  }
  EXPECT_EQ(assign_units("w0:boot1", second), std::vector{true}) << "another run of the worker";
}

TEST_F(QueueAssign, LeasesLapseAndDeadlinesExpire) {
  options_.lease_ms = 200;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  auto s = submission("late");
  s.deadline_in_ms = 1500;
  submit(s);
  submit(submission("lost"));
  const auto entries = intake();
  reap();  // the first call after a restart starts the grace of this Redis
  ASSERT_TRUE(admit({admission(entries.at(0), 2), admission(entries.at(1))}).ok());
  assign("late", 0);
  const auto lost = assign("lost", 0);
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

TEST_F(QueueAssign, AnEpochThatWasLostIsNotGivenAgain) {
  lead();
  const auto lost = epoch_;
  ASSERT_TRUE(wait(client_->resign("coordinator-1", lost, soon())).ok());
  redis({"SET", keys_.epoch(), std::to_string(lost - 1)});  // as a power failure leaves it
  const auto now_ms = [&] {
    const auto time = redis({"TIME"});
    return std::stoll(time.elements.at(0).text) * 1000 + std::stoll(time.elements.at(1).text) / 1000;
  };
  while (now_ms() == lost) {  // a restart takes longer
  }
  lead();
  EXPECT_GT(epoch_, lost);
  // A clock that was set back does not matter.
  ASSERT_TRUE(wait(client_->resign("coordinator-1", epoch_, soon())).ok());
  redis({"SET", keys_.epoch(), std::to_string(epoch_ + 1'000'000)});
  const auto before = epoch_;
  lead();
  EXPECT_EQ(epoch_, before + 1'000'001);
}

TEST_F(QueueAssign, LongSpecsAreCutIntoSeveralCallsAndEntries) {
  constexpr int kJobs = 24;
  std::vector<std::string> ids;
  for (int i = 0; i < kJobs; ++i) {
    auto s = submission();
    s.spec = R"({"prompt":")" + std::string(300'000, 'x') + "\"}";
    ids.push_back(submit(s));
  }
  lead();
  std::vector<queue::Admission> all;
  for (const auto& entry : intake()) all.push_back(admission(entry));
  redis({"CONFIG", "RESETSTAT"});
  ASSERT_TRUE(admit(all).ok());
  const auto stats = redis({"INFO", "commandstats"}).text;
  EXPECT_NE(stats.find("cmdstat_fcall:calls=8,"), std::string::npos) << stats;  // three fit into 1 MiB
  std::vector<queue::AssignRequest> units;
  for (const auto& id : ids) units.push_back({{id, 0}, new_nonce(), "warm"});
  EXPECT_EQ(assign_units("w0:boot0", units), std::vector<bool>(kJobs, true));
  const auto entries = redis({"XRANGE", keys_.mailbox("w0:boot0"), "-", "+"});
  EXPECT_GE(entries.elements.size(), 5u);
  for (const auto& entry : entries.elements) {
    std::size_t bytes = 0;
    for (const auto& field : entry.elements.at(1).elements) bytes += field.text.size();
    EXPECT_LT(bytes, std::size_t{1'500'000});
  }
  EXPECT_EQ(mail().size(), static_cast<std::size_t>(kJobs));
}

TEST_F(QueueAssign, OpenUnitsAreReadInPagesAndWithoutTheirSpecs) {
  constexpr int kJobs = 120, kUnits = 25;
  for (int i = 0; i < kJobs; ++i) submit();
  for (int batch = 0; batch < 2; ++batch) admit_all(kUnits);
  redis({"DEL", keys_.specs()});
  redis({"CONFIG", "RESETSTAT"});
  const auto open = wait(client_->open_units(std::chrono::seconds(10)));
  ASSERT_TRUE(open.ok());
  std::set<queue::UnitRef> seen;
  for (const auto& view : *open) {
    seen.insert(view.ref);
    EXPECT_EQ(view.model, "demo");
    EXPECT_EQ(view.steps, 20);
    EXPECT_EQ(view.tenant, "default");
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(kJobs * kUnits));
  EXPECT_EQ(open->size(), seen.size());
  const auto stats = redis({"INFO", "commandstats"}).text;
  EXPECT_EQ(stats.find("cmdstat_hgetall"), std::string::npos) << stats;
}

TEST_F(QueueAssign, AJobOfManyUnitsFitsOneWorker) {
  submit(submission("big"));
  submit(submission("ready"));
  const auto entries = intake();
  ASSERT_TRUE(admit({admission(entries.at(0), 1024), admission(entries.at(1), 3)}).ok());
  std::vector<queue::AssignRequest> units;
  for (int i = 0; i < 1024; ++i) units.push_back({{"big", i}, new_nonce(), ""});
  EXPECT_EQ(assign_units("w0:boot0", units), std::vector<bool>(1024, true));
  EXPECT_EQ(mail().size(), 1024u);  // in several mailbox entries
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer, 1024);
  EXPECT_EQ(redis({"ZCARD", keys_.ready()}).integer, 3);
  EXPECT_EQ(assign_units("w0:boot0", {}), std::vector<bool>());
}

TEST_F(QueueAssign, ACancelReachesTheWorkerOfAnAssignedUnit) {
  submit(submission("job-1"));
  admit_all();
  const auto attempt = assign("job-1");
  EXPECT_EQ(*wait(client_->cancel("job-1", "", soon())), CancelOutcome::kCanceled);  // it had not started
  EXPECT_FALSE(start(attempt).ok());
  const auto messages = mail();
  ASSERT_EQ(messages.size(), 2u);
  EXPECT_EQ(messages[1].kind, queue::MailboxEntry::Kind::kCancel);
  EXPECT_EQ(event_types("job-1"), "queued ready:0 assigned:0 canceled:0 canceled");
}

TEST_F(QueueAssign, TheDepthCountsWhatWaits) {
  submit(submission("queued"));
  redis({"XADD", keys_.in(), "*", "spec", kSpec});
  const auto before = wait(client_->depth(soon()));
  ASSERT_TRUE(before.ok());
  EXPECT_EQ(before->queued_jobs, 2u);
  EXPECT_EQ(before->admitted_jobs, 0u);
  EXPECT_GT(before->time_us, 0);
  admit_all(2);
  assign("queued", 1);
  auto depth = wait(client_->depth(soon()));
  ASSERT_TRUE(depth.ok());
  EXPECT_EQ(depth->queued_jobs, 0u);
  EXPECT_EQ(depth->admitted_jobs, 2u);
  EXPECT_EQ(depth->ready_units, 3u);
  EXPECT_GE(depth->time_us, before->time_us);
  ASSERT_TRUE(wait(client_->cancel("queued", "", soon())).ok());
  depth = wait(client_->depth(soon()));
  EXPECT_EQ(depth->admitted_jobs, 1u);
  EXPECT_EQ(depth->ready_units, 2u);
}

}  // namespace
}  // namespace ditfleet::testing
