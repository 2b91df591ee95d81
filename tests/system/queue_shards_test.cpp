// Two shards, and a Redis in cluster mode, which refuses a Function that touches another slot's key.
#include <signal.h>

#include <thread>

#include "tests/system/queue_fixture.h"
#include "tests/system/redis_proxy.h"

namespace ditfleet::testing {
namespace {

using job::State;

// A job through all its states on one shard, by a client of that shard.
class QueueShards : public QueueTest {
 protected:
  explicit QueueShards(RedisServer::Options server = {}) : QueueTest(server) {}

  std::unique_ptr<queue::Client> client_of(int shard) {
    queue::QueueOptions options;
    options.shard = shard;
    return std::make_unique<queue::Client>(connection_, options);
  }
  std::string whole_life(queue::Client& client, const std::string& id) {
    auto s = submission(id);
    s.idempotency_key = "key";
    s.deadline_ms = 4'000'000'000'000;
    EXPECT_TRUE(wait(client.submit(s, soon())).ok());
    auto repeated = s;
    repeated.id = id + "-again";
    EXPECT_TRUE(wait(client.submit(repeated, soon()))->existed);
    const auto epoch = wait(client.lead("c", 60'000, soon()));
    EXPECT_TRUE(epoch.ok());
    auto entries = wait(client.read_intake(10, std::chrono::milliseconds(1)));
    EXPECT_EQ(entries->size(), 1u);
    const auto a = admission(entries->at(0), 2);
    EXPECT_TRUE(wait(client.admit(*epoch, std::span(&a, 1), soon())).ok());
    std::vector<queue::AssignRequest> requests = {{{id, 0}, new_nonce(), ""}, {{id, 1}, new_nonce(), ""}};
    EXPECT_TRUE(wait(client.assign(*epoch, "w:b", requests, soon())).ok());
    auto mail = wait(client.read_mailbox("w:b", "0", 10, std::chrono::milliseconds(1)));
    EXPECT_EQ(mail->size(), 2u);
    std::vector<queue::Attempt> attempts;
    std::vector<std::string> ids;
    for (const auto& m : *mail) {
      attempts.push_back({m.ref, m.nonce});
      ids.push_back(m.entry_id);
      EXPECT_EQ(m.spec, kSpec);
    }
    EXPECT_TRUE(wait(client.acknowledge("w:b", ids, soon())).ok());
    for (const auto& attempt : attempts) EXPECT_TRUE(wait(client.start(attempt, soon())).ok());
    queue::WorkerInfo worker;
    worker.name = "w";
    worker.boot = "b";
    for (const auto& attempt : attempts) worker.units.push_back(attempt.ref);
    EXPECT_TRUE(wait(client.heartbeat(worker, soon())).ok());
    EXPECT_EQ(wait(client.workers(soon(), true))->at(0).tenants.at(id), "default");
    const std::vector<queue::Renewal> renewals = {{attempts[0], 1, 4}, {attempts[1], 1, 4}};
    EXPECT_EQ(wait(client.renew(renewals, soon()))->at(0), queue::RenewOutcome::kOk);
    EXPECT_TRUE(wait(client.emit(attempts[0], "preview", {{"key", "p"}}, soon())).ok());
    queue::Completion c{attempts[0], R"({"key":"k"})", {}, {}};
    EXPECT_TRUE(wait(client.complete(c, soon())).ok());
    queue::Failure f{attempts[1], Error{Code::kInternal, "broke", {}}, false, false};
    EXPECT_TRUE(wait(client.fail(f, soon())).ok());
    EXPECT_TRUE(wait(client.reap(*epoch, 10, soon())).ok());
    const auto record = wait(client.job(id, "", soon()));
    EXPECT_TRUE(record.ok());
    auto events = wait(client.events(id, "0", 100, soon()));
    std::string out;
    std::int64_t last = 0, last_seq = -1;
    for (const auto& e : *events) {
      out += e.type + " ";
      const auto ms = std::stoll(e.id), seq = std::stoll(e.id.substr(e.id.find('-') + 1));
      EXPECT_TRUE(ms > last || (ms == last && seq > last_seq)) << e.id << " is not behind " << last << "-" << last_seq;
      last = ms;
      last_seq = seq;
    }
    // Resumed behind any of them, exactly the rest comes.
    for (std::size_t i = 0; i < events->size(); ++i) {
      const auto rest = wait(client.events(id, events->at(i).id, 100, soon()));
      EXPECT_EQ(rest->size(), events->size() - i - 1) << events->at(i).id;
      if (!rest->empty()) {
        EXPECT_EQ(rest->front().id, events->at(i + 1).id);
      }
    }
    return out;
  }
  static constexpr char kLife[] =
      "queued ready ready assigned assigned started started step step preview succeeded failed failed ";
};

TEST_F(QueueShards, TwoShardsOfOneRedisDoNotMix) {
  const auto zero = client_of(0), one = client_of(1);
  EXPECT_EQ(whole_life(*one, "job-1"), kLife);
  EXPECT_FALSE(wait(zero->job("job-1", "", soon())).ok());
  for (const auto& key : redis({"KEYS", "*"}).elements) EXPECT_EQ(key.text.rfind("df:{1}:", 0), 0u) << key.text;
  EXPECT_EQ(whole_life(*zero, "job-1"), kLife);  // the same id and idempotency key, another shard: another job
  EXPECT_EQ(wait(zero->list("", std::nullopt, 10, "", soon()))->jobs.size(), 1u);
  EXPECT_EQ(redis({"XLEN", queue::Keys(1).dead()}).integer, 1);
}

TEST_F(QueueShards, AFeedFollowsItsOwnShard) {
  const auto zero = client_of(0), one = client_of(1);
  queue::Feed feed(connection_, 1, true);
  EXPECT_TRUE(wait(feed.next(std::chrono::milliseconds(2000)))->gap);
  EXPECT_EQ(whole_life(*zero, "of-zero"), kLife);
  EXPECT_EQ(whole_life(*one, "of-one"), kLife);
  std::string seen;
  for (;;) {
    auto batch = wait(feed.next(std::chrono::milliseconds(200)));
    ASSERT_TRUE(batch.ok());
    EXPECT_FALSE(batch->gap);
    if (batch->events.empty()) break;
    for (const auto& e : batch->events) {
      EXPECT_EQ(e.job, "of-one");
      seen += e.type + " ";
    }
  }
  // Lifecycle and steps come on two channels; together they are all of them.
  EXPECT_EQ(seen.size(), std::string(kLife).size()) << seen;
}

TEST_F(QueueShards, AFeedWhoseMessagesVanishSubscribesAgain) {
  RedisProxy proxy(server_.endpoint().unix_path, server_.endpoint().unix_path + ".proxy");
  redis::ConnectionOptions options{.endpoint = server_.endpoint()};
  options.endpoint.unix_path = proxy.path();
  const auto through = redis::Connection::create(io_.get_executor(), options);
  through->start();
  queue::Feed feed(through, 0, true, std::chrono::milliseconds(100));
  EXPECT_FALSE(feed.hears());
  const auto next = [&] { return wait(feed.next(std::chrono::milliseconds(50))); };
  EXPECT_TRUE(next()->gap);
  EXPECT_TRUE(feed.hears());
  for (int i = 0; i < 20; ++i) {  // 1 s with probes alone, also of another process
    redis({"PUBLISH", keys_.feed_channel(), "probe of-another 1"});
    const auto batch = next();
    ASSERT_TRUE(batch.ok() && batch->events.empty() && !batch->gap);
    ASSERT_TRUE(feed.hears());
  }
  ::kill(server_.pid(), SIGSTOP);  // a Redis that does not take a probe says nothing about the subscription
  for (int i = 0; i < 20; ++i) (void)next();
  ::kill(server_.pid(), SIGCONT);
  for (int i = 0; i < 20; ++i) {
    const auto batch = next();
    ASSERT_TRUE(batch.ok() && !batch->gap);
  }
  proxy.deafen();
  const auto limit = soon();
  const auto until = [&](auto condition) {
    while (!limit.passed()) {
      const auto batch = next();
      if (condition(batch)) return true;
    }
    return false;
  };
  EXPECT_TRUE(until([&](const auto&) { return !feed.hears(); }));
  EXPECT_TRUE(until([](const auto& batch) { return batch && batch->gap; }));
  EXPECT_TRUE(feed.hears());
  const auto id = submit();
  EXPECT_TRUE(until([&](const auto& batch) { return batch && !batch->events.empty() && batch->events[0].job == id; }));
  through->stop();
}

class QueueCluster : public QueueShards {
 protected:
  // Without a port for the cluster bus Redis takes its own plus 10,000, which may be none.
  QueueCluster()
      : QueueShards({.tcp = true, .extra = {"cluster-enabled yes", "cluster-port " + std::to_string(free_port())}}) {}
};

TEST_F(QueueCluster, EveryTransitionStaysInItsShardsSlot) {
  redis({"CLUSTER", "ADDSLOTSRANGE", "0", "16383"});
  for (int i = 0; i < 100 && redis({"CLUSTER", "INFO"}).text.find("cluster_state:ok") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  for (const int shard : {0, 1}) {
    const auto client = client_of(shard);
    EXPECT_EQ(whole_life(*client, "job-1"), kLife) << "shard " << shard;
  }
}

}  // namespace
}  // namespace ditfleet::testing
