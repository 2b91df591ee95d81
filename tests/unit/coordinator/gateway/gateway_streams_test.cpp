// The gateway's event streams against a queue in memory.
#include "shared/core/wall_clock.h"
#include "tests/unit/coordinator/gateway/gateway_api_fixture.h"

namespace ditfleet::gateway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(GatewayApi, StreamedGenerationSendsPartialsAndTheEnd) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a","stream":true,"partial_images":1})");
  ASSERT_TRUE(response.stream);
  EXPECT_EQ(response.content_type, "text/event-stream");
  service.blobs["p0"] = "\x89PNG\r\n\x1a\n";
  asio::post(context, [&] {
    service.admit("job-1");
    service.event("job-1", "preview", 0, {{"key", "p0"}});
    service.event("job-1", "preview", 0, {{"key", "p0"}});  // more than was asked for
    service.succeed("job-1", 0, "final");
  });
  drain(response);
  const auto partial = sink.text.find("event: image_generation.partial_image\n");
  const auto completed = sink.text.find("event: image_generation.completed\n");
  ASSERT_NE(partial, std::string::npos) << sink.text;
  ASSERT_NE(completed, std::string::npos) << sink.text;
  EXPECT_LT(partial, completed);
  EXPECT_EQ(sink.text.find("event: image_generation.partial_image\n", partial + 1), std::string::npos);
  EXPECT_EQ(sink.text.find("event: image_generation.completed\n", completed + 1), std::string::npos);
  EXPECT_THAT(sink.text, HasSubstr(base64("final")));
}

TEST_F(GatewayApi, StreamedGenerationTellsAFailure) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a","stream":true})");
  asio::post(context, [&] { service.fail("job-1", {Code::kInternal, "it broke", {}}); });
  drain(response);
  EXPECT_THAT(sink.text, HasSubstr("event: error\ndata: {\"error\":"));
  EXPECT_THAT(sink.text, HasSubstr("it broke"));
}

TEST_F(GatewayApi, EventsEndWithTheJob) {
  send("POST", "/v1/jobs", R"({"prompt":"a"})");
  Response response = send("GET", "/v1/jobs/job-1/events");
  ASSERT_TRUE(response.stream);
  asio::post(context, [&] {
    service.admit("job-1");
    for (int step = 1; step <= 8; ++step) service.step("job-1", 0, step, 8);
    service.succeed("job-1", 0, "x");
  });
  drain(response);
  EXPECT_EQ(sink.ids().size(), service.streams["job-1"].size());
  EXPECT_TRUE(sink.text.ends_with("\n\n"));
  EXPECT_THAT(sink.text, HasSubstr("event: step\n"));
  EXPECT_THAT(sink.text, Not(HasSubstr("event: progress")));
  EXPECT_EQ(hub->subscriptions(), 0u);
}

