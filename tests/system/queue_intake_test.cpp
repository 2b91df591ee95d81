// What reaches the queue from outside: plain XADD entries of every bad kind, Function calls of a client that gets
// them wrong, repeated keys and ids, and a Redis that forgot its Functions.
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "shared/job/validate.h"
#include "shared/queue/library.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;

class QueueIntake : public QueueTest {
 protected:
  // XADD to the intake; the id of the entry.
  std::string add(std::vector<std::string> fields) {
    fields.insert(fields.begin(), {"XADD", keys_.in(), "*"});
    return redis(fields).text;
  }
  // What the scheduler does with entries that cannot be taken.
  void reject_all() {
    if (epoch_ == 0) lead();
    std::vector<queue::Rejection> all;
    for (const auto& e : intake()) {
      queue::Rejection r;
      r.entry_id = e.entry_id;
      r.id = e.id;
      r.raw = e.raw;
      r.error = Error{Code::kInvalidArgument, e.problem.empty() ? "the model is unknown" : e.problem, {}};
      r.tenant = e.tenant;
      r.spec = e.spec;
      all.push_back(std::move(r));
    }
    auto done = wait(client_->reject(epoch_, all, soon()));
    ASSERT_TRUE(done.ok()) << done.error().message;
    EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
  }
  // The error text of a command that must fail.
  std::string refused(const std::vector<std::string>& words) {
    redis::Command command;
    for (const std::string& word : words) command << word;
    auto reply = wait(connection_->execute(command, soon()));
    EXPECT_FALSE(reply.ok()) << words[1];
    return reply ? std::string() : reply.error().message;
  }
};

TEST_F(QueueIntake, EveryBadEntryIsRejectedUnderItsOwnIdWithItsReason) {
  const std::string nul("\0\xff\xfe", 3);
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"prompt", "hello"}, "unknown field 'prompt'"},
      {{"id", "has-no-spec"}, "no field 'spec'"},
      {{"spec", kSpec, "tenant", "a b"}, "tenant 'a b'"},
      {{"spec", kSpec, "id", "../../etc"}, "id '../../etc'"},
      {{"spec", kSpec, "id", ""}, "id ''"},
      {{"spec", kSpec, "id", std::string(65, 'x')}, "1 to 64 characters"},
      {{"spec", kSpec, "idempotency_key", std::string(256, 'k')}, "255 bytes"},
      {{"spec", kSpec, "deadline_ms", "tomorrow"}, "deadline_ms 'tomorrow'"},
      {{"spec", kSpec, "spec", kSpec}, "duplicate field"},
      {{"spec", kSpec, "job", "other default 0"}, "unknown field 'job'"},
      {{"spec", std::string((1 << 20) + 1, ' ')}, "1048577 bytes"},
      {{nul, nul, "spec", kSpec}, "unknown field '?'"},
  };
  for (const auto& [fields, reason] : cases) {
    const std::string entry = add(fields);
    reject_all();
    const std::string id = fields[0] == "id" && fields[1] == "has-no-spec" ? "has-no-spec" : "x-" + entry;
    const auto record = job(id);
    EXPECT_EQ(record.state, State::kRejected) << reason;
    ASSERT_TRUE(record.error.has_value()) << reason;
    EXPECT_NE(record.error->message.find(reason), std::string::npos) << record.error->message;
    EXPECT_EQ(event_types(id), "queued rejected") << reason;
  }
}

TEST_F(QueueIntake, AnEntryMayChooseItsNameTenantAndTrace) {
  const std::string trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
  add({"spec", kSpec, "id", "mine", "tenant", "acme", "traceparent", trace});
  add({"spec", kSpec, "traceparent", "not a trace", "id", "other"});
  admit_all();
  EXPECT_EQ(job("mine").tenant, "acme");
  EXPECT_EQ(job("mine").traceparent, trace);
  EXPECT_EQ(job("other").traceparent, "");
  EXPECT_EQ(event_types("mine"), "queued ready:0");
}

