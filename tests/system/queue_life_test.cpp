// One job through every state, on a real Redis.
#include <thread>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;
using queue::CancelOutcome;
using queue::RenewOutcome;

class QueueLife : public QueueTest {};

TEST_F(QueueLife, ADeadlineFromNowCountsByTheClockOfRedis) {
  auto s = submission();
  s.deadline_in_ms = 60'000;
  const auto before = redis({"TIME"});
  const auto id = submit(s);
  const auto after = redis({"TIME"});
  const auto ms = [](const redis::Reply& time) {
    return std::stoll(time.elements.at(0).text) * 1000 + std::stoll(time.elements.at(1).text) / 1000;
  };
  const auto score = redis({"ZSCORE", keys_.deadline(), id});
  EXPECT_GE(std::stoll(score.text), ms(before) + 60'000);
  EXPECT_LE(std::stoll(score.text), ms(after) + 60'000);
}

TEST_F(QueueLife, OneUnitFromSubmissionToSuccess) {
  auto s = submission("job-1");
  s.tenant = "acme";
  s.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  EXPECT_EQ(submit(s), "job-1");
  auto record = job("job-1");
  EXPECT_EQ(record.state, State::kQueued);
  EXPECT_EQ(record.spec, kSpec);
  EXPECT_EQ(record.tenant, "acme");
  EXPECT_EQ(record.traceparent, s.traceparent);
  EXPECT_TRUE(record.unit_records.empty());

  lead();
  auto entries = intake();
  ASSERT_EQ(entries.size(), 1u);
  EXPECT_FALSE(entries[0].raw);
  EXPECT_EQ(entries[0].spec, kSpec);
  EXPECT_EQ(entries[0].tenant, "acme");
  const auto a = admission(entries[0]);
  ASSERT_TRUE(wait(client_->admit(epoch_, std::span(&a, 1), soon())).ok());
  EXPECT_EQ(job("job-1").state, State::kReady);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);

  const auto attempt = assign("job-1");
  record = job("job-1");
  EXPECT_EQ(record.state, State::kAssigned);
  ASSERT_EQ(record.unit_records.size(), 1u);
  EXPECT_EQ(record.unit_records[0].owner, "w0:boot0");
  EXPECT_EQ(record.unit_records[0].nonce, attempt.nonce);

  auto mail = wait(client_->read_mailbox("w0:boot0", "0", 10, std::chrono::milliseconds(1)));
  ASSERT_TRUE(mail.ok());
  ASSERT_EQ(mail->size(), 1u);
  EXPECT_EQ((*mail)[0].kind, queue::MailboxEntry::Kind::kAssign);
  EXPECT_EQ((*mail)[0].spec, kSpec);
  EXPECT_EQ((*mail)[0].nonce, attempt.nonce);
  EXPECT_EQ((*mail)[0].attempt, 1);
  EXPECT_EQ((*mail)[0].tenant, "acme");
  EXPECT_EQ((*mail)[0].traceparent, s.traceparent);
  EXPECT_EQ((*mail)[0].class_key, "demo/256x256x1/none/64/fp32");
  ASSERT_TRUE(wait(client_->acknowledge("w0:boot0", std::vector{(*mail)[0].entry_id}, soon())).ok());
  EXPECT_EQ(redis({"XLEN", keys_.mailbox("w0:boot0")}).integer, 0);

  ASSERT_TRUE(start(attempt).ok());
  EXPECT_EQ(renew(attempt, 9, 28), RenewOutcome::kOk);
  record = job("job-1");
  EXPECT_EQ(record.state, State::kRunning);
  EXPECT_EQ(record.unit_records[0].step, 9);
  EXPECT_EQ(record.unit_records[0].total_steps, 28);
  EXPECT_EQ(record.unit_records[0].attempt, 1);

  ASSERT_TRUE(complete(attempt).ok());
  record = job("job-1");
  EXPECT_EQ(record.state, State::kSucceeded);
  EXPECT_EQ(record.unit_records[0].manifest, R"({"key":"k"})");
  EXPECT_EQ(record.unit_records[0].phases_us.at("denoise"), 12345);
  EXPECT_GT(record.ended_ms, 0);
  EXPECT_EQ(event_types("job-1"), "queued ready:0 assigned:0 started:0 step:0 succeeded:0 succeeded");
  EXPECT_EQ(redis({"ZCARD", keys_.lease()}).integer, 0);
  EXPECT_EQ(redis({"EXISTS", keys_.job("job-1"), keys_.events()}).integer, 2);
  EXPECT_EQ(redis({"EXISTS", keys_.units(), keys_.open(), keys_.specs(), keys_.last()}).integer, 0);
}

TEST_F(QueueLife, AStepThatHoldsALineBreakTellsNothingOfOtherJobs) {
  const auto attempt = running();
  const auto other = submit();
  redis::Command forged("FCALL");
  forged << "ditfleet_v3_renew" << 4 << keys_.lease() << keys_.units() << keys_.last() << keys_.events() << 60'000
         << attempt.ref.job << 0 << attempt.nonce << "step 0 {}\n" + other + " - succeeded 0 {}";
  const auto lease = redis({"ZSCORE", keys_.lease(), attempt.ref.job + ":0"}).text;
  const auto answer = wait(connection_->execute(std::move(forged), soon()));
  ASSERT_FALSE(answer.ok());
  EXPECT_NE(answer.error().message.find("BADARG renew"), std::string::npos) << answer.error().message;
  EXPECT_EQ(redis({"ZSCORE", keys_.lease(), attempt.ref.job + ":0"}).text, lease) << "nothing was written";
  EXPECT_EQ(event_types(other), "queued");
  EXPECT_EQ(renew(attempt), RenewOutcome::kOk);
}

TEST_F(QueueLife, AMailboxEntryThatCannotBeReadIsDeletedAndTheNextOneIsRead) {
  const std::string id = submit();
  admit_all();
  redis({"XADD", keys_.mailbox("w0:boot0"), "*", "x", "y"});
  redis({"XADD", keys_.mailbox("w0:boot0"), "*", "m", "assign " + id + " 0 n 1", "m", "revoke"});
  const auto read = [&](const std::string& after) {
    auto mail = wait(client_->read_mailbox("w0:boot0", after, 10, std::chrono::milliseconds(1)));
    EXPECT_TRUE(mail.ok()) << mail.error().message;
    return mail ? *mail : std::vector<queue::MailboxEntry>();
  };
  EXPECT_TRUE(read("0").empty());
  EXPECT_EQ(redis({"XLEN", keys_.mailbox("w0:boot0")}).integer, 0);
  redis({"XADD", keys_.mailbox("w0:boot0"), "*", "x", "y"});
  const auto attempt = assign(id);
  const auto mail = read("0");
  ASSERT_EQ(mail.size(), 1u);
  EXPECT_EQ(mail[0].nonce, attempt.nonce);
}

TEST_F(QueueLife, PhasesThatAreNoIntegersAreLeftOut) {
  const auto attempt = running();
  const std::string& id = attempt.ref.job;
  std::vector<std::string> call = {"FCALL", "ditfleet_v3_complete", "8"};
  for (const std::string& key : {keys_.lease(), keys_.deadline(), keys_.units(), keys_.open(), keys_.specs(),
                                 keys_.last(), keys_.events(), keys_.job(id)})
    call.push_back(key);
  for (const char* argument : {id.c_str(), "0", attempt.nonce.c_str(), "{}", R"({"text":7,"vae":1.5,"x":1e300})", ""})
    call.emplace_back(argument);
  EXPECT_EQ(redis(call).integer, 1);
  EXPECT_EQ(job(id).unit_records.at(0).phases_us, (std::map<std::string, std::int64_t>{{"text", 7}}));
}

TEST_F(QueueLife, ALongHistoryIsReadInBoundedCalls) {
  constexpr int kUnits = 3, kSteps = 400;
  const auto first = running(kUnits);
  std::vector<queue::Attempt> attempts = {first};
  for (int unit = 1; unit < kUnits; ++unit) {
    attempts.push_back(assign(first.ref.job, unit));
    ASSERT_TRUE(start(attempts.back()).ok());
  }
  for (int step = 1; step <= kSteps; ++step) {
    for (const auto& attempt : attempts) ASSERT_EQ(renew(attempt, step, kSteps), queue::RenewOutcome::kOk);
  }
  for (const auto& attempt : attempts) ASSERT_TRUE(complete(attempt).ok());
  const auto read = [&](const std::string& after, int limit) {
    auto events = wait(client_->events(first.ref.job, after, limit, soon()));
    EXPECT_TRUE(events.ok());
    return events ? *events : std::vector<queue::Event>();
  };
  redis({"CONFIG", "RESETSTAT"});
  const auto all = read("0", 100'000);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(1 + kUnits * (4 + kSteps) + 1));
  EXPECT_EQ(all.front().type, "queued");
  EXPECT_EQ(all.back().type, "succeeded");
  EXPECT_EQ(all.back().unit, -1);
  EXPECT_NE(redis({"INFO", "commandstats"}).text.find("cmdstat_fcall_ro:calls=3,"), std::string::npos);
  // In pages, which may begin anywhere.
  std::vector<queue::Event> paged;
  for (auto page = read("0", 100); !page.empty(); page = read(paged.back().id, 100))
    paged.insert(paged.end(), page.begin(), page.end());
  ASSERT_EQ(paged.size(), all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(paged[i].id, all[i].id);
    EXPECT_EQ(paged[i].type, all[i].type);
  }
  EXPECT_TRUE(read(all.back().id, 1).empty());
  EXPECT_EQ(read(all[all.size() - 2].id, 1).size(), 1u);  // the job's end, in the entry of its last unit's
  // One call of any client is bounded too.
  const auto reply = redis({"FCALL_RO", "ditfleet_v3_events", "4", keys_.job(first.ref.job), keys_.open(), keys_.last(),
                            keys_.events(), first.ref.job, "0-0", "100000"});
  EXPECT_EQ(reply.elements.size(), 1u + 2 * 500);
  // One event is found without the others.
  const auto one = wait(client_->event(first.ref.job, all[700].id, soon()));
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->fields, all[700].fields);
  EXPECT_EQ(wait(client_->event("another", all[700].id, soon())).error().code, Code::kNotFound);
  EXPECT_EQ(wait(client_->event(first.ref.job, "1-0", soon())).error().code, Code::kNotFound);
  EXPECT_EQ(wait(client_->event(first.ref.job, "-", soon())).error().code, Code::kNotFound);
}

TEST_F(QueueLife, ARecordThatIsNoWorkersIsLeftOut) {
  queue::WorkerInfo good;
  good.name = "good";
  good.boot = "b1";
  ASSERT_TRUE(wait(client_->heartbeat(good, soon())).ok());
  for (const char* info : {"not JSON", "[]", R"({"name":"good"})", "\xff"}) {
    redis({"FCALL", "ditfleet_v3_heartbeat", "3", keys_.workers(), keys_.worker("bad"), keys_.mailbox("bad:b"), "bad",
           "b", info, "60000", "60000"});
    const auto workers = wait(client_->workers(soon()));
    ASSERT_TRUE(workers.ok()) << workers.error().message;
    ASSERT_EQ(workers->size(), 1u) << info;
    EXPECT_EQ(workers->front().name, "good");
  }
  redis({"DEL", keys_.worker("bad")});
  redis({"SET", keys_.worker("bad"), "a string"});
  EXPECT_EQ(wait(client_->workers(soon()))->size(), 1u);
}

TEST_F(QueueLife, AJobThatWasAskedToStopIsCancelingUntilItsWorkerDoes) {
  const auto attempt = running(2);
  const auto& id = attempt.ref.job;
  EXPECT_EQ(renew(attempt, 3, 20), RenewOutcome::kOk);
  EXPECT_EQ(*wait(client_->cancel(id, "", soon())), CancelOutcome::kRequested);
  const auto record = job(id);
  EXPECT_EQ(record.state, State::kCanceling);
  EXPECT_EQ(record.unit_records.at(0).state, State::kCanceling);
  EXPECT_EQ(record.unit_records.at(0).step, 3);
  EXPECT_EQ(record.unit_records.at(1).state, State::kCanceled);
  const auto listed = [&](std::optional<State> state) {
    const auto page = wait(client_->list("", state, 10, "", soon()));
    return page->jobs.size() == 1 ? job::state_name(page->jobs[0].state) : std::to_string(page->jobs.size());
  };
  EXPECT_EQ(listed(std::nullopt), "canceling");
  EXPECT_EQ(listed(State::kCanceling), "canceling");
  EXPECT_EQ(listed(State::kRunning), "0");
  const auto open = wait(client_->open_units(std::chrono::seconds(5)));
  ASSERT_EQ(open->size(), 1u);
  EXPECT_EQ(open->at(0).state, State::kRunning) << "for the scheduler it runs";
  EXPECT_EQ(*wait(client_->cancel(id, "", soon())), CancelOutcome::kRequested);
  EXPECT_EQ(renew(attempt, 4, 20), RenewOutcome::kCancelRequested);
  ASSERT_TRUE(wait(client_->canceled(attempt, soon())).ok());
  EXPECT_EQ(job(id).state, State::kCanceled);
}

TEST_F(QueueLife, OnlyItsOwnTenantCancelsAJob) {
  auto s = submission();
  s.tenant = "acme";
  const std::string id = submit(s);
  for (const char* stage : {"queued", "ready"}) {
    const auto others = wait(client_->cancel(id, "default", soon()));
    ASSERT_FALSE(others.ok()) << stage;
    EXPECT_EQ(others.error().code, Code::kNotFound) << "it does not learn that the job exists";
    admit_all();
    EXPECT_EQ(job(id).state, State::kReady);
  }
  EXPECT_EQ(*wait(client_->cancel(id, "acme", soon())), CancelOutcome::kCanceled);
}

TEST_F(QueueLife, TheOutlookOfJobsIsPublishedAtABoundedRate) {
  EXPECT_TRUE(wait(client_->outlook(soon()))->empty());
  std::map<std::string, queue::JobOutlook> some = {{"a", {0, 1'700'000'000'123}}, {"b-1.x_", {-1, 0}}};
  const auto period = wait(client_->publish(some, soon()));
  ASSERT_TRUE(period.ok());
  EXPECT_EQ(*period, std::chrono::seconds(1));
  const auto read = wait(client_->outlook(soon())).value();
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read.at("a").position, 0);
  EXPECT_EQ(read.at("a").eta_ms, 1'700'000'000'123);
  EXPECT_EQ(read.at("b-1.x_").position, -1);
  EXPECT_EQ(read.at("b-1.x_").eta_ms, 0);
  for (int i = 0; i < 1000; ++i) some[new_id()] = {i, 1'700'000'000'123};
  const auto longer = wait(client_->publish(some, soon()));
  ASSERT_TRUE(longer.ok());
  EXPECT_LE(redis({"STRLEN", keys_.outlook()}).integer, 4.1 * static_cast<double>(longer->count()));
  EXPECT_GT(redis({"PTTL", keys_.outlook()}).integer, longer->count()) << "it lasts until the next one";
  redis({"SET", keys_.outlook(), "\n\nx\na 1 2 3 4\n  \n"});
  EXPECT_TRUE(wait(client_->outlook(soon())).ok()) << "whatever it has";
}