// They have no id, so that a client continues after the last stored event.
TEST_F(GatewayApi, ProgressEventsAreSentOnRequest) {
  service.outlooks["job-1"] = {2, unix_ms() + 60'000};
  send("POST", "/v1/jobs", R"({"prompt":"a","n":2})");
  Response response = send("GET", "/v1/jobs/job-1/events?progress=true");
  sink.after_write = [&] {
    if (sink.writes == 2) {
      service.admit("job-1");
      service.step("job-1", 0, 4, 8);
    } else if (sink.text.find("\"state\":\"running\"") != std::string::npos && service.jobs["job-1"].ended_ms == 0) {
      service.succeed("job-1", 0, "x");
      service.succeed("job-1", 1, "y");
    }
  };
  drain(response);
  EXPECT_EQ(sink.ids().size(), service.streams["job-1"].size());
  EXPECT_THAT(sink.text, HasSubstr("event: queued"));
  EXPECT_THAT(sink.text,
              HasSubstr("\n\nevent: progress\ndata: {\"job\":\"job-1\",\"type\":\"progress\",\"unit\":null,"));
  EXPECT_THAT(sink.text, HasSubstr("\"state\":\"queued\",\"progress\":0,\"position\":2,\"eta_ms\":"));
  EXPECT_THAT(sink.text,
              HasSubstr("\"state\":\"running\",\"progress\":0.2222222222222222,\"position\":null,\"eta_ms\":"));
}

// A client that loses its connection after every few events and comes back with the last id sees each once.
TEST_F(GatewayApi, AResumedStreamMissesNothingAndDoublesNothing) {
  send("POST", "/v1/jobs", R"({"prompt":"a","n":2})");
  service.admit("job-1");
  std::vector<std::string> seen;
  int step = 0;
  for (int connection = 0; connection < 100; ++connection) {
    sink = RecordingSink();
    sink.most = 2 + connection % 3;
    sink.after_write = [&] {
      if (step < 20) {
        service.step("job-1", step % 2, step / 2 + 1, 10);
        ++step;
      } else if (step++ == 20)
        service.succeed("job-1", 0, "x");
      else if (step++ == 22)
        service.succeed("job-1", 1, "y");
    };
    Response response = send("GET", "/v1/jobs/job-1/events", {},
                             seen.empty() ? NameValues{} : NameValues{{"Last-Event-ID", seen.back()}});
    if (response.status == 204) break;
    ASSERT_TRUE(response.stream) << response.body;
    drain(response);
    for (const auto& id : sink.ids()) seen.push_back(id);
  }
  std::vector<std::string> expected;
  for (const auto& event : service.streams["job-1"]) expected.push_back(event.id);
  EXPECT_EQ(service.jobs["job-1"].state, job::State::kSucceeded);
  EXPECT_EQ(seen, expected);
}

TEST_F(GatewayApi, ResumingAfterTheEndIs204) {
  send("POST", "/v1/jobs", R"({"prompt":"a"})");
  service.fail("job-1", {Code::kInternal, "x", {}});
  const std::string last = service.streams["job-1"].back().id;
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/events?last_event_id=" + last).status, 204);
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/events", {}, {{"Last-Event-ID", "nonsense"}}).status, 400);
  EXPECT_EQ(send("GET", "/v1/jobs/none/events").status, 404);
  Response whole = send("GET", "/v1/jobs/job-1/events");
  ASSERT_TRUE(whole.stream);
  drain(whole);
  EXPECT_EQ(sink.ids().back(), last);
}

TEST_F(GatewayApi, AStreamEndsWhenItsClientLeaves) {
  send("POST", "/v1/jobs", R"({"prompt":"a"})");
  Response response = send("GET", "/v1/jobs/job-1/events");
  asio::post(context, [&] { sink.leave(); });
  drain(response);
  EXPECT_EQ(hub->subscriptions(), 0u);
}

// Followers come to stay: they may not take every connection that others ask for their pictures on.
TEST_F(GatewayApi, StreamsLeaveRoomForOtherRequests) {
  send("POST", "/v1/jobs", R"({"prompt":"a"})");
  std::vector<std::unique_ptr<RecordingSink>> sinks;
  std::vector<Response> followed;
  followed.reserve(12);
  for (int i = 0; i < 12; ++i) {  // of 16 connections
    followed.push_back(send("GET", "/v1/jobs/job-1/events"));
    ASSERT_TRUE(followed.back().stream) << i << followed.back().body;
    sinks.push_back(std::make_unique<RecordingSink>());
    asio::co_spawn(context, followed.back().stream(*sinks.back()), asio::detached);
  }
  while (hub->subscriptions() < 12) context.run_one();
  const Response refused = send("GET", "/v1/jobs/job-1/events");
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(body_of(refused).at("error").at("code").as_string(), "too_many_streams");
  EXPECT_FALSE(header(refused, "Retry-After").empty());
  EXPECT_EQ(send("GET", "/v1/jobs/job-1").status, 200);
  sinks.back()->leave();
  while (hub->subscriptions() == 12) context.run_one();
  sinks.pop_back();
  followed.pop_back();  // as the server does
  EXPECT_TRUE(send("GET", "/v1/jobs/job-1/events").stream);
  for (auto& one : sinks) one->leave();
  while (hub->subscriptions() > 0) context.run_one();
}

TEST_F(GatewayApi, AStreamThatCannotBeReadEndsInsteadOfTryingForEver) {
  send("POST", "/v1/jobs", R"({"prompt":"a"})");
  Response response = send("GET", "/v1/jobs/job-1/events");
  ASSERT_TRUE(response.stream);
  service.down = invalid_argument("'5' is not an event id");
  drain(response);
  EXPECT_EQ(sink.ids().size(), 0u);
  EXPECT_EQ(hub->subscriptions(), 0u);
}

TEST_F(GatewayApi, PreviewsAreFoundByTheirEvent) {
  send("POST", "/v1/jobs", R"({"prompt":"a"})");
  service.admit("job-1");
  service.blobs["p0"] = "\xff\xd8\xff jpeg";
  service.event("job-1", "preview", 0, {{"key", "p0"}});
  const std::string id = service.streams["job-1"].back().id;
  const Response preview = send("GET", "/v1/jobs/job-1/previews/" + id);
  EXPECT_EQ(preview.status, 200);
  EXPECT_EQ(preview.content_type, "image/jpeg");
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/previews/" + service.streams["job-1"].front().id).status, 404);
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/previews/../../x").status, 404);
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/previews/1-1").status, 404);
  service.blobs.clear();
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/previews/" + id).status, 410);
}

}  // namespace
}  // namespace ditfleet::gateway
