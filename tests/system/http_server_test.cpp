// The HTTP server on a real socket: what clients do wrong, and what a connection costs. Everything that needs no Redis.
#include <random>

#include "tests/system/http_server_fixture.h"

namespace ditfleet::gateway {
namespace {

TEST_F(HttpServer, KeepsAConnectionForManyRequests) {
  start();
  RawClient client(port_);
  for (int i = 0; i < 3; ++i) {
    client.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_THAT(client.receive("alive\"}\n"), StartsWith("HTTP/1.1 200"));
  }
  // Two at once (pipelined) are answered in order.
  client.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nothing HTTP/1.1\r\n" + kClose);
  const std::string both = client.receive();
  EXPECT_LT(both.find("200 OK"), both.find("404 Not Found"));
  EXPECT_FALSE(client.timed_out);
}

TEST_F(HttpServer, HeadHasHeadersOnly) {
  start();
  const std::string whole = exchange("GET /v1/models HTTP/1.1\r\n" + kClose);
  const std::string head = exchange("HEAD /v1/models HTTP/1.1\r\n" + kClose);
  const std::string body = whole.substr(whole.find("\r\n\r\n") + 4);
  EXPECT_THAT(head, HasSubstr("Content-Length: " + std::to_string(body.size())));
  EXPECT_TRUE(head.ends_with("\r\n\r\n"));
}

TEST_F(HttpServer, RefusesWhatIsTooLarge) {
  ServerOptions options;
  options.max_body_bytes = 1000;
  start(options);
  EXPECT_THAT(exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n" +
                       kClose + std::string(100000, 'x')),
              StartsWith("HTTP/1.1 413"));
  // Without a length in advance.
  EXPECT_THAT(exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n" +
                       kClose + "800\r\n" + std::string(0x800, 'x') + "\r\n0\r\n\r\n"),
              StartsWith("HTTP/1.1 413"));
  // A polite client asks first, and need not send it.
  EXPECT_THAT(exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nExpect: "
                       "100-continue\r\nContent-Length: 100000\r\n" +
                       kClose),
              StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\nX: " + std::string(40000, 'x') + "\r\n" + kClose),
              StartsWith("HTTP/1.1 431"));
  EXPECT_THAT(exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 14\r\n" + kClose +
                       "{\"prompt\":\"x\"}"),
              StartsWith("HTTP/1.1 202"));
}

TEST_F(HttpServer, SaysContinueToAClientThatAsks) {
  start();
  RawClient client(port_);
  client.send(
      "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: 14\r\n" +
      kClose);
  EXPECT_THAT(client.receive("\r\n\r\n"), StartsWith("HTTP/1.1 100"));
  client.send("{\"prompt\":\"x\"}");
  EXPECT_THAT(client.receive(), StartsWith("HTTP/1.1 202"));
}

