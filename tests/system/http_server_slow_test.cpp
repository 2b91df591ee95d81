// The HTTP server and clients that take too long: who is told, and who just loses the connection.
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "tests/system/http_server_fixture.h"

namespace ditfleet::gateway {
namespace {

TEST_F(HttpServer, ASlowClientIsGivenUp) {
  ServerOptions options;
  options.idle_timeout = 300ms;
  options.header_timeout = 300ms;
  options.body_timeout = 300ms;
  start(options);
  RawClient idle(port_), header(port_), empty_lines(port_), body(port_);
  body.send(
      "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{");
  // One byte now and then does not keep it alive.
  std::thread drip([&] {
    for (const char c : std::string("GET / HTTP/1.1\r\nHost: slow")) {
      header.send(std::string(1, c));
      empty_lines.send("\r\n");
      std::this_thread::sleep_for(50ms);
    }
  });
  EXPECT_EQ(idle.receive({}, 3s), "");
  EXPECT_FALSE(idle.timed_out);
  // Who has begun is told: with a head that drips, with empty lines before one, with a body that stands still.
  for (RawClient* client : {&header, &empty_lines}) {
    EXPECT_THAT(client->receive("}\n", 3s),
                testing::AllOf(StartsWith("HTTP/1.1 408 Request Timeout"), HasSubstr("headers did not arrive")));
    EXPECT_FALSE(client->timed_out);
  }
  EXPECT_THAT(body.receive({}, 3s), StartsWith("HTTP/1.1 408 Request Timeout"));
  EXPECT_FALSE(body.timed_out);
  drip.join();
  EXPECT_TRUE(connections_become(0));
}

TEST_F(HttpServer, AnEmptyLineBeforeARequestMayComeInTwo) {
  start();
  RawClient client(port_);
  client.send("\r");
  std::this_thread::sleep_for(20ms);
  client.send("\nGET /healthz HTTP/1.1\r\n" + kClose);
  EXPECT_THAT(client.receive(), testing::AllOf(StartsWith("HTTP/1.1 200 OK"), HasSubstr("alive")));
}

// Connections that ask nothing, or do not come to the end of their question, shut out nobody.
TEST_F(HttpServer, WhoAsksNothingMakesRoom) {
  ServerOptions options;
  options.max_connections = 4;
  start(options);
  std::vector<std::unique_ptr<RawClient>> lazy;
  for (int i = 0; i < 12; ++i) {
    lazy.push_back(std::make_unique<RawClient>(port_));
    if (i % 2 == 1) lazy.back()->send("GET /healthz HTTP/1.1\r\nHo");
    EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\n" + kClose), StartsWith("HTTP/1.1 200 OK")) << i;
  }
  EXPECT_EQ(lazy.front()->receive({}, 3s), "");
  EXPECT_FALSE(lazy.front()->timed_out);
}

TEST_F(HttpServer, ABodyThatDoesNotComeInTimeIsAnswered) {
  ServerOptions options;
  options.body_timeout = 200ms;
  start(options);
  const std::string head = "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\n";
  for (const std::string rest :
       {"Content-Length: 100\r\n\r\n", "Content-Length: 100\r\n\r\n{\"prompt\":",
        "Transfer-Encoding: chunked\r\n\r\n5\r\n{\"pro", "Expect: 100-continue\r\nContent-Length: 100\r\n\r\n"}) {
    RawClient client(port_);
    client.send(head + rest);
    std::string answer = client.receive("}\n");
    if (answer.starts_with("HTTP/1.1 100")) answer = answer.substr(answer.find("\r\n\r\n") + 4);
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 408 Request Timeout\r\n")) << rest;
    EXPECT_THAT(answer, testing::AllOf(HasSubstr("Connection: close\r\n"), HasSubstr("Content-Type: application/json"),
                                       HasSubstr("\"type\":\"invalid_request_error\""),
                                       HasSubstr("\"code\":\"request_timeout\"")))
        << rest;
    // What comes after all begins no request.
    client.send("\r\n\r\nGET /healthz HTTP/1.1\r\n" + kClose);
    client.finish_sending();
    EXPECT_EQ(client.receive(), "") << rest;
    EXPECT_FALSE(client.timed_out);
  }
  // One that drips is slow all the same.
  RawClient client(port_);
  client.send(head + "Content-Length: 1000\r\n\r\n");
  std::atomic<bool> told = false;
  std::thread drip([&] {
    for (int i = 0; i < 300 && !told; ++i) {
      client.send("x");
      std::this_thread::sleep_for(10ms);
    }
  });
  EXPECT_THAT(client.receive("}\n"), StartsWith("HTTP/1.1 408"));
  told = true;
  drip.join();
  EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\n" + kClose), HasSubstr("alive"));
}

// The parser takes a chunk's extensions and the trailers whole, and what it cannot take yet is kept: not without end.
TEST_F(HttpServer, WhatIsNoBodyIsNotCollectedWithoutEnd) {
  start();
  for (const std::string begin : {"1;", "2\r\n{}\r\n0\r\nX: ", "2\r\n{}\r\n0\r\n"}) {
    RawClient client(port_);
    client.send(
        "POST /v1/jobs HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\nTransfer-Encoding: "
        "chunked\r\n\r\n" +
        begin);
    const std::string more = begin.ends_with("0\r\n") ? "A: b\r\n" : "aaaaaa";
    std::string piece;
    for (int i = 0; i < 1 << 15; ++i) piece += more;
    client.send(piece);
    const std::string answer = client.receive("}\n");
    EXPECT_THAT(answer, testing::AllOf(StartsWith("HTTP/1.1 431 "), HasSubstr("Connection: close\r\n"),
                                       HasSubstr("trailers are larger than 64 KiB")))
        << begin;
  }
  EXPECT_THAT(exchange("GET /healthz HTTP/1.1\r\n" + kClose), HasSubstr("alive"));
}

// A page of jobs with long prompts is megabytes: clients that ask for many and read none may not fill the memory.
TEST(HttpUnreadAnswers, AreBounded) {
  asio::io_context context;
  const auto handle = [](Request request) -> asio::awaitable<Response> {
    Response response;
    response.content_type = "text/plain";
    response.body.assign(request.path() == "/small" ? 100 : 16u << 20, 'x');
    co_return response;
  };
  const auto refuse = [](int status, const std::string& message, const std::string&) {
    Response response;
    response.status = status;
    response.body = message;
    return response;
  };
  ServerOptions options;
  options.max_unread_bytes = 40u << 20;
  const auto server = make_server(context.get_executor(), options, ServerHandlers{.request = handle, .refuse = refuse});
  ASSERT_TRUE(server->listen("127.0.0.1:0").ok());
  asio::co_spawn(context, server->run(), asio::detached);
  std::thread thread([&] { context.run(); });
  RawClient first(server->port()), second(server->port()), third(server->port()), small(server->port());
  for (RawClient* client : {&first, &second, &third}) {
    client->send("GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n");
    EXPECT_THAT(client->receive("\r\n\r\n"), StartsWith(client == &third ? "HTTP/1.1 503 " : "HTTP/1.1 200 OK"));
  }
  small.send("GET /small HTTP/1.1\r\n" + kClose);
  EXPECT_THAT(small.receive(), StartsWith("HTTP/1.1 200 OK"));
  // Who has read the one may have another.
  while (first.receive("\1", 200ms).size() > 0) {
  }
  first.send("GET /large HTTP/1.1\r\n" + kClose);
  EXPECT_EQ(first.receive().size() >> 20, 16u);
  asio::post(context, [&] {
    asio::co_spawn(context, server->stop(Deadline::after(100ms)), [&](std::exception_ptr) { context.stop(); });
  });
  thread.join();
}

// A server whose handler reads uploads.
class HttpStreamedBody : public ::testing::Test {
 protected:
  void start(const ServerOptions& options) {
    const auto handle = [this](Request request) -> asio::awaitable<Response> {
      failed_.reset();
      for (;;) {
        auto piece = co_await request.stream->read();
        if (!piece) failed_ = piece.error();
        if (!piece || piece->empty()) break;
      }
      Response response;
      response.status = !failed_ ? 200 : failed_->code == Code::kDeadlineExceeded ? 408 : 500;
      co_return response;
    };
    server_ = make_server(context_.get_executor(), options,
                          ServerHandlers{.request = handle,
                                         .refuse =
                                             [](int status, const std::string&, const std::string&) {
                                               Response response;
                                               response.status = status;
                                               return response;
                                             },
                                         .streams = [](const Request&) { return true; }});
    ASSERT_TRUE(server_->listen("127.0.0.1:0").ok());
    asio::co_spawn(context_, server_->run(), asio::detached);
    thread_ = std::thread([this] { context_.run(); });
  }
  void stop() {
    asio::post(context_, [this] {
      asio::co_spawn(context_, server_->stop(Deadline::after(1s)), [this](std::exception_ptr) { context_.stop(); });
    });
    thread_.join();
  }
  static std::string head(int bytes) {
    return "PUT /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + std::to_string(bytes) + "\r\n\r\n";
  }

