// Records of an unknown format, and records that cannot be read: calls fail as unavailable, or leave them alone;
// nothing is removed, ended or blamed.
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <map>

#include "shared/queue/library.h"
#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

using queue::Attempt;

class QueueFormat : public QueueTest {
 protected:
  QueueFormat() : QueueTest({}, {.lease_ms = 500}) {}

  // Everything that the shard's keys hold, but for what a clock or a call of a leader changes.
  std::map<std::string, std::string> contents() {
    std::map<std::string, std::string> out;
    for (const auto& key : redis({"KEYS", "df:{0}:*"}).elements) {
      if (key.text == keys_.boot() || key.text == keys_.leader()) continue;
      out[key.text] = redis({"DUMP", key.text}).text;
    }
    return out;
  }
  std::string set_of(const std::string& member) {
    std::string in;
    for (const auto& [name, key] :
         {std::pair{"ready", keys_.ready()}, {"delayed", keys_.delayed()}, {"lease", keys_.lease()}}) {
      if (!redis({"ZSCORE", key, member}).is_nil()) in += in.empty() ? name : std::string("+") + name;
    }
    return in;
  }
  void damage_unit(const std::string& job, const std::string& record = "7:from a later version") {
    redis({"HSET", keys_.units(), job + ":0", record});
  }
  std::string unit_of(const std::string& job) { return redis({"HGET", keys_.units(), job + ":0"}).text; }
  void pass_lease() { wait(pause(std::chrono::milliseconds(900))); }

  // A job in each state: queued, ready, assigned, running, canceling, delayed, succeeded.
  void jobs_in_every_state() {
    lead();
    for (const char* id : {"ready", "assigned", "running", "canceling", "delayed", "succeeded"}) submit(submission(id));
    admit_all();
    submit(submission("queued"));
    for (const char* id : {"assigned", "running", "canceling", "delayed", "succeeded"}) attempts_[id] = assign(id);
    for (const char* id : {"running", "canceling", "delayed", "succeeded"}) EXPECT_TRUE(start(attempts_[id]).ok());
    EXPECT_TRUE(wait(client_->cancel("canceling", "", soon())).ok());
    EXPECT_TRUE(
        wait(client_->fail({.attempt = attempts_["delayed"], .error = unavailable("try again"), .retryable = true},
                           soon()))
            .ok());
    EXPECT_TRUE(complete(attempts_["succeeded"]).ok());
  }

  std::map<std::string, Attempt> attempts_;

 private:
  asio::awaitable<bool> pause(std::chrono::milliseconds time) {
    asio::steady_timer timer(io_, time);
    co_await timer.async_wait(asio::use_awaitable);
    co_return true;
  }
};

TEST_F(QueueFormat, TheFirstRecordStoresTheFormat) {
  EXPECT_TRUE(wait(client_->workers(soon())).ok());
  EXPECT_TRUE(redis({"GET", "df:{0}:format"}).is_nil()) << "a call that only reads must not write";
  submit();
  EXPECT_EQ(redis({"GET", "df:{0}:format"}).text, "1");
}

TEST_F(QueueFormat, AnotherFormatIsUnavailableAndChangesNothing) {
  jobs_in_every_state();
  redis({"SET", "df:{0}:format", "9"});
  pass_lease();
  const auto before = contents();
  const auto refused = [](const auto& result, const char* call) {
    ASSERT_FALSE(result.ok()) << call;
    EXPECT_EQ(result.error().code, Code::kUnavailable) << call << ": " << result.error().message;
    EXPECT_NE(result.error().message.find("format 9"), std::string::npos) << call << ": " << result.error().message;
  };
  const Attempt& running = attempts_["running"];
  const queue::Renewal renewal{running, 3, 20};
  const queue::AssignRequest request{{"ready", 0}, new_nonce(), "warm"};
  refused(wait(client_->submit(submission("another"), soon())), "submit");
  refused(wait(client_->cancel("running", "", soon())), "cancel");
  refused(wait(client_->job("running", "", soon())), "job");
  refused(wait(client_->list("", std::nullopt, 10, "", soon())), "list");
  refused(wait(client_->events("running", "0", 10, soon())), "events");
  refused(wait(client_->workers(soon())), "workers");
  refused(wait(client_->lead("coordinator-2", 1000, soon())), "lead");
  refused(wait(client_->open_units(std::chrono::seconds(5))), "open_units");
  refused(wait(client_->assign(epoch_, "w0:boot0", std::span(&request, 1), soon())), "assign");
  refused(wait(client_->revoke(epoch_, std::span(&attempts_["assigned"], 1), soon())), "revoke");
  refused(wait(client_->reap(epoch_, 100, soon())), "reap");
  refused(wait(client_->renew(std::span(&renewal, 1), soon())), "renew");
  refused(start(attempts_["assigned"]), "start");
  refused(complete(running), "complete");
  refused(wait(client_->fail({.attempt = running, .error = unavailable("x")}, soon())), "fail");
  refused(wait(client_->hand_back(std::span(&running, 1), soon())), "hand_back");
  refused(wait(client_->canceled(attempts_["canceling"], soon())), "canceled");
  refused(wait(client_->emit(running, "preview", {}, soon())), "emit");
  refused(wait(client_->forget("succeeded", soon())), "forget");
  const auto entries = intake();
  ASSERT_EQ(entries.size(), 1u);
  const queue::Admission admission_of_it = admission(entries[0]);
  refused(wait(client_->admit(epoch_, std::span(&admission_of_it, 1), soon())), "admit");
  EXPECT_EQ(contents(), before);

  redis({"SET", "df:{0}:format", "1"});
  EXPECT_TRUE(complete(running).ok());
}