TEST_F(QueueIntake, TheIdOfAnotherJobIsRefusedAndToldUnderTheEntrysOwn) {
  const std::string id = submit(submission("taken"));
  const auto entry = add({"spec", R"({"model":"demo","prompt":"another"})", "id", "taken"});
  const auto bad = add({"spec", "{", "id", "taken"});
  lead();
  auto entries = intake();
  ASSERT_EQ(entries.size(), 3u);
  const std::vector<queue::Admission> good = {admission(entries[0]), admission(entries[1])};
  ASSERT_TRUE(wait(client_->admit(epoch_, good, soon())).ok());
  queue::Rejection r{bad, "taken", Error{Code::kInvalidArgument, "broken JSON", {}}, true, "default", "{", {}};
  for (int again = 0; again < 2; ++again) ASSERT_TRUE(wait(client_->reject(epoch_, std::span(&r, 1), soon())).ok());
  EXPECT_EQ(job("taken").state, State::kReady);
  EXPECT_EQ(job("x-" + entry).state, State::kRejected);
  EXPECT_EQ(job("x-" + entry).error->code, Code::kConflict);
  EXPECT_EQ(job("x-" + bad).error->message, "broken JSON");
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
}

TEST_F(QueueIntake, AdaptersStandWithTheOpenUnits) {
  submit(submission("with"));
  submit(submission("without"));
  lead();
  std::vector<queue::Admission> all;
  for (const auto& entry : intake()) all.push_back(admission(entry));
  all[0].adapters = {"ink", "no|bar", "oil & water"};
  ASSERT_TRUE(wait(client_->admit(epoch_, all, soon())).ok());
  const auto open = wait(client_->open_units(std::chrono::seconds(10)));
  ASSERT_EQ(open->size(), 2u);
  for (const auto& view : *open) {
    EXPECT_EQ(view.steps, 20);
    EXPECT_EQ(view.adapters,
              view.ref.job == "with" ? std::vector<std::string>({"ink", "oil & water"}) : std::vector<std::string>());
  }
  EXPECT_EQ(job("with").state, State::kReady);
}

TEST_F(QueueIntake, OneIdempotencyKeyIsOneJobHoweverItComes) {
  auto s = submission();
  // The gateway stores the canonical form of what it was sent.
  s.spec = job::to_json(*job::parse_spec(R"({"model":"demo","prompt":"a red circle"})"));
  s.idempotency_key = "once";
  const std::string id = submit(s);
  s.id.clear();
  EXPECT_EQ(submit(s), id);
  // By XADD, with other white space: the same job under a second name.
  const auto entry = add({"spec", R"({ "prompt": "a red circle", "model": "demo" })", "idempotency_key", "once"});
  admit_all();
  EXPECT_EQ(job("x-" + entry).id, id);
  // Another body is refused on both ways, another tenant's key is another key.
  s.spec = R"({"model":"demo","prompt":"a blue square"})";
  auto other = wait(client_->submit(s, soon()));
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().code, Code::kIdempotencyMismatch);
  const auto differs = add({"spec", s.spec, "idempotency_key", "once"});
  admit_all();
  EXPECT_EQ(job("x-" + differs).state, State::kRejected);
  EXPECT_EQ(job("x-" + differs).error->code, Code::kIdempotencyMismatch);
  s.tenant = "acme";
  EXPECT_NE(submit(s), id);
}

TEST_F(QueueIntake, AnIdempotencyKeyWhoseJobIsForgottenIsNewAgain) {
  auto s = submission("first");
  s.idempotency_key = "once";
  const auto forget = [&](const std::string& id) {
    ASSERT_TRUE(wait(client_->cancel(id, "", soon())).ok());
    ASSERT_EQ(redis({"DEL", keys_.job(id)}).integer, 1) << "what a sweep does after the retention";
  };
  submit(s);
  s.id = "again";
  EXPECT_EQ(submit(s), "first") << "while it is queued";
  admit_all();
  EXPECT_EQ(submit(s), "first") << "while it is open";
  forget("first");
  EXPECT_EQ(submit(s), "again");
  EXPECT_EQ(job("again").state, State::kQueued);
  s.id = "third";
  EXPECT_EQ(submit(s), "again") << "the key stands for the new job from now on";
  admit_all();
  ASSERT_TRUE(wait(client_->cancel("again", "", soon())).ok());
  EXPECT_EQ(submit(s), "again") << "ended, not forgotten";
  ASSERT_EQ(redis({"DEL", keys_.job("again")}).integer, 1);
  // Whatever its body was.
  s.spec = R"({"model":"demo","prompt":"a blue square"})";
  EXPECT_EQ(submit(s), "third");
  s.id = "fourth";
  EXPECT_EQ(submit(s), "third");
  // By XADD.
  admit_all();
  forget("third");
  const auto entry = add({"spec", kSpec, "idempotency_key", "once"});
  const auto repeated = add({"spec", kSpec, "idempotency_key", "once"});
  admit_all();
  EXPECT_EQ(job("x-" + entry).state, State::kReady);
  EXPECT_EQ(job("x-" + repeated).id, "x-" + entry);
}

