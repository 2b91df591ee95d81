// The connection against real servers: passwords, TLS, a server that goes and comes back.
#include <netinet/tcp.h>

#include "tests/system/queue_fixture.h"

namespace ditfleet::testing {
namespace {

class RedisConnection : public ::testing::Test {
 protected:
  ~RedisConnection() override {
    for (auto& c : connections_) c->stop();
    io_.restart();
    io_.run_for(std::chrono::milliseconds(50));
  }
  std::shared_ptr<redis::Connection> connect(const redis::Endpoint& endpoint) {
    redis::ConnectionOptions options;
    options.endpoint = endpoint;
    auto connection = redis::Connection::create(io_.get_executor(), options);
    connection->start();
    connections_.push_back(connection);
    return connection;
  }
  Result<redis::Reply> ask(const redis::Endpoint& endpoint, const char* command = "PING",
                           std::chrono::milliseconds within = std::chrono::seconds(3)) {
    return ask(*connect(endpoint), command, within);
  }
  Result<redis::Reply> ask(redis::Connection& connection, const char* command,
                           std::chrono::milliseconds within = std::chrono::seconds(3)) {
    std::optional<Result<redis::Reply>> out;
    asio::co_spawn(
        io_,
        [&]() -> asio::awaitable<void> {
          out.emplace(co_await connection.execute(redis::Command(command), Deadline::after(within)));
        },
        asio::detached);
    io_.restart();
    while (!out && io_.run_one() > 0) {
    }
    return std::move(*out);
  }

  asio::io_context io_;
  std::vector<std::shared_ptr<redis::Connection>> connections_;
};

TEST_F(RedisConnection, APasswordIsNeededAndMustBeRight) {
  RedisServer server({.tcp = true, .password = "s3cret"});
  auto endpoint = server.endpoint();
  EXPECT_TRUE(ask(endpoint).ok());
  endpoint.password = "guess";
  auto wrong = ask(endpoint);
  ASSERT_FALSE(wrong.ok());
  EXPECT_EQ(wrong.error().code, Code::kPermissionDenied) << wrong.error().message;
  EXPECT_NE(wrong.error().message.find("WRONGPASS"), std::string::npos) << wrong.error().message;
  EXPECT_EQ(wrong.error().message.find("guess"), std::string::npos) << "a message repeats the password";
  endpoint.password.clear();
  auto none = ask(endpoint);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().code, Code::kPermissionDenied) << none.error().message;
  EXPECT_NE(none.error().message.find("NOAUTH"), std::string::npos) << none.error().message;
}

TEST_F(RedisConnection, TlsIsVerified) {
  RedisServer server({.tls = true, .password = "s3cret"});
  EXPECT_EQ(server.url().rfind("rediss://", 0), 0u);
  EXPECT_TRUE(ask(server.endpoint()).ok());
  auto unknown = server.endpoint();
  unknown.tls_ca_file.clear();
  auto refused = ask(unknown);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("certificate"), std::string::npos) << refused.error().message;
  unknown.tls_verify = false;
  EXPECT_TRUE(ask(unknown).ok());
  auto plain = server.endpoint();
  plain.tls = false;
  EXPECT_FALSE(ask(plain).ok());
}

TEST_F(RedisConnection, AServerMayRequireAClientCertificate) {
  RedisServer server({.tls = true, .extra = {"tls-auth-clients yes"}});
  auto endpoint = server.endpoint();
  auto refused = ask(endpoint);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.error().message.find("certificate required"), std::string::npos) << refused.error().message;
  endpoint.tls_cert_file = server.ca_file();
  endpoint.tls_key_file = std::filesystem::path(server.ca_file()).replace_filename("key.pem");
  auto accepted = ask(endpoint);
  EXPECT_TRUE(accepted.ok()) << accepted.error().message;
}