TEST_F(QueueFormat, AUnitThatCannotBeReadIsLeftAlone) {
  jobs_in_every_state();
  const std::string states[] = {"ready", "assigned", "running", "canceling", "delayed"};
  std::map<std::string, std::string> sets;
  for (const auto& id : states) {
    sets[id] = set_of(id + ":0");
    damage_unit(id);
  }
  pass_lease();
  for (int i = 0; i < 3; ++i) reap();
  EXPECT_FALSE(wait(client_->cancel("running", "", soon())).ok());
  EXPECT_EQ(complete(attempts_["running"]).error().code, Code::kUnavailable);
  EXPECT_EQ(start(attempts_["assigned"]).error().code, Code::kUnavailable);
  EXPECT_EQ(wait(client_->fail({.attempt = attempts_["running"], .error = unavailable("x")}, soon())).error().code,
            Code::kUnavailable);
  EXPECT_EQ(renew(attempts_["running"]), queue::RenewOutcome::kOk) << "its worker must go on";
  EXPECT_TRUE(wait(client_->hand_back(std::span(&attempts_["running"], 1), soon())).ok());
  for (const auto& id : states) {
    EXPECT_EQ(unit_of(id), "7:from a later version") << id;
    EXPECT_EQ(set_of(id + ":0"), sets[id]) << id;
    EXPECT_EQ(wait(client_->job(id, "", soon())).error().code, Code::kUnavailable) << id;
  }
  // The others go on, also those of the same calls.
  const auto page = wait(client_->list("", std::nullopt, 100, "", soon()));
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(page->jobs.size(), 2u);  // queued, succeeded
  EXPECT_TRUE(wait(client_->open_units(std::chrono::seconds(5)))->empty());
  admit_all();
  const Attempt attempt = assign("queued");
  EXPECT_TRUE(start(attempt).ok());
  EXPECT_TRUE(complete(attempt).ok());
  EXPECT_EQ(redis({"XLEN", keys_.dead()}).integer, 0);
}

TEST_F(QueueFormat, AUnitThatIsInNoSetIsPutBack) {
  jobs_in_every_state();
  const std::string states[] = {"ready", "assigned", "running", "canceling", "delayed"};
  std::map<std::string, std::string> sets;
  for (const auto& id : states) sets[id] = set_of(id + ":0");
  redis({"DEL", keys_.ready(), keys_.delayed(), keys_.lease()});
  redis({"ZADD", keys_.delayed(), "1", "running:0"});  // and in a wrong one
  damage_unit("assigned");
  const auto mended = wait(client_->mend(epoch_, std::chrono::seconds(5)));
  ASSERT_TRUE(mended.ok()) << mended.error().message;
  EXPECT_EQ(mended->put_back, 4);
  EXPECT_EQ(mended->unreadable, 1);
  for (const auto& id : states) EXPECT_EQ(set_of(id + ":0"), id == "assigned" ? "" : sets[id]) << id;
  EXPECT_EQ(wait(client_->mend(epoch_, std::chrono::seconds(5)))->put_back, 0);
  EXPECT_TRUE(complete(attempts_["running"]).ok());
  redis({"ZADD", keys_.lease(), "1", "assigned:0"});  // for the standing check
}

TEST_F(QueueFormat, AJobThatCannotBeReadIsLeftAlone) {
  auto late = submission("late");
  late.deadline_in_ms = 300;
  submit(late);
  submit(submission("waiting"));
  lead();
  for (const char* id : {"late", "waiting"}) redis({"HSET", keys_.open(), id, "9:1|later"});
  pass_lease();
  reap();
  admit_all();  // leaves both entries
  EXPECT_EQ(redis({"XLEN", keys_.in()}).integer, 2);
  EXPECT_EQ(redis({"HGET", keys_.open(), "late"}).text, "9:1|later");
  EXPECT_FALSE(redis({"ZSCORE", keys_.deadline(), "late"}).is_nil());
  EXPECT_EQ(wait(client_->submit(submission("late"), soon())).error().code, Code::kUnavailable);
  const std::string next = submit();
  admit_all();
  EXPECT_EQ(job(next).state, job::State::kReady);
}

TEST_F(QueueFormat, AnEndedJobThatCannotBeReadIsNotForgotten) {
  const Attempt attempt = running();
  EXPECT_TRUE(complete(attempt).ok());
  redis({"HSET", keys_.job(attempt.ref.job), "o", "9:1|later"});
  EXPECT_FALSE(*wait(client_->forget(attempt.ref.job, soon())));
  EXPECT_EQ(redis({"EXISTS", keys_.job(attempt.ref.job)}).integer, 1);
}

TEST_F(QueueFormat, AnOlderLibraryThatDoesNotKnowTheFormatIsReplaced) {
  submit();
  const auto listed = redis({"FUNCTION", "LIST", "LIBRARYNAME", "ditfleet_v3", "WITHCODE"});
  std::string text = listed.elements.at(0).elements.at(7).text;
  const auto replace = [&text](const std::string& from, const std::string& to) {
    const auto at = text.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
  };
  replace("local format, readable = '1', {['1'] = true}", "local format, readable = '0', {['0'] = true}");
  replace("return '" + std::to_string(queue::library_build()) + " ", "return '1 ");
  redis({"FUNCTION", "LOAD", "REPLACE", text});
  EXPECT_FALSE(submit().empty());
}

}  // namespace
}  // namespace ditfleet::testing
