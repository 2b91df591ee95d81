// What a Redis connection decides, by plain calls: no socket, no clock.
#include <gtest/gtest.h>

#include "shared/redis/session.h"

namespace ditfleet::redis {
namespace {

ConnectionOptions options(const char* url = "redis://127.0.0.1:6379") {
  ConnectionOptions out;
  out.endpoint = *Endpoint::parse(url);
  return out;
}

constexpr char kGreeting[] = "*1\r\n$4\r\nPING\r\n*2\r\n$5\r\nHELLO\r\n$1\r\n2\r\n";
constexpr char kPrimary[] = "+PONG\r\n*4\r\n$5\r\nproto\r\n:2\r\n$4\r\nrole\r\n$6\r\nmaster\r\n";
constexpr char kReplica[] = "+PONG\r\n*2\r\n$4\r\nrole\r\n$7\r\nreplica\r\n";

class RedisSession : public ::testing::Test {
 protected:
  explicit RedisSession(ConnectionOptions o = options()) : session_(o, [] { return 0.5; }) {}
  void greet() {
    EXPECT_EQ(session_.start().what, Step::Do::kConnect);
    EXPECT_EQ(session_.connected().what, Step::Do::kRead);
    session_.take_output();
    EXPECT_EQ(session_.received(kPrimary).what, Step::Do::kRead);
    ASSERT_TRUE(session_.ready());
  }
  Session session_;
};

TEST_F(RedisSession, CommandsOfBeforeTheFirstConnectionAreSentOnceItStands) {
  const auto id = session_.submit({Command("GET") << "a"});
  ASSERT_TRUE(id.ok());
  session_.start();
  session_.connected();
  EXPECT_EQ(session_.take_output(), kGreeting);
  session_.received(kPrimary);
  EXPECT_EQ(session_.take_output(), "*2\r\n$3\r\nGET\r\n$1\r\na\r\n");
  session_.received("$1\r\n");
  EXPECT_TRUE(session_.take_done().empty());  // half a reply
  session_.received("x\r\n");
  auto done = session_.take_done();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, *id);
  EXPECT_EQ(done[0].replies.at(0)->text, "x");
}

TEST_F(RedisSession, PipelinedRepliesFindTheirCommands) {
  greet();
  const auto first = session_.submit({Command("A"), Command("B")});
  const auto second = session_.submit({Command("C")});
  session_.received(":1\r\n-ERR no\r\n*2\r\n$-1\r\n+OK\r\n");
  auto done = session_.take_done();
  ASSERT_EQ(done.size(), 2u);
  EXPECT_EQ(done[0].id, *first);
  EXPECT_EQ(done[0].replies.at(0)->integer, 1);
  EXPECT_EQ(done[0].replies.at(1).error().code, Code::kInternal);
  EXPECT_EQ(done[0].replies.at(1).error().source, Source::kRedis);
  EXPECT_EQ(done[0].replies.at(1).error().kind, "ERR");
  EXPECT_EQ(done[1].id, *second);
  EXPECT_TRUE(done[1].replies.at(0)->elements.at(0).is_nil());
}

TEST_F(RedisSession, WhatWasSentWhenTheConnectionBrokeIsNotSentAgain) {
  greet();
  ASSERT_TRUE(session_.submit({Command("INCR") << "n"}).ok());
  session_.take_output();
  const Step step = session_.disconnected("reset by peer");
  EXPECT_EQ(step.what, Step::Do::kWait);
  EXPECT_EQ(step.wait.count(), 0);  // the first try comes at once
  auto done = session_.take_done();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].replies.at(0).error().code, Code::kUnavailable);
  EXPECT_EQ(done[0].replies.at(0).error().source, Source::kRedisConnection);
  session_.waited();
  session_.connected();
  EXPECT_EQ(session_.take_output(), kGreeting);
  session_.received(kPrimary);
  EXPECT_EQ(session_.take_output(), "");
  EXPECT_EQ(session_.generation(), 2u);
}

TEST_F(RedisSession, FailuresBackOffUpToTheLimit) {
  session_.start();
  std::chrono::milliseconds last{0};
  for (int i = 0; i < 12; ++i) {
    const Step step = session_.connect_failed("refused");
    ASSERT_EQ(step.what, Step::Do::kWait);
    EXPECT_GE(step.wait, last);
    EXPECT_LE(step.wait.count(), 2000);
    last = step.wait;
    session_.waited();
  }
  EXPECT_EQ(last.count(), 1500);  // 2000 with a jitter of one half
}

TEST_F(RedisSession, AReplyThatComesAfterItsDeadlineIsDropped) {
  greet();
  const auto late = session_.submit({Command("SLOW")});
  const auto next = session_.submit({Command("GET") << "a"});
  EXPECT_EQ(session_.abandon(*late).code, Code::kDeadlineExceeded);
  session_.received("+late\r\n+mine\r\n");
  auto done = session_.take_done();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, *next);
  EXPECT_EQ(done[0].replies.at(0)->text, "mine");
}