TEST_F(QueueIntake, ARepeatedIdIsTheSameJobOrRefused) {
  auto s = submission("job-1");
  EXPECT_EQ(submit(s), "job-1");
  EXPECT_TRUE(wait(client_->submit(s, soon()))->existed);
  EXPECT_FALSE(wait(client_->submit(submission("job-2"), soon()))->existed);
  EXPECT_TRUE(wait(client_->submit(submission("job-2"), soon()))->existed);
  s.spec = R"({"model":"demo","prompt":"another"})";
  auto other = wait(client_->submit(s, soon()));
  ASSERT_FALSE(other.ok());
  EXPECT_EQ(other.error().code, Code::kConflict);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 2);
}

TEST_F(QueueIntake, AForeignClientThatCallsWronglyIsToldHowItIsRight) {
  EXPECT_NE(refused({"FCALL", "ditfleet_v3_submit", "0"}).find("submit takes 8 keys, 10 arguments; got 0 and 0"),
            std::string::npos);
  const std::vector<std::string> submit_keys = {"FCALL",        "ditfleet_v3_submit", "8",           keys_.in(),
                                                keys_.jobs(),   keys_.deadline(),     keys_.open(),  keys_.last(),
                                                keys_.events(), keys_.job("a"),       keys_.job("a")};
  const auto with = [&](std::vector<std::string> arguments) {
    auto words = submit_keys;
    words.insert(words.end(), arguments.begin(), arguments.end());
    words.insert(words.end(), {"1", ""});  // units, quota
    return words;
  };
  const std::string sha(64, 'a');
  EXPECT_NE(refused(with({"1 day", "a", "default", "{}", sha, "0", "", "0"})).find("argument 1 is a whole number"),
            std::string::npos);
  EXPECT_NE(refused(with({"100000000000000000000", "a", "default", "{}", sha, "0", "", "0"}))
                .find("BADARG submit: argument 1"),
            std::string::npos);
  EXPECT_NE(refused(with({"0", "a", "default", "{}", sha, "0", "", "0"})).find("BADARG submit: idempotency_ms"),
            std::string::npos);
  // What is wrong with the job is the reply, not an error of the call.
  const auto verdict = [&](std::vector<std::string> arguments) { return redis(with(arguments)).text; };
  EXPECT_NE(
      verdict({"1000", "b", "default", "{}", sha, "0", "", "0"}).find("invalid keys: they are not those of job b"),
      std::string::npos);
  EXPECT_NE(verdict({"1000", "a/b", "default", "{}", sha, "0", "", "0"}).find("invalid id"), std::string::npos);
  EXPECT_NE(verdict({"1000", "a", "", "{}", sha, "0", "", "0"}).find("invalid tenant"), std::string::npos);
  EXPECT_NE(verdict({"1000", "a", "default", "{}", "sha", "0", "", "0"}).find("invalid sha256"), std::string::npos);
  EXPECT_NE(verdict({"1000", "a", "default", "{}", sha, "yes", "", "0"}).find("invalid has_key"), std::string::npos);
  EXPECT_NE(verdict({"1000", "a", "default", "{}", sha, "1", "", "0"}).find("invalid keys: an idempotency key"),
            std::string::npos);
  EXPECT_NE(verdict({"1000", "a", "default", "{}", sha, "0", "", "soon"}).find("invalid deadline_ms"),
            std::string::npos);
  // What no sorted set takes as a score would be found out in the midst of what is written.
  EXPECT_NE(
      verdict({"1000", "a", "default", "{}", sha, "0", "", "1" + std::string(400, '0')}).find("invalid deadline_ms"),
      std::string::npos);
  const auto written = redis({"KEYS", "*"}).elements;  // none of these wrote a record
  EXPECT_TRUE(written.size() == 1 && written[0].text == "df:{0}:format");
  EXPECT_EQ(verdict({"1000", "a", "default", "{}", sha, "0", "", "0"}), "created");
  // Every Function refuses a call of the wrong shape before it touches anything.
  auto listed = redis({"FUNCTION", "LIST", "LIBRARYNAME", "ditfleet_v3"});
  int functions = 0;
  for (const auto& f : listed.elements.at(0).elements.at(5).elements) {
    const std::string name = f.elements.at(1).text;
    if (name == "ditfleet_v3_version") continue;
    ++functions;
    const std::string error = refused({"FCALL", name, "1", "df:{0}:nothing", "x", "y", "z", "1", "2", "3", "4"});
    EXPECT_NE(error.find("BADARG"), std::string::npos) << name << ": " << error;
    EXPECT_NE(error.find("takes"), std::string::npos) << name << ": " << error;
  }
  EXPECT_EQ(functions, 36);
}