TEST_F(HttpServer, KeepsToTheFinePrintOfHttp) {
  start();
  EXPECT_THAT(exchange("\r\n\r\nGET /healthz HTTP/1.1\r\n" + kClose), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(exchange("GET http://elsewhere/healthz HTTP/1.1\r\n" + kClose), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(exchange("GET /healthz HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.0 200"));
  EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n"), StartsWith("HTTP/1.1 400"));
  EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\nHost: y\r\n" + kClose), StartsWith("HTTP/1.1 400"));
  // What stands in a coding that is not understood is no body, and not the next request either.
  for (const char* coding : {"identity", "gzip, chunked", "gzip"}) {
    const std::string answer = exchange(
        std::string(
            "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nTransfer-Encoding: ") +
        coding + "\r\n\r\nGET /healthz HTTP/1.1\r\n" + kClose);
    EXPECT_THAT(answer, testing::AnyOf(StartsWith("HTTP/1.1 501"), StartsWith("HTTP/1.1 400"))) << coding;
    EXPECT_EQ(answer.find("alive"), std::string::npos) << coding;
  }
}

TEST_F(HttpServer, JunkIsRefusedAndHarmsNobody) {
  start();
  const std::vector<std::string> junk = {
      "\r\n\r\n\r\n\r\nhello\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),  // a TLS hello
      "GET / HTTP/9.9\r\n\r\n",
      "GET  /  HTTP/1.1\r\n\r\n",
      "GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
      "GET /%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
      "GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
      "GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
      "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
      "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nContent-Length: "
      "99999999999999999999999\r\n\r\n",
      "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nTransfer-Encoding: "
      "chunked\r\n\r\nzz\r\n",
      "GET / HTTP/1.1\r\nBad Header\r\n\r\n",
      std::string(5000, '\0') + "\r\n\r\n",
      "*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\nb\r\n",
  };
  for (const auto& bytes : junk) {
    RawClient client(port_);
    client.send(bytes);
    client.finish_sending();
    const std::string answer = client.receive();
    EXPECT_FALSE(client.timed_out) << testing::PrintToString(bytes);
    if (!answer.empty()) {
      EXPECT_THAT(answer, testing::MatchesRegex("HTTP/1\\.1 [45][0-9][0-9] [^\r]*\r\n(.|\n|\r)*\"error\"(.|\n|\r)*"))
          << testing::PrintToString(bytes);
    }
  }
  std::mt19937 random(7);
  for (int i = 0; i < 100; ++i) {
    std::string bytes(random() % 600, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 2 != 0)
      bytes = "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: " +
              std::to_string(bytes.size()) + "\r\n" + kClose + bytes;
    RawClient client(port_);
    client.send(bytes);
    client.finish_sending();
    client.receive();
    EXPECT_FALSE(client.timed_out);
  }
  EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\n" + kClose), HasSubstr("alive"));
  EXPECT_TRUE(connections_become(0));
}

// While all connections are being answered, one more is served only if it asks for the service's health.
TEST_F(HttpServer, ConnectionsAreBounded) {
  ServerOptions options;
  options.max_connections = 3;
  start(options);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (std::size_t i = 0; i < 3; ++i) clients.push_back(wait_for_an_image(i + 1));
  for (int i = 0; i < 8; ++i) {
    EXPECT_THAT(exchange("GET /v1/models HTTP/1.1\r\n" + kClose),
                testing::AllOf(StartsWith("HTTP/1.1 503 "), HasSubstr("Retry-After: 1\r\n")));
    for (const char* path : {"/healthz", "/readyz", "/metrics"})
      EXPECT_THAT(exchange(std::string("GET ") + path + " HTTP/1.1\r\n" + kClose), StartsWith("HTTP/1.1 200 OK"))
          << path;
  }
  // However many others ask nothing.
  std::vector<std::unique_ptr<RawClient>> lazy;
  for (int i = 0; i < 12; ++i) {
    lazy.push_back(std::make_unique<RawClient>(port_));
    if (i % 2 != 0) lazy.back()->send("GET /healthz HTTP/1.1\r\nHo");
    EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\n" + kClose), StartsWith("HTTP/1.1 200 OK")) << i;
  }
  clients.clear();
  lazy.clear();
  EXPECT_TRUE(connections_become(0));
  EXPECT_THAT(exchange("GET /v1/models HTTP/1.1\r\n" + kClose), HasSubstr("200 OK"));
}

// Whoever sends a head and no body holds no place.
TEST_F(HttpServer, HalfSentBodiesMakeRoom) {
  ServerOptions options;
  options.max_connections = 4;
  start(options);
  std::vector<std::unique_ptr<RawClient>> half;
  RawClient idle(port_);
  idle.send("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
  EXPECT_THAT(idle.receive("alive\"}\n"), StartsWith("HTTP/1.1 200"));
  for (int i = 0; i < 12; ++i) {
    half.push_back(std::make_unique<RawClient>(port_));
    half.back()->send(
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        "Content-Length: 14\r\n\r\n");
    EXPECT_THAT(half.back()->receive("\r\n\r\n"), StartsWith("HTTP/1.1 100")) << i;
    EXPECT_THAT(exchange("GET /v1/models HTTP/1.1\r\n" + kClose), StartsWith("HTTP/1.1 200 OK")) << i;
  }
  EXPECT_EQ(half.front()->receive({}, 3s), "");
  EXPECT_FALSE(half.front()->timed_out);
  half.back()->send("{\"prompt\":\"x\"}");
  EXPECT_THAT(half.back()->receive("}\n"), StartsWith("HTTP/1.1 202")) << "the newest has stayed";
  idle.send("GET /healthz HTTP/1.1\r\n" + kClose);
  EXPECT_THAT(idle.receive(), StartsWith("HTTP/1.1 200")) << "and so has the one without a half-sent request";
}

TEST_F(HttpServer, BodiesThatAreBeingReadAreBoundedTogether) {
  ServerOptions options;
  options.max_body_bytes = 1000;
  options.max_arriving_bytes = 1;  // four bodies
  start(options);
  std::vector<std::unique_ptr<RawClient>> half;
  for (int i = 0; i < 5; ++i) {
    half.push_back(std::make_unique<RawClient>(port_));
    half.back()->send(
        "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n" +
        std::string(i % 2 != 0 ? "Transfer-Encoding: chunked" : "Content-Length: 1000") + "\r\n\r\n");
    EXPECT_THAT(half.back()->receive("\r\n\r\n"), StartsWith("HTTP/1.1 100")) << i;
  }
  EXPECT_EQ(half[0]->receive({}, 3s), "");
  EXPECT_FALSE(half[0]->timed_out);
  EXPECT_EQ(half[1]->receive({}, 50ms), "");
  EXPECT_TRUE(half[1]->timed_out) << "still open";
}

// Nobody without a key can make the server read, or even ask for, a body.
TEST_F(HttpServer, AKeyIsAskedForBeforeTheBody) {
  start({}, {{"acme", sha256_hex("right"), false}});
  const std::string head =
      "POST /v1/jobs HTTP/1.1\r\nHost: anywhere\r\nContent-Type: application/json\r\nContent-Length: 14\r\n";
  for (const std::string rest : {"\r\n", "Authorization: Bearer wrong\r\n\r\n", "Expect: 100-continue\r\n\r\n"}) {
    RawClient client(port_);
    client.send(head + rest);
    EXPECT_THAT(client.receive("}\n"),
                testing::AllOf(StartsWith("HTTP/1.1 401 "), HasSubstr("Connection: close\r\n"),
                               HasSubstr("WWW-Authenticate: Bearer\r\n"), HasSubstr("X-Request-Id: ")))
        << rest;
    EXPECT_FALSE(client.timed_out) << rest;
  }
  EXPECT_THAT(exchange("POST /v1/nothing HTTP/1.1\r\nContent-Length: 14\r\n" + kClose), StartsWith("HTTP/1.1 404"));
  RawClient client(port_);
  client.send(head + "Authorization: Bearer right\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_THAT(client.receive("\r\n\r\n"), StartsWith("HTTP/1.1 100"));
  client.send("{\"prompt\":\"x\"}");
  EXPECT_THAT(client.receive("}\n"), StartsWith("HTTP/1.1 202"));
}

TEST_F(HttpServer, AStreamIsChunkedAndEndsWithTheJob) {
  start();
  RawClient client(port_);
  exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 14\r\n" + kClose +
           "{\"prompt\":\"x\"}");
  client.send("GET /v1/jobs/job-1/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const std::string first = client.receive("event: queued");
  EXPECT_THAT(first, HasSubstr("Transfer-Encoding: chunked"));
  EXPECT_THAT(first, HasSubstr("Content-Type: text/event-stream"));
  on_server([&] { service_.admit("job-1"); });
  EXPECT_THAT(client.receive("event: ready"), HasSubstr("event: ready"));
  on_server([&] { service_.fail("job-1", {Code::kInternal, "x", {}}); });
  const std::string rest = client.receive();
  EXPECT_THAT(rest, HasSubstr("event: failed"));
  EXPECT_TRUE(rest.ends_with("0\r\n\r\n"));
}

TEST_F(HttpServer, AStreamToHttp10IsNotChunked) {
  start();
  exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 14\r\n" + kClose +
           "{\"prompt\":\"x\"}");
  on_server([&] { service_.fail("job-1", {Code::kInternal, "x", {}}); });
  const std::string text = exchange("GET /v1/jobs/job-1/events HTTP/1.0\r\n\r\n");
  EXPECT_THAT(text, testing::Not(HasSubstr("chunked")));
  EXPECT_THAT(text, HasSubstr("\r\n\r\nretry: 1000\n\n"));
  EXPECT_THAT(text, HasSubstr("event: failed"));
}

// As `curl --http1.0` asks: each connection is closed behind its answer, whose length is told or ends with it.
TEST_F(HttpServer, Http10ClientsGetWhatTheyCanRead) {
  start();
  const auto post = [](const std::string& path, const std::string& body, const std::string& headers = {}) {
    return "POST " + path + " HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  };
  const auto waiting = [&] {
    std::size_t found = 0;
    for (int i = 0; i < 200 && found == 0; ++i) {
      std::this_thread::sleep_for(10ms);
      on_server([&] { found = hub_->subscriptions(); });
    }
    return found == 1;
  };
  int jobs = 0;
  // A request that draws, and what came of it once its picture is there.
  const auto draw = [&](const std::string& fields) {
    RawClient client(port_);
    client.send(post("/v1/images/generations", "{\"prompt\":\"y\"" + fields + "}"));
    EXPECT_TRUE(waiting());
    on_server([&] {
      const std::string id = "job-" + std::to_string(++jobs);
      service_.admit(id);
      service_.succeed(id, 0, "picture");
    });
    const std::string text = client.receive();
    EXPECT_FALSE(client.timed_out) << text;
    EXPECT_THAT(text, testing::AllOf(StartsWith("HTTP/1.0 200 OK\r\n"), testing::Not(HasSubstr("chunked")),
                                     testing::Not(HasSubstr("100 Continue"))));
    return text;
  };
  const std::string image = draw(",\"response_format\":\"b64_json\"");
  const auto body_at = image.find("\r\n\r\n") + 4;
  EXPECT_THAT(image, HasSubstr("Content-Length: " + std::to_string(image.size() - body_at) + "\r\n"));
  EXPECT_THAT(image, HasSubstr("cGljdHVyZQ=="));
  const std::string events = draw(",\"stream\":true");
  EXPECT_THAT(events, testing::AllOf(HasSubstr("\r\n\r\n: job job-2\n\nevent: image_generation.completed\ndata: {"),
                                     testing::Not(HasSubstr("Content-Length"))));
  const std::string result = exchange("GET /v1/jobs/job-1/results/0 HTTP/1.0\r\n\r\n");
  EXPECT_THAT(result, testing::AllOf(StartsWith("HTTP/1.0 200 OK\r\n"), HasSubstr("Content-Length: 7\r\n"),
                                     testing::EndsWith("\r\n\r\npicture")));
  // Who asks for it keeps its connection.
  RawClient kept(port_);
  for (int i = 0; i < 2; ++i) {
    kept.send("GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    EXPECT_THAT(kept.receive("alive\"}\n"),
                testing::AllOf(StartsWith("HTTP/1.0 200 OK\r\n"), HasSubstr("Connection: keep-alive\r\n")));
  }
  // What HTTP/1.0 does not know: an interim answer, which would be taken for the answer, and a body in chunks.
  EXPECT_THAT(exchange(post("/v1/jobs", "{\"prompt\":\"x\"}", "Expect: 100-continue\r\n")),
              StartsWith("HTTP/1.0 202 "));
  EXPECT_THAT(
      exchange(
          "POST /v1/jobs HTTP/1.0\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
      testing::AllOf(HasSubstr(" 400 "), HasSubstr("Content-Length")));
}

TEST_F(HttpServer, NoticesAClientThatLeaves) {
  start();
  exchange("POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 14\r\n" + kClose +
           "{\"prompt\":\"x\"}");
  {
    RawClient stream(port_), wait(port_);
    stream.send("GET /v1/jobs/job-1/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
    stream.receive("event: queued");
    wait.send(
        "POST /v1/images/generations HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nContent-Length: "
        "14\r\n\r\n{\"prompt\":\"y\"}");
    std::size_t waiting = 0;
    for (int i = 0; i < 200 && waiting < 2; ++i) {
      std::this_thread::sleep_for(10ms);
      on_server([&] { waiting = hub_->subscriptions(); });
    }
    EXPECT_EQ(waiting, 2u);
  }
  EXPECT_TRUE(connections_become(0));
  on_server([&] {
    EXPECT_EQ(hub_->subscriptions(), 0u);
    EXPECT_FALSE(job::is_terminal(service_.jobs["job-2"].state));  // the job goes on
  });
}

// As `nc -N` does, and many a script: the request is whole, and nothing follows it.
TEST_F(HttpServer, AClientThatSendsNoMoreIsStillAnswered) {
  start();
  RawClient wait(port_), old(port_), stream(port_);
  const std::string body = "Content-Length: 14\r\n\r\n{\"prompt\":\"y\"}";
  const auto subscriptions_become = [&](std::size_t wanted) {
    std::size_t waiting = 0;
    for (int i = 0; i < 200 && waiting != wanted; ++i) {
      std::this_thread::sleep_for(10ms);
      on_server([&] { waiting = hub_->subscriptions(); });
    }
    return waiting == wanted;
  };
  wait.send("POST /v1/images/generations HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\n" + body);
  wait.finish_sending();
  ASSERT_TRUE(subscriptions_become(1));
  old.send("POST /v1/images/generations HTTP/1.0\r\nContent-Type: application/json\r\nHost: localhost\r\n" + body);
  old.finish_sending();
  ASSERT_TRUE(subscriptions_become(2));
  stream.send("GET /v1/jobs/job-1/events HTTP/1.1\r\nHost: localhost\r\n\r\n");
  stream.finish_sending();
  ASSERT_TRUE(subscriptions_become(3));
  const std::string begin = stream.receive("keep-alive");
  EXPECT_THAT(wait.receive("\r\n\r\n"), StartsWith("HTTP/1.1 100 Continue\r\n\r\n"));
  on_server([&] {
    for (const char* id : {"job-1", "job-2"}) {
      service_.admit(id);
      service_.succeed(id, 0, "picture");
    }
  });
  EXPECT_THAT(wait.receive(), StartsWith("HTTP/1.1 200 OK"));
  EXPECT_THAT(old.receive(), StartsWith("HTTP/1.0 200 OK"));
  const std::string rest = begin + stream.receive();
  EXPECT_THAT(rest, HasSubstr("event: queued"));
  EXPECT_THAT(rest, HasSubstr("event: succeeded"));
  EXPECT_TRUE(rest.ends_with("\r\n0\r\n\r\n")) << rest;
  EXPECT_FALSE(wait.timed_out || old.timed_out || stream.timed_out);
  EXPECT_TRUE(connections_become(0));
}

TEST_F(HttpServer, StopAnswersThoseWhoWait) {
  start();
  RawClient wait(port_), idle(port_);
  wait.send(
      "POST /v1/images/generations HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nContent-Length: "
      "14\r\n\r\n{\"prompt\":\"y\"}");
  std::size_t waiting = 0;
  for (int i = 0; i < 200 && waiting < 1; ++i) {
    std::this_thread::sleep_for(10ms);
    on_server([&] { waiting = hub_->subscriptions(); });
  }
  ASSERT_EQ(waiting, 1u);
  stop();
  EXPECT_THAT(wait.receive(), StartsWith("HTTP/1.1 503"));
  EXPECT_EQ(idle.receive(), "");
}

TEST(HttpListen, SaysWhyItCannot) {
  asio::io_context context;
  const auto first = make_server(context.get_executor(), {}, {}), second = make_server(context.get_executor(), {}, {});
  ASSERT_TRUE(first->listen("127.0.0.1:0").ok());
  const auto taken = second->listen("127.0.0.1:" + std::to_string(first->port()));
  ASSERT_FALSE(taken.ok());
  EXPECT_EQ(taken.error().code, Code::kUnavailable);
  EXPECT_THAT(taken.error().message, HasSubstr("another program listens on it"));
  for (const char* bad : {"", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:70000", ":-1"}) {
    const auto result = second->listen(bad);
    ASSERT_FALSE(result.ok()) << bad;
    EXPECT_EQ(result.error().code, Code::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace ditfleet::gateway