TEST_F(RedisSession, SeveralUnansweredRequestsMeanThatThePeerIsGone) {
  greet();
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(session_.looks_dead());
    session_.abandon(*session_.submit({Command("PING")}));
  }
  EXPECT_TRUE(session_.looks_dead());
  session_.received("+PONG\r\n");
  EXPECT_FALSE(session_.looks_dead());
}

TEST_F(RedisSession, JunkClosesTheConnection) {
  greet();
  EXPECT_EQ(session_.received("HTTP/1.1 400 Bad Request\r\n").what, Step::Do::kClose);
  EXPECT_NE(session_.close_reason().message.find("not RESP2"), std::string::npos);
}

TEST_F(RedisSession, AReplicaIsNotReady) {
  session_.start();
  session_.connected();
  EXPECT_EQ(session_.received(kReplica).what, Step::Do::kClose);
  EXPECT_FALSE(session_.ready());
  EXPECT_NE(session_.close_reason().message.find("redis.url must name the primary"), std::string::npos);
  const Step step = session_.closed();
  EXPECT_EQ(step.what, Step::Do::kWait);
  EXPECT_GT(step.wait.count(), 0);
}

TEST_F(RedisSession, AProxyWithoutHelloCountsAsAPrimary) {
  session_.start();
  session_.connected();
  EXPECT_EQ(session_.received("+PONG\r\n-ERR unknown command 'HELLO'\r\n").what, Step::Do::kRead);
  EXPECT_TRUE(session_.ready());
}

TEST_F(RedisSession, AReadOnlyReplyClosesTheConnection) {
  greet();
  ASSERT_TRUE(session_.submit({Command("SET") << "a" << 1}).ok());
  ASSERT_TRUE(session_.submit({Command("SET") << "b" << 1}).ok());
  EXPECT_EQ(session_.received("-READONLY You can't write against a read only replica.\r\n").what, Step::Do::kClose);
  session_.closed();
  const auto done = session_.take_done();
  ASSERT_EQ(done.size(), 2u);
  for (const auto& one : done) EXPECT_EQ(one.replies.at(0).error().code, Code::kUnavailable);
  EXPECT_FALSE(session_.ready());
}

TEST_F(RedisSession, StoppedMeansStopped) {
  greet();
  ASSERT_TRUE(session_.submit({Command("GET") << "a"}).ok());
  EXPECT_EQ(session_.stop().what, Step::Do::kEnd);
  EXPECT_FALSE(session_.take_done().at(0).replies.at(0).ok());
  EXPECT_FALSE(session_.submit({Command("PING")}).ok());
  EXPECT_EQ(session_.connected().what, Step::Do::kEnd);
}

class RedisLogin : public RedisSession {
 protected:
  RedisLogin() : RedisSession(options("redis://ditfleet:s3cret@10.0.0.1:6380/2")) {}
};

TEST_F(RedisLogin, LogsInAndSelectsBeforeAnythingElse) {
  session_.start();
  session_.connected();
  const std::string out = session_.take_output();
  EXPECT_NE(out.find("AUTH"), std::string::npos);
  EXPECT_LT(out.find("AUTH"), out.find("SELECT"));
  EXPECT_LT(out.find("SELECT"), out.find("PING"));
  ASSERT_TRUE(session_.submit({Command("GET") << "a"}).ok());
  EXPECT_EQ(session_.received("-WRONGPASS invalid username-password pair\r\n").what, Step::Do::kClose);
  EXPECT_EQ(session_.closed().what, Step::Do::kWait);
  auto done = session_.take_done();
  ASSERT_EQ(done.size(), 1u);  // told at once: waiting would not help
  const Error& error = done[0].replies.at(0).error();
  EXPECT_EQ(error.code, Code::kPermissionDenied);
  EXPECT_NE(error.message.find("10.0.0.1:6380"), std::string::npos) << error.message;
  EXPECT_EQ(error.message.find("s3cret"), std::string::npos) << error.message;
}

TEST_F(RedisLogin, ARedisThatLoadsItsFileIsNotReady) {
  session_.start();
  session_.connected();
  session_.received("+OK\r\n+OK\r\n");
  EXPECT_EQ(session_.received("-LOADING Redis is loading the dataset in memory\r\n").what, Step::Do::kClose);
  EXPECT_FALSE(session_.ready());
}

TEST_F(RedisSession, AClusterOfSeveralShardsIsRefused) {
  constexpr char kCluster[] = "+PONG\r\n*4\r\n$4\r\nmode\r\n$7\r\ncluster\r\n$4\r\nrole\r\n$6\r\nmaster\r\n";
  session_.start();
  session_.connected();
  session_.take_output();
  EXPECT_EQ(session_.received(kCluster).what, Step::Do::kRead);
  EXPECT_EQ(session_.take_output(), "*2\r\n$7\r\nCLUSTER\r\n$4\r\nINFO\r\n");
  EXPECT_EQ(session_.received("$34\r\ncluster_state:ok\r\ncluster_size:3\r\n\r\n").what, Step::Do::kClose);
  EXPECT_NE(session_.close_reason().message.find("Redis Cluster with several shards"), std::string::npos);
  session_.closed();
  session_.waited();
  session_.connected();
  session_.received(kCluster);
  EXPECT_EQ(session_.received("$34\r\ncluster_state:ok\r\ncluster_size:1\r\n\r\n").what, Step::Do::kRead);
  EXPECT_TRUE(session_.ready());
  const auto id = session_.submit({Command("GET") << "a"});
  EXPECT_EQ(session_.received("-MOVED 15495 127.0.0.1:7001\r\n").what, Step::Do::kClose);
  const auto done = session_.take_done();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].id, *id);
  EXPECT_EQ(done[0].replies.at(0).error().code, Code::kUnavailable);
}