// A queue whose client gives each tenant two units and 4 KiB.
class QueueQuota : public QueueTest {
 protected:
  QueueQuota() : QueueTest({}, {.quota = [this](const std::string&) { return quota_; }}) {}
  Result<queue::SubmitOutcome> try_to(const std::string& tenant, int units = 1, std::size_t prompt = 10,
                                      const std::string& key = {}) {
    queue::Submission s = submission();
    s.tenant = tenant;
    s.units = units;
    s.spec = R"({"prompt":")" + std::string(prompt, 'x') + "\"}";
    s.idempotency_key = key;
    return wait(client_->submit(s, soon()));
  }
  queue::Quota quota_{.units = 2, .bytes = 4096};
};

TEST_F(QueueQuota, CountsUnitsAndBytesOfOpenJobsOfEachTenant) {
  const std::string first = try_to("a")->id;
  ASSERT_TRUE(try_to("a").ok());
  const auto third = try_to("a", 1, 10, "k");
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.error().code, Code::kResourceExhausted);
  EXPECT_EQ(third.error().retry_after, std::chrono::seconds(5));
  EXPECT_EQ(third.error().message,
            "[queue] tenant 'a' has 2 units in open jobs and asks for 1; quotas.queued_units is 2");
  EXPECT_TRUE(try_to("b", 2).ok()) << "another tenant has its own";
  const auto never = try_to("c", 3);
  ASSERT_FALSE(never.ok());
  EXPECT_EQ(never.error().code, Code::kPayloadTooLarge);
  const auto bytes = try_to("c", 1, 5000);
  ASSERT_FALSE(bytes.ok());
  EXPECT_NE(bytes.error().message.find("quotas.queued_bytes is 4096"), std::string::npos);
  EXPECT_EQ(wait(client_->use(soon()))->at("a").units, 2);
  EXPECT_EQ(wait(client_->use(soon()))->at("a").bytes, 2048);
  EXPECT_FALSE(wait(client_->use(soon()))->contains("c"));
  // The end of a job gives back what it took, and the key of the refused job is free.
  EXPECT_TRUE(wait(client_->cancel(first, "", soon())).ok());
  const auto again = try_to("a", 1, 10, "k");
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_FALSE(again->existed);
  admit_all();
  quota_ = {};
  const auto attempt = running(2);
  const std::string id = attempt.ref.job;
  EXPECT_EQ(wait(client_->use(soon()))->at("default").units, 1) << "as it was submitted";
  EXPECT_TRUE(complete(attempt).ok());
  EXPECT_EQ(wait(client_->use(soon()))->at("default").units, 1) << "a unit of it is open";
  const auto second = assign(id, 1);
  EXPECT_TRUE(start(second).ok());
  EXPECT_TRUE(complete(second).ok());
  EXPECT_FALSE(wait(client_->use(soon()))->contains("default"));
}