  asio::io_context context_;
  std::optional<Error> failed_;
  std::shared_ptr<Server> server_;
  std::thread thread_;
};

// No pause is too long, but all in all it is too slow.
TEST_F(HttpStreamedBody, AnUploadThatDripsIsGivenUp) {
  ServerOptions options;
  options.slow_grace = 300ms;
  start(options);
  RawClient client(server_->port());
  client.send(head(100'000));
  std::atomic<bool> told = false;
  std::thread drip([&] {
    for (int i = 0; i < 600 && !told; ++i) {
      client.send("x");
      std::this_thread::sleep_for(10ms);
    }
  });
  EXPECT_THAT(client.receive("\r\n\r\n"), StartsWith("HTTP/1.1 408"));
  told = true;
  drip.join();
  client.finish_sending();
  EXPECT_EQ(client.receive(), "");
  stop();
  ASSERT_TRUE(failed_.has_value());
  EXPECT_THAT(failed_->message, HasSubstr("16 KiB per second or more"));
}

// What has arrived earns time: 1 MiB at once may be followed by pauses of the same grace.
TEST_F(HttpStreamedBody, AnUploadThatPausesIsServed) {
  ServerOptions options;
  options.slow_grace = 300ms;
  start(options);
  RawClient client(server_->port());
  client.send(head((1 << 20) + 20));
  client.send(std::string(1 << 20, 'x'));
  for (int i = 0; i < 20; ++i) {
    std::this_thread::sleep_for(30ms);
    client.send("x");
  }
  EXPECT_THAT(client.receive("\r\n\r\n"), StartsWith("HTTP/1.1 200"));
  stop();
}

TEST_F(HttpStreamedBody, HalfSentUploadsMakeRoom) {
  ServerOptions options;
  options.max_connections = 4;
  start(options);
  std::vector<std::unique_ptr<RawClient>> stalled;
  for (int i = 0; i < 12; ++i) {
    stalled.push_back(std::make_unique<RawClient>(server_->port()));
    stalled.back()->send(head(100) + "half");
    RawClient client(server_->port());
    client.send(head(4) + "full");
    EXPECT_THAT(client.receive("\r\n\r\n"), StartsWith("HTTP/1.1 200")) << i;
  }
  // Which one is closed depends on which heads have been read when a client comes.
  const auto closed = std::count_if(stalled.begin(), stalled.end(), [](const auto& upload) {
    return upload->receive({}, 300ms).empty() && !upload->timed_out;
  });
  EXPECT_GE(closed, 12 - 4);
  stop();
}

// As uploads are read: the handler says what becomes of it, and its answer arrives.
TEST_F(HttpStreamedBody, APieceThatDoesNotComeInTimeIsTheHandlersToAnswer) {
  ServerOptions options;
  options.piece_timeout = 200ms;
  start(options);
  RawClient client(server_->port());
  client.send(head(100) + "hello");
  const std::string answer = client.receive("\r\n\r\n");
  EXPECT_THAT(answer, testing::AllOf(StartsWith("HTTP/1.1 408 Request Timeout"), HasSubstr("Connection: close")));
  client.finish_sending();
  EXPECT_EQ(client.receive(), "");
  EXPECT_FALSE(client.timed_out);
  stop();
  ASSERT_TRUE(failed_.has_value());
  EXPECT_EQ(failed_->code, Code::kDeadlineExceeded);
}

}  // namespace
}  // namespace ditfleet::gateway
