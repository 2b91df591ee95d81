// The gateway's handlers on a queue in memory, called as the server calls them.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <memory>

#include "coordinator/gateway/events/job_follower.h"
#include "coordinator/gateway/routes/api.h"
#include "shared/job/validate.h"
#include "shared/loras/registry_mirror.h"
#include "shared/telemetry/metrics.h"
#include "tests/fixtures/image_model.h"
#include "tests/unit/coordinator/gateway/gateway_fake_service.h"

namespace ditfleet::gateway {

// A stream's client that keeps what it gets, and goes away after `most` writes.
class RecordingSink final : public Sink {
 public:
  std::string text;
  int writes = 0, most = 1 << 30;
  std::function<void()> after_write;
  bool gone() const override { return gone_; }
  void when_gone(std::function<void()> callback) override {
    when_gone_ = std::move(callback);
    if (gone_ && when_gone_) when_gone_();
  }
  asio::awaitable<bool> write(std::string bytes) override {
    text += bytes;
    if (++writes >= most) leave();
    if (after_write) after_write();
    co_return !gone_;
  }
  void abort() override { aborted = true, leave(); }
  bool aborted = false;
  void leave() {
    gone_ = true;
    if (when_gone_) when_gone_();
  }
  // The ids of the events in the text, in order.
  std::vector<std::string> ids() const {
    std::vector<std::string> ids;
    for (std::size_t at = 0; (at = text.find("id: ", at)) != std::string::npos; at += 4) {
      ids.push_back(text.substr(at + 4, text.find('\n', at) - at - 4));
    }
    return ids;
  }

 private:
  bool gone_ = false;
  std::function<void()> when_gone_;
};

class GatewayApi : public ::testing::Test {
 protected:
  GatewayApi() {
    spdlog::set_level(spdlog::level::err);
    start({});
  }

  void start(std::vector<config::ApiKey> keys,
             std::function<Result<void>(const job::JobSpec&, const std::string&)> advise = {}) {
    GatewayDependencies options;
    options.catalogue.models["demo"] = job::image_model("demo", 256, 8);
    options.catalogue.default_model = "demo";
    if (adjust_models) adjust_models(options.catalogue);
    options.adapters = std::make_shared<loras::RegistryMirror>(nullptr);
    options.settings.keys = std::move(keys);
    options.settings.gateway.request_timeout_ms = 30'000;
    options.settings.gateway.max_connections = 16;
    if (adjust) adjust(options.settings);
    options.unready = [this] { return unready; };
    options.advise = std::move(advise);
    options.waits_for = [](const queue::UnitRef& unit) {
      return unit.unit == 0 ? "a place for " + unit.job : std::string();
    };
    if (hub) hub->stop();
    hub = std::make_shared<EventHub>(context.get_executor(), [this](auto block) { return service.next(block); });
    asio::co_spawn(context, EventHub::run(hub), asio::detached);
    api = std::make_unique<Api>(std::move(options), service, hub, "http://127.0.0.1:1");
    api->signer().learn(7, std::string(32, 's'));
  }
  ~GatewayApi() override { hub->stop(); }

  Request request(const std::string& method, const std::string& target, std::string body = {},
                  NameValues headers = {}) {
    Request r;
    r.method = method;
    EXPECT_TRUE(parse_target(target, r).ok());
    r.headers = std::move(headers);
    if (!r.has_header("Host")) r.headers.emplace_back("Host", "localhost:80");
    if (!body.empty() && !r.has_header("Content-Type")) r.headers.emplace_back("Content-Type", "application/json");
    r.body = std::move(body);
    return r;
  }
  Response send(const std::string& method, const std::string& target, std::string body = {}, NameValues headers = {}) {
    return run_task(context, api->handle(request(method, target, std::move(body), std::move(headers))));
  }
  static json::value body_of(const Response& response) {
    auto value = parse_json(response.body);
    EXPECT_TRUE(value.ok()) << response.body;
    return value.ok() ? *value : json::value();
  }
  static std::string header(const Response& response, const std::string& name) {
    for (const auto& [key, value] : response.headers) {
      if (key == name) return value;
    }
    return {};
  }
  // Runs a waiting response while `script` makes things happen.
  Response finish(Response& response, std::function<void()> script) {
    asio::post(context, std::move(script));
    return run_task(context, response.later(sink));
  }
  bool drain(Response& response) {
    return run_task(context, [](Response& r, Sink& s) -> asio::awaitable<bool> {
      co_await r.stream(s);
      co_return true;
    }(response, sink));
  }

  asio::io_context context;
  FakeService service{context.get_executor()};
  std::shared_ptr<EventHub> hub;
  std::unique_ptr<Api> api;
  std::vector<std::string> unready;
  std::function<void(config::Settings&)> adjust;       // called by start()
  std::function<void(job::Catalogue&)> adjust_models;  // also
  RecordingSink sink;
};

}  // namespace ditfleet::gateway