TEST_F(QueueQuota, AFullQueueStillTakesJobsOfATenantBelowItsShare) {
  quota_ = {.share = 3, .max_queued = 6};
  for (int i = 0; i < 6; ++i) ASSERT_TRUE(try_to("a").ok()) << i;
  const auto refused = try_to("a");
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  EXPECT_EQ(refused.error().message,
            "[queue] tenant 'a' has 6 units in open jobs and asks for 1; the queue is full, and its share of "
            "queue.max_queued is 3");
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(try_to("b").ok()) << i;
  EXPECT_FALSE(try_to("b").ok());
}

TEST_F(QueueQuota, HoldsForEntriesToo) {
  const auto add = [&](const std::string& tenant) {
    return "x-" + redis({"XADD", keys_.in(), "*", "spec", kSpec, "tenant", tenant}).text;
  };
  const std::vector<std::string> ids = {add("a"), add("a"), add("a"), add("b")};
  admit_all();
  std::vector<job::State> states;
  for (const auto& id : ids) states.push_back(job(id).state);
  EXPECT_EQ(states, (std::vector{job::State::kReady, job::State::kReady, job::State::kRejected, job::State::kReady}));
  EXPECT_NE(job(ids[2]).error->message.find("quotas.queued_units is 2"), std::string::npos);
  EXPECT_EQ(wait(client_->use(soon()))->at("a").units, 2);
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 0);
}

