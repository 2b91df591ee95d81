// The HTTP server on a real socket, with a queue in memory behind it, and a client that sends whatever it is told.
#pragma once

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/post.hpp>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "coordinator/gateway/http/http_metrics.h"
#include "coordinator/gateway/http/server.h"
#include "coordinator/gateway/routes/api.h"
#include "shared/loras/registry_mirror.h"
#include "shared/telemetry/metrics.h"
#include "tests/fixtures/image_model.h"
#include "tests/unit/coordinator/gateway/gateway_fake_service.h"

namespace ditfleet::gateway {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

// A client that sends exactly the bytes it is told.
class RawClient {
 public:
  explicit RawClient(int port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~RawClient() { ::close(fd_); }
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const auto n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
  }
  void finish_sending() { ::shutdown(fd_, SHUT_WR); }
  // What comes until the server closes, `until` has come or the time is over.
  std::string receive(std::string_view until = {}, std::chrono::milliseconds patience = 5s) {
    std::string text;
    const auto deadline = std::chrono::steady_clock::now() + patience;
    char buffer[16384];
    while (until.empty() || text.find(until) == std::string::npos) {
      const auto left =
          std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
      pollfd readable{fd_, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&readable, 1, static_cast<int>(left.count())) <= 0) {
        timed_out = true;
        break;
      }
      const auto n = ::recv(fd_, buffer, sizeof buffer, 0);
      if (n <= 0) break;
      text.append(buffer, static_cast<std::size_t>(n));
    }
    return text;
  }
  bool timed_out = false;

 private:
  int fd_;
};

class HttpServer : public ::testing::Test {
 protected:
  void start(ServerOptions options = {}, std::vector<config::ApiKey> keys = {}) {
    spdlog::set_level(spdlog::level::err);
    GatewayDependencies dependencies;
    dependencies.catalogue.models["demo"] = job::image_model("demo");
    dependencies.catalogue.default_model = "demo";
    dependencies.adapters = std::make_shared<loras::RegistryMirror>(nullptr);
    dependencies.settings.keys = std::move(keys);
    hub_ = std::make_shared<EventHub>(context_.get_executor(), [this](auto block) { return service_.next(block); });
    api_ = std::make_unique<Api>(std::move(dependencies), service_, hub_, "");
    server_ = make_server(context_.get_executor(), options,
                          ServerHandlers{.request = [this](Request r) { return api_->handle(std::move(r)); },
                                         .refuse = [this](int status, const std::string& m,
                                                          const std::string& c) { return api_->refuse(status, m, c); },
                                         .refuse_head = [this](const Request& head) { return api_->refuse_head(head); },
                                         .is_vital = [this](const Request& head) { return api_->is_vital(head); }});
    ASSERT_TRUE(server_->listen("127.0.0.1:0").ok());
    port_ = server_->port();
    asio::co_spawn(context_, EventHub::run(hub_), asio::detached);
    asio::co_spawn(context_, server_->run(), asio::detached);
    thread_ = std::thread([this] { context_.run(); });
  }
  void TearDown() override { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    asio::post(context_, [this] {
      hub_->stop();
      asio::co_spawn(context_, server_->stop(Deadline::after(1s)), [this](std::exception_ptr) { context_.stop(); });
    });
    thread_.join();
  }
  // Runs on the server's thread.
  void on_server(std::function<void()> action) {
    std::promise<void> done;
    asio::post(context_, [&] {
      action();
      done.set_value();
    });
    done.get_future().wait();
  }
  bool connections_become(int wanted) {
    const std::string metric = "\nditfleet_http_connections " + std::to_string(wanted) + "\n";
    for (int i = 0; i < 400; ++i) {
      if (telemetry::render_metrics().find(metric) != std::string::npos) return true;
      std::this_thread::sleep_for(10ms);
    }
    return false;
  }
  // Sends a request that waits for its image, and returns once `waiting` requests wait.
  std::unique_ptr<RawClient> wait_for_an_image(std::size_t waiting) {
    auto client = std::make_unique<RawClient>(port_);
    client->send(
        "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 14\r\n\r\n{\"prompt\":\"y\"}");
    std::size_t found = 0;
    for (int i = 0; i < 400 && found != waiting; ++i) {
      std::this_thread::sleep_for(10ms);
      on_server([&] { found = hub_->subscriptions(); });
    }
    EXPECT_EQ(found, waiting);
    return client;
  }
  std::string exchange(const std::string& bytes) {
    RawClient client(port_);
    client.send(bytes);
    return client.receive();
  }

  asio::io_context context_;
  FakeService service_{context_.get_executor()};
  std::shared_ptr<EventHub> hub_;
  std::unique_ptr<Api> api_;
  std::shared_ptr<Server> server_;
  std::thread thread_;
  int port_ = 0;
};

inline const std::string kClose = "Host: localhost\r\nConnection: close\r\n\r\n";

}  // namespace ditfleet::gateway