TEST_F(RedisSession, AMissingPermissionNamesTheUserAndTheCommandThatPrintsThem) {
  greet();
  (void)session_.submit({Command("GET"), Command("FCALL")});
  session_.received("-NOPERM User default has no permissions to run the 'get' command\r\n");
  session_.received("-ERR The user executing the script can't run this command or subcommand script: x\r\n");
  const auto done = session_.take_done();
  ASSERT_EQ(done.size(), 1u);
  for (const auto& reply : done[0].replies) {
    ASSERT_FALSE(reply.ok());
    EXPECT_EQ(reply.error().code, Code::kPermissionDenied);
    EXPECT_NE(reply.error().message.find("`ditfleet redis acl`"), std::string::npos) << reply.error().message;
    EXPECT_NE(reply.error().message.find("'default'"), std::string::npos) << reply.error().message;
  }
}

TEST(RedisReply, AnErrorReplyHasACodeAndAKind) {
  EXPECT_EQ(error_of_reply("OOM command not allowed").code, Code::kResourceExhausted);
  EXPECT_EQ(error_of_reply("OOM command not allowed").kind, "OOM");
  EXPECT_EQ(error_of_reply("ERR Function not found").kind, "NOFUNCTION");
  EXPECT_EQ(error_of_reply("EPOCH 3 does not lead this shard").code, Code::kConflict);
}

TEST(RedisEndpoint, ReadsEveryForm) {
  const auto tls = Endpoint::parse("rediss://user:pa%40ss@example.com:7000/3");
  ASSERT_TRUE(tls.ok()) << tls.error().message;
  EXPECT_TRUE(tls->tls);
  EXPECT_EQ(tls->password, "pa@ss");
  EXPECT_EQ(tls->port, 7000);
  EXPECT_EQ(tls->db, 3);
  EXPECT_EQ(Endpoint::parse("unix:///run/redis.sock?db=2")->unix_path, "/run/redis.sock");
  EXPECT_EQ(Endpoint::parse("redis://example.com")->port, 6379);
  for (const char* bad : {"",
                          "example.com",
                          "http://example.com",
                          "redis://",
                          "redis://h:port",
                          "redis://h:0",
                          "redis://h:70000",
                          "redis://h/x",
                          "unix://",
                          "redis://[h]",
                          "redis://[[::1]:1",
                          "redis://a b",
                          "redis://a,b",
                          "redis+sentinel://h",
                          "redis+sentinel:///queue",
                          "redis+sentinel://h//0",
                          "redis+sentinel://a,,b/queue",
                          "redis+sentinel://h/queue/x",
                          "redis+sentinel://h:0/queue",
                          "redis+sentinel://h/a b",
                          "unix+sentinel:///queue"}) {
    const auto endpoint = Endpoint::parse(bad);
    EXPECT_FALSE(endpoint.ok()) << bad;
    if (!endpoint) {
      EXPECT_EQ(endpoint.error().code, Code::kInvalidArgument) << bad;
    }
  }
  for (const char* url :
       {"rediss://user:pa%40ss@example.com:7000/3", "unix://:a%2Fb%25@/srv/my%20data%3F/redis.sock?db=2",
        "redis://[::1]:1", "rediss+sentinel://user:pa%2Fss@a:1,[::1]:26379/queue/2"}) {
    EXPECT_EQ(Endpoint::parse(url)->url(), url);
  }
  const auto sentinels = Endpoint::parse("redis+sentinel://:s3cret@a,b:7/queue");
  ASSERT_TRUE(sentinels.ok()) << sentinels.error().message;
  EXPECT_EQ(sentinels->sentinels, (std::vector<Endpoint::Node>{{"a", 26379}, {"b", 7}}));
  EXPECT_EQ(sentinels->service, "queue");
  EXPECT_EQ(sentinels->display(), "redis+sentinel://a:26379,b:7/queue");
  EXPECT_EQ(Endpoint::parse("unix://:a%2Fb%25@/srv/my%20data%3F/redis.sock?db=2")->password, "a/b%");
  const auto secret = Endpoint::parse("redis://u:hunter2@h:port");
  ASSERT_FALSE(secret.ok());
  EXPECT_EQ(secret.error().message.find("hunter2"), std::string::npos);
  EXPECT_EQ(Endpoint::parse("redis://u:hunter2@h:1")->display().find("hunter2"), std::string::npos);
}

}  // namespace
}  // namespace ditfleet::redis