class QueueAge : public QueueTest {
 protected:
  QueueAge() : QueueTest({}, {.retention_ms = 3'600'000, .max_age_ms = 60'000}) {}
  // Moves the job's time of creation back.
  void age(const std::string& id) { redis({"ZINCRBY", keys_.jobs(), "-61000", id}); }
};

TEST_F(QueueAge, OpenJobsThatAreTooOldExpire) {
  const auto attempt = running();
  const std::string queued = submit(), young = submit();
  const auto ended = [&] {
    (void)wait(client_->reap(epoch_, 100, soon()));
    return job(queued).state == job::State::kExpired && job(attempt.ref.job).state == job::State::kExpired;
  };
  EXPECT_FALSE(ended());
  age(queued);
  age(attempt.ref.job);
  const Deadline patience = soon();
  while (!ended() && !patience.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ASSERT_EQ(job(queued).state, job::State::kExpired);
  EXPECT_EQ(job(attempt.ref.job).state, job::State::kExpired);
  EXPECT_NE(job(queued).error->message.find("queue.max_age_ms"), std::string::npos);
  EXPECT_EQ(job(young).state, job::State::kQueued);
  EXPECT_EQ(renew(attempt), queue::RenewOutcome::kLost);
}

TEST_F(QueueIntake, FunctionsThatAreGoneAreLoadedAgain) {
  const auto attempt = running();
  redis({"FUNCTION", "FLUSH"});
  EXPECT_EQ(renew(attempt, 1), queue::RenewOutcome::kOk);
  redis({"FUNCTION", "FLUSH"});
  EXPECT_TRUE(complete(attempt).ok());
  EXPECT_EQ(event_types(attempt.ref.job), "queued ready:0 assigned:0 started:0 step:0 succeeded:0 succeeded");
  redis({"FLUSHALL"});
  redis({"FUNCTION", "FLUSH"});
  epoch_ = 0;
  const auto second = running();
  EXPECT_TRUE(complete(second).ok());
  EXPECT_EQ(complete(attempt).error().code, Code::kConflict);
}

// The text of the loaded library with `from` replaced by `to`.
class QueueOtherLibrary : public QueueIntake {
 protected:
  void replace_library(const std::vector<std::pair<std::string, std::string>>& changes) {
    const auto listed = redis({"FUNCTION", "LIST", "LIBRARYNAME", "ditfleet_v3", "WITHCODE"});
    std::string text = listed.elements.at(0).elements.at(7).text;
    for (const auto& [from, to] : changes) {
      const auto at = text.find(from);
      ASSERT_NE(at, std::string::npos) << from;
      text.replace(at, from.size(), to);
    }
    redis({"FUNCTION", "LOAD", "REPLACE", text});
  }
  std::string version() { return redis({"FCALL_RO", "ditfleet_v3_version", "0"}).text; }

  const std::pair<std::string, std::string> other_shape_{"register('complete', complete, {keys = 8",
                                                         "register('complete', complete, {keys = 9"};
  const std::pair<std::string, std::string> newer_{"return '" + std::to_string(queue::library_build()) + " ",
                                                   "return '" + std::to_string(queue::library_build() + 1) + " "};
  const std::pair<std::string, std::string> older_{"return '" + std::to_string(queue::library_build()) + " ",
                                                   "return '0 "};
};

TEST_F(QueueOtherLibrary, ACallThatItRefusesSaysNothingAboutTheUnit) {
  const auto attempt = running();
  for (const auto& changes : {std::vector{other_shape_}, std::vector{other_shape_, newer_}}) {
    redis({"FUNCTION", "FLUSH"});
    EXPECT_TRUE(wait(client_->load_library(soon())).ok());
    replace_library(changes);
    const auto refused = complete(attempt);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kUnavailable) << refused.error().message;
    EXPECT_NE(refused.error().message.find("another version"), std::string::npos) << refused.error().message;
  }
  redis({"FUNCTION", "DELETE", "ditfleet_v3"});
  redis({"FUNCTION", "LOAD",
         "#!lua name=ditfleet_v3\nredis.register_function{function_name = 'ditfleet_v3_version', "
         "callback = function() return '1000000 x' end, flags = {'no-writes'}}"});
  EXPECT_EQ(complete(attempt).error().code, Code::kUnavailable);
  redis({"FUNCTION", "DELETE", "ditfleet_v3"});
  EXPECT_TRUE(complete(attempt).ok());
}

TEST_F(QueueOtherLibrary, AnOlderBuildNeverReplacesANewerOne) {
  replace_library({newer_});
  const std::string newer = version();
  EXPECT_TRUE(wait(client_->load_library(soon())).ok());
  EXPECT_EQ(version(), newer);
  EXPECT_TRUE(complete(running()).ok());  // the same interface
  EXPECT_EQ(version(), newer);
}

TEST_F(QueueOtherLibrary, AnOlderLibraryIsReplacedByTheFirstCallThatItRefuses) {
  const std::string own = version();
  const auto attempt = running();
  replace_library({other_shape_, older_});
  EXPECT_TRUE(complete(attempt).ok());
  EXPECT_EQ(version(), own);
  redis({"FUNCTION", "DELETE", "ditfleet_v3"});
  redis({"FUNCTION", "LOAD",  // as builds without a number did
         "#!lua name=ditfleet_v3\nredis.register_function{function_name = 'ditfleet_v3_version', "
         "callback = function() return 'abcdef' end, flags = {'no-writes'}}"});
  EXPECT_TRUE(wait(client_->load_library(soon())).ok());
  EXPECT_EQ(version(), own);
}

TEST_F(QueueIntake, AListShowsJobsInEveryStateWithTheirSpec) {
  ASSERT_TRUE(complete(running()).ok());
  const auto under_way = running();
  auto s = submission("waits");
  s.tenant = "acme";
  submit(s);
  auto all = wait(client_->list("", std::nullopt, 10, "", soon()));
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->jobs.size(), 3u);
  EXPECT_EQ(all->jobs[0].id, "waits");  // newest first
  EXPECT_EQ(all->jobs[0].state, State::kQueued);
  EXPECT_EQ(all->jobs[1].id, under_way.ref.job);
  EXPECT_EQ(all->jobs[1].state, State::kRunning);
  EXPECT_EQ(all->jobs[1].class_key, "demo/256x256x1/none/64/fp32");
  EXPECT_EQ(all->jobs[2].state, State::kSucceeded);
  EXPECT_GT(all->jobs[2].ended_ms, 0);
  for (const auto& job : all->jobs) EXPECT_EQ(job.spec, kSpec) << job.id;
  EXPECT_TRUE(all->next_cursor.empty());

  const auto of_acme = wait(client_->list("acme", std::nullopt, 10, "", soon()));
  ASSERT_EQ(of_acme->jobs.size(), 1u);
  const auto succeeded = wait(client_->list("", State::kSucceeded, 10, "", soon()));
  ASSERT_EQ(succeeded->jobs.size(), 1u);
  std::string pages, cursor;
  do {
    const auto page = wait(client_->list("", std::nullopt, 1, cursor, soon()));
    for (const auto& job : page->jobs) pages += job.id + " ";
    cursor = page->next_cursor;
  } while (!cursor.empty());
  EXPECT_EQ(pages, all->jobs[0].id + " " + all->jobs[1].id + " " + all->jobs[2].id + " ");
}

TEST_F(QueueIntake, AListReadsNoSpecsOfJobsThatItDoesNotShow) {
  constexpr int kOthers = 300;
  auto s = submission();
  s.tenant = "acme";
  s.spec = R"({"prompt":")" + std::string(4096, 'x') + "\"}";
  for (int i = 0; i < kOthers; ++i) {
    s.id = new_id();
    submit(s);
    if (i % 3 == 0) admit_all();  // some are queued, some admitted, some have ended
    if (i % 3 == 1) {
      EXPECT_TRUE(wait(client_->cancel(s.id, "", soon())).ok());
    }
  }
  auto own = submission("own");
  own.tenant = "small";
  submit(own);
  const auto sent_bytes = [&] {
    const auto text = redis({"INFO", "stats"}).text;
    return std::stoll(text.substr(text.find("total_net_output_bytes:") + 23));
  };
  const auto before = sent_bytes();
  const auto page = wait(client_->list("small", std::nullopt, 10, "", soon()));
  EXPECT_LT(sent_bytes() - before, 200'000);
  ASSERT_TRUE(page.ok());
  ASSERT_EQ(page->jobs.size(), 1u);
  EXPECT_EQ(page->jobs[0].id, "own");
  EXPECT_EQ(page->jobs[0].spec, own.spec);
  const auto canceled = wait(client_->list("acme", State::kCanceled, 1, "", soon()));
  EXPECT_LT(sent_bytes() - before, 400'000);
  ASSERT_EQ(canceled->jobs.size(), 1u);
  EXPECT_EQ(canceled->jobs[0].spec, s.spec);
}

TEST_F(QueueIntake, EndedJobsAreForgottenAfterTheirRetentionAndNoSooner) {
  options_.retention_ms = 1000;
  client_ = std::make_unique<queue::Client>(connection_, options_);
  const auto attempt = running();
  const auto open = submit();
  const auto pause = [](asio::io_context& io, int ms) -> asio::awaitable<bool> {
    asio::steady_timer timer(io, std::chrono::milliseconds(ms));
    co_await timer.async_wait(asio::use_awaitable);
    co_return true;
  };
  wait(pause(io_, 1100));
  reap();
  EXPECT_EQ(job(attempt.ref.job).state, State::kRunning);  // it is old, but has not ended
  EXPECT_TRUE(complete(attempt).ok());
  wait(pause(io_, 100));
  reap();
  EXPECT_EQ(job(attempt.ref.job).state, State::kSucceeded);
  wait(pause(io_, 1000));
  reap();
  EXPECT_FALSE(wait(client_->job(attempt.ref.job, "", soon())).ok());
  EXPECT_EQ(redis({"EXISTS", keys_.job(attempt.ref.job)}).integer, 0);
  EXPECT_EQ(job(open).state, State::kQueued);
  EXPECT_EQ(redis({"ZCARD", keys_.jobs()}).integer, 1);
  // What it told is kept as long as it is, however old: events lie in company of others'.
  EXPECT_EQ(event_types(open), "queued");
  ASSERT_TRUE(wait(client_->cancel(open, "", soon())).ok());
  EXPECT_EQ(event_types(open), "queued canceled");
  EXPECT_FALSE(job(open).spec.empty());
  wait(pause(io_, 1100));
  for (int i = 0; i < 3; ++i) reap();
  EXPECT_FALSE(wait(client_->job(open, "", soon())).ok());
  EXPECT_TRUE(wait(client_->events(open, "0", 10, soon()))->empty());
  EXPECT_LE(redis({"XLEN", keys_.events()}).integer, 4);  // trimmed by whole nodes of the stream
}

}  // namespace
}  // namespace ditfleet::testing