TEST_F(QueueLife, TheListOfWorkersNamesTheTenantsOfTheirJobs) {
  auto s = submission("theirs");
  s.tenant = "acme";
  submit(s);
  submit(submission("ended"));
  admit_all();
  ASSERT_TRUE(wait(client_->cancel("ended", "", soon())).ok());
  queue::WorkerInfo worker;
  worker.name = "w";
  worker.boot = "b";
  worker.units = {{"theirs", 0}, {"ended", 0}, {"forgotten", 0}};
  ASSERT_TRUE(wait(client_->heartbeat(worker, soon())).ok());
  EXPECT_TRUE(wait(client_->workers(soon()))->at(0).tenants.empty());
  const auto listed = wait(client_->workers(soon(), true));
  ASSERT_EQ(listed->size(), 1u);
  EXPECT_EQ(listed->at(0).tenants, (std::map<std::string, std::string>{{"theirs", "acme"}, {"ended", "default"}}));
  EXPECT_EQ(listed->at(0).units.size(), 3u);
}

TEST_F(QueueLife, AWorkersRecordSaysHowLongItWasNotHeard) {
  queue::WorkerInfo worker;
  worker.name = "w";
  worker.boot = "b";
  ASSERT_TRUE(wait(client_->heartbeat(worker, soon())).ok());
  EXPECT_LT(wait(client_->workers(soon()))->front().unheard_ms, 5'000);
  redis({"HINCRBY", keys_.worker("w"), "heartbeat", "-60000"});
  const auto later = wait(client_->workers(soon()));
  EXPECT_GE(later->front().unheard_ms, 60'000);
  EXPECT_LT(later->front().unheard_ms, 65'000);
}

TEST_F(QueueLife, TheDesiredStateOfAWorkerIsStored) {
  queue::WorkerInfo worker{.name = "w", .boot = "b"};
  const auto desired = [&](const std::string& boot) { return wait(client_->desired("w", boot, soon())).value(); };
  EXPECT_EQ(desired("b"), queue::Desired::kReady);
  ASSERT_TRUE(wait(client_->set_desired(worker, queue::Desired::kDraining, soon())).ok());
  EXPECT_EQ(desired("b"), queue::Desired::kDraining);
  EXPECT_EQ(desired("later"), queue::Desired::kDraining);
  ASSERT_TRUE(wait(client_->set_desired(worker, queue::Desired::kStopped, soon())).ok());
  EXPECT_EQ(desired("b"), queue::Desired::kStopped);
  EXPECT_EQ(desired("later"), queue::Desired::kReady);
  ASSERT_TRUE(wait(client_->set_desired(worker, queue::Desired::kReady, soon())).ok());
  EXPECT_EQ(desired("b"), queue::Desired::kReady);
  EXPECT_EQ(redis({"EXISTS", keys_.desired("w"), keys_.mailbox("w:b")}).integer, 0) << "nothing stays behind";
}

TEST_F(QueueLife, TheForecastExpires) {
  EXPECT_FALSE(wait(client_->forecast(soon())).value().has_value());
  queue::FleetForecast forecast{.ready_workers = 3, .ends_ms = {{"w:b", 123}}};
  forecast.models["tiny"] = {.backlog_us = 5, .units = 2, .ready_workers = 1};
  ASSERT_TRUE(wait(client_->publish(forecast, soon())).ok());
  const auto read = wait(client_->forecast(soon())).value();
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->models, forecast.models);
  EXPECT_EQ(read->ready_workers, 3);
  EXPECT_EQ(read->ends_ms, forecast.ends_ms);
  const auto left = redis({"PTTL", keys_.forecast()}).integer;
  EXPECT_TRUE(left > 0 && left <= 5'000) << left;
  redis({"SET", keys_.forecast(), "[]"});  // anybody may have written it
  EXPECT_EQ(wait(client_->forecast(soon())).error().code, Code::kDataCorrupt);
}

TEST_F(QueueLife, HintsOnAdaptersReachTheMailbox) {
  const std::string first = submit(), second = submit(), third = submit();
  admit_all();
  // A name that the packed form cannot hold is left out; the others arrive.
  const std::vector<queue::AssignRequest> requests = {
      {{first, 0}, new_nonce(), "warm", {"h1", "h2"}, {"s1"}},
      {{second, 0}, new_nonce(), "warm"},
      {{third, 0}, new_nonce(), "warm", {}, {"a|b", "s2", "c,d", "s3"}}};
  ASSERT_TRUE(wait(client_->assign(epoch_, "w0:boot0", requests, soon())).ok());
  auto mail = wait(client_->read_mailbox("w0:boot0", "0", 10, std::chrono::milliseconds(1)));
  ASSERT_TRUE(mail.ok());
  ASSERT_EQ(mail->size(), 3u);
  using Names = std::vector<std::string>;
  EXPECT_EQ((*mail)[0].drop_from_host, (Names{"h1", "h2"}));
  EXPECT_EQ((*mail)[0].drop_from_slots, Names{"s1"});
  EXPECT_EQ((*mail)[1].drop_from_host, Names{});
  EXPECT_EQ((*mail)[1].drop_from_slots, Names{});
  EXPECT_EQ((*mail)[2].drop_from_host, Names{});
  EXPECT_EQ((*mail)[2].drop_from_slots, (Names{"s2", "s3"}));
  for (const auto& entry : *mail) EXPECT_EQ(entry.spec, kSpec);
}

TEST_F(QueueLife, VirtualTimesAreStoredReadAndForgotten) {
  using Times = std::map<std::string, std::int64_t>;
  lead();
  std::map<std::string, std::optional<std::int64_t>> many;
  for (int i = 0; i < 1500; ++i) many.emplace("t" + std::to_string(i), i);  // more than one call
  ASSERT_TRUE(wait(client_->store_virtual_times(epoch_, many, soon())).ok());
  auto times = wait(client_->virtual_times(soon()));
  ASSERT_TRUE(times.ok());
  EXPECT_EQ(times->size(), 1500u);
  EXPECT_EQ(times->at("t1499"), 1499);
  for (auto& [tenant, time] : many) time.reset();
  many["t3"] = 33;
  ASSERT_TRUE(wait(client_->store_virtual_times(epoch_, many, soon())).ok());
  times = wait(client_->virtual_times(soon()));
  ASSERT_TRUE(times.ok());
  EXPECT_EQ(*times, (Times{{"t3", 33}}));
}

class QueueReplicas : public QueueTest {
 protected:
  QueueReplicas() : QueueTest({.tcp = true}, one_replica()) {}
  static queue::QueueOptions one_replica() {
    queue::QueueOptions out;
    out.wait_replicas = 1;
    return out;
  }
};

TEST_F(QueueReplicas, AJobIsAcknowledgedOnceAReplicaHasIt) {
  // Without a replica: all are told so after about a second, not one after the other.
  std::vector<queue::Submission> all;
  for (int i = 0; i < 12; ++i) {
    all.push_back(submission());
    all.back().idempotency_key = "key-" + std::to_string(i);
  }
  int refused = 0, ended = 0;
  const auto began = std::chrono::steady_clock::now();
  for (const auto& one : all) {
    asio::co_spawn(
        io_,
        [&, s = one]() -> asio::awaitable<void> {
          const auto outcome = co_await client_->submit(s, soon());
          refused += !outcome && outcome.error().code == Code::kUnavailable &&
                     outcome.error().message.find("0 of 1 replicas (queue.wait_replicas)") != std::string::npos;
          ++ended;
        },
        asio::detached);
  }
  while (ended < 12 && std::chrono::steady_clock::now() - began < std::chrono::seconds(20)) io_.run_one();
  EXPECT_EQ(refused, 12);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(9)) << "twelve waits of a second";

  RedisServer replica({.tcp = true});
  auto other = redis::Connection::create(io_.get_executor(), {.endpoint = replica.endpoint()});
  other->start();
  ASSERT_TRUE(wait(other->execute(redis::Command("REPLICAOF") << "127.0.0.1" << server_.endpoint().port, soon())).ok());
  other->stop();  // it is a replica now, which no connection of ours accepts
  const auto limit = soon();
  while (redis({"INFO", "replication"}).text.find("state=online") == std::string::npos && !limit.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  for (const auto& one : all) EXPECT_EQ(submit(one), one.id) << "a repeated request names the same job";
  const auto id = submit();
  const std::string there = "redis-cli -p " + std::to_string(replica.endpoint().port) + " HEXISTS " + keys_.open() +
                            " " + id + " | grep -q 1";
  EXPECT_EQ(std::system(there.c_str()), 0);
}

}  // namespace
}  // namespace ditfleet::testing