TEST_F(RedisConnection, ALostServerIsToldAndFoundAgain) {
  RedisServer server;
  auto connection = connect(server.endpoint());
  ASSERT_TRUE(ask(*connection, "PING").ok());
  const auto generation = connection->generation();
  server.kill();
  auto lost = ask(*connection, "PING", std::chrono::seconds(1));
  ASSERT_FALSE(lost.ok());
  EXPECT_EQ(lost.error().code, Code::kUnavailable) << lost.error().message;
  server.restart();
  const auto until = Deadline::after(std::chrono::seconds(10));
  while (!ask(*connection, "PING", std::chrono::seconds(1)).ok() && !until.passed()) {
  }
  EXPECT_TRUE(ask(*connection, "PING").ok());
  EXPECT_GT(connection->generation(), generation);
}

TEST_F(RedisConnection, ADemotedServerIsLeftUntilItIsAPrimaryAgain) {
  RedisServer server({.tcp = true}), promoted({.tcp = true});
  queue::Client client(connect(server.endpoint()), {});
  const auto within = [] { return Deadline::after(std::chrono::seconds(2)); };
  ASSERT_TRUE(run_to_end(io_, client.load_library(within())).ok());
  // A connection of its own, which takes no part in what is tested.
  const auto administrator = connect(server.endpoint());
  const auto replica_of = [&](const std::string& host, const std::string& port) {
    return run_to_end(io_, administrator->execute(redis::Command("REPLICAOF") << host << port, within())).ok();
  };
  const auto connection = connect(server.endpoint());
  queue::Client demoted(connection, {});
  ASSERT_TRUE(ask(*connection, "PING").ok());
  ASSERT_TRUE(replica_of("127.0.0.1", std::to_string(promoted.endpoint().port)));
  queue::Submission submission{.spec = "{}"};
  const auto refused = run_to_end(io_, demoted.submit(submission, within()));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, Code::kUnavailable) << refused.error().message;
  const auto again = run_to_end(io_, demoted.submit(submission, within()));
  ASSERT_FALSE(again.ok());
  EXPECT_NE(again.error().message.find("read-only replica"), std::string::npos) << again.error().message;
  EXPECT_FALSE(connection->connected());
  ASSERT_TRUE(replica_of("NO", "ONE"));
  const auto until = Deadline::after(std::chrono::seconds(10));
  while (!run_to_end(io_, demoted.submit(submission, within())).ok() && !until.passed()) {
  }
  EXPECT_TRUE(connection->connected());
}

TEST_F(RedisConnection, NobodyThereIsAnErrorThatNamesThePlace) {
  auto endpoint = redis::Endpoint::parse("redis://127.0.0.1:" + std::to_string(free_port()));
  ASSERT_TRUE(endpoint.ok());
  auto nobody = ask(*endpoint, "PING", std::chrono::seconds(1));
  ASSERT_FALSE(nobody.ok());
  EXPECT_NE(nobody.error().message.find("127.0.0.1"), std::string::npos) << nobody.error().message;
}

TEST_F(RedisConnection, APeerThatVanishesEndsTheConnection) {
  RedisServer server({.tcp = true});
  const auto connection = connect(server.endpoint());
  ASSERT_TRUE(ask(*connection, "PING").ok());
  int found = 0;
  for (int fd = 0; fd < 1024; ++fd) {  // the socket of the connection, by its peer
    sockaddr_in peer{};
    socklen_t size = sizeof peer;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 || peer.sin_family != AF_INET ||
        ntohs(peer.sin_port) != server.endpoint().port)
      continue;
    const auto option = [&](int level, int name) {
      int value = 0;
      socklen_t bytes = sizeof value;
      ::getsockopt(fd, level, name, &value, &bytes);
      return value;
    };
    EXPECT_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 10'000);
    EXPECT_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
    EXPECT_LE(option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPINTVL), 10);
    ++found;
  }
  EXPECT_EQ(found, 1);
}

}  // namespace
}  // namespace ditfleet::testing
