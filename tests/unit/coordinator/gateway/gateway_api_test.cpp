// The gateway's handlers against a queue in memory.
#include <set>

#include "coordinator/gateway/routes/openapi.h"
#include "shared/core/wall_clock.h"
#include "tests/unit/coordinator/gateway/gateway_api_fixture.h"

namespace ditfleet::gateway {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(GatewayApi, AnswersWithoutRedis) {
  service.down = unavailable("Redis is away");
  unready = {"Redis is away"};
  EXPECT_EQ(send("GET", "/healthz").status, 200);
  const Response ready = send("GET", "/readyz");
  EXPECT_EQ(ready.status, 503);
  EXPECT_EQ(body_of(ready).at("reasons").at(0).as_string(), "Redis is away");
  EXPECT_EQ(send("GET", "/v1/models").status, 200);
  EXPECT_EQ(send("GET", "/").content_type, "text/html; charset=utf-8");
  EXPECT_EQ(send("GET", "/openapi.json").status, 200);
  const Response jobs = send("GET", "/v1/jobs");
  EXPECT_EQ(jobs.status, 503);
  EXPECT_EQ(header(jobs, "Retry-After"), "1");
  for (const char* route : {"/v1/jobs", "/v1/images/generations"}) {
    const Response submit = send("POST", route, R"({"prompt":"x"})");
    EXPECT_EQ(submit.status, 503) << route;
    EXPECT_THAT(submit.body, HasSubstr("Redis is away"));
  }
}

TEST_F(GatewayApi, UnknownPathsAndMethods) {
  EXPECT_EQ(send("GET", "/v2/jobs").status, 404);
  EXPECT_EQ(body_of(send("GET", "/v2/jobs")).at("error").at("type").as_string(), "invalid_request_error");
  const Response put = send("PUT", "/v1/jobs");
  EXPECT_EQ(put.status, 405);
  EXPECT_EQ(header(put, "Allow"), "POST, GET, HEAD, OPTIONS");
  const Response options = send("OPTIONS", "/v1/jobs");
  EXPECT_EQ(options.status, 204);
  EXPECT_EQ(header(options, "Allow"), "POST, GET, HEAD, OPTIONS");
}

TEST_F(GatewayApi, OpenApiDescribesEveryRouteAndNoOther) {
  auto document = parse_json(openapi_document());
  ASSERT_TRUE(document.ok()) << document.error().message;
  const auto& root = document->as_object();
  EXPECT_EQ(root.at("openapi").as_string(), "3.1.0");
  std::set<std::string> described, served;
  for (const auto& [path, item] : root.at("paths").as_object()) {
    for (const auto& [method, operation] : item.as_object()) {
      if (method == "parameters") continue;
      described.insert(std::string(method) + " " + std::string(path));
      EXPECT_TRUE(operation.as_object().contains("operationId")) << path;
      EXPECT_TRUE(operation.as_object().contains("responses")) << path;
    }
  }
  for (const Route& route : api->router().routes()) {
    std::string method(route.method);
    for (char& c : method) c = static_cast<char>(std::tolower(c));
    served.insert(method + " " + std::string(route.pattern));
  }
  EXPECT_EQ(described, served);
}

TEST_F(GatewayApi, ModelsAreOpenAiObjects) {
  const auto list = body_of(send("GET", "/v1/models"));
  EXPECT_EQ(list.at("object").as_string(), "list");
  EXPECT_EQ(list.at("data").at(0).at("id").as_string(), "demo");
  EXPECT_EQ(list.at("data").at(0).at("object").as_string(), "model");
  EXPECT_EQ(body_of(send("GET", "/v1/models/demo")).at("id").as_string(), "demo");
  EXPECT_FALSE(body_of(send("GET", "/v1/models/demo")).at("fields").as_object().contains("images"));
  const Response none = send("GET", "/v1/models/none");
  EXPECT_EQ(none.status, 404);
  EXPECT_EQ(body_of(none).at("error").at("code").as_string(), "model_not_found");
}

TEST_F(GatewayApi, AModelOfSeveralPicturesSaysHowMany) {
  adjust_models = [](job::Catalogue& catalogue) { catalogue.models["demo"].apply("image") = {.low = 1, .high = 3}; };
  start({});
  const auto fields = body_of(send("GET", "/v1/models/demo")).at("fields");
  EXPECT_EQ(fields.at("image").at("type").as_string(), "string");
  EXPECT_EQ(fields.at("images").at("minItems").as_int64(), 1);
  EXPECT_EQ(fields.at("images").at("maxItems").as_int64(), 3);
}

TEST_F(GatewayApi, SubmitsAJob) {
  const std::string parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  auto before = unix_ms();
  while (before % 1000 == 0) before = unix_ms();
  const Response response =
      send("POST", "/v1/jobs", R"({"prompt":"a cat","n":3})",
           {{"traceparent", parent}, {"X-Request-Id", "r-1"}, {"Content-Type", "application/json; charset=utf-8"}});
  EXPECT_EQ(response.status, 202);
  const auto body = body_of(response);
  EXPECT_EQ(body.at("state").as_string(), "queued");
  EXPECT_EQ(body.at("units").as_int64(), 3);
  EXPECT_EQ(body.at("model").as_string(), "demo");
  EXPECT_GE(body.at("created_ms").as_int64(), before);  // to the millisecond
  EXPECT_EQ(header(response, "Location"), "/v1/jobs/" + std::string(body.at("id").as_string()));
  EXPECT_EQ(header(response, "X-Request-Id"), "r-1");
  EXPECT_THAT(header(response, "traceparent"), HasSubstr("0af7651916cd43dd8448eb211c80319c"));
  ASSERT_EQ(service.submissions.size(), 1u);
  EXPECT_EQ(service.submissions[0].traceparent, header(response, "traceparent"));
  EXPECT_EQ(service.submissions[0].tenant, "default");
  // A seed that was left out is not drawn here: a retry must be the same body.
  EXPECT_THAT(service.submissions[0].spec, Not(HasSubstr("\"seed\"")));
}

TEST_F(GatewayApi, SaysWhatAUnitWaitsFor) {
  send("POST", "/v1/jobs", R"({"prompt":"x","n":2})");
  service.admit("job-1");
  const auto units = [&] { return body_of(send("GET", "/v1/jobs/job-1")).at("unit_records").as_array(); };
  EXPECT_EQ(units()[0].at("waits_for").as_string(), "a place for job-1");
  EXPECT_TRUE(units()[1].at("waits_for").is_null());
  service.jobs["job-1"].unit_records[0].state = job::State::kAssigned;
  EXPECT_EQ(units()[0].at("waits_for").as_string(), "a place for job-1");
  service.step("job-1", 0, 1, 8);
  EXPECT_TRUE(units()[0].at("waits_for").is_null()) << "it runs";
}

TEST_F(GatewayApi, JobsHaveAPositionAndAnExpectedEnd) {
  send("POST", "/v1/jobs", R"({"prompt":"x"})");
  const auto now = unix_ms();
  const auto of = [](json::value job) { return std::pair(job.at("position"), job.at("eta_ms")); };
  const auto read = [&] {
    start({});  // forgets what was read
    const auto listed = body_of(send("GET", "/v1/jobs")).at("jobs").at(0);
    const auto job = body_of(send("GET", "/v1/jobs/job-1"));
    const auto same = [&](const auto& other) {  // times pass between the requests
      if (other.second.is_null() || of(job).second.is_null()) return other == of(job);
      return other.first == of(job).first && std::abs(other.second.as_int64() - of(job).second.as_int64()) < 1000;
    };
    EXPECT_TRUE(same(of(listed)));
    EXPECT_TRUE(same(of(body_of(send("GET", "/v1/jobs/job-1/timeline")))));
    return of(job);
  };
  const json::value null;
  EXPECT_EQ(read(), std::pair(null, null)) << "no coordinator leads";
  service.outlooks["job-1"] = {3, now + 60'000};
  EXPECT_EQ(read(), std::pair(json::value(3), json::value(now + 60'000)));
  service.outlooks["job-1"] = {3, 0};
  EXPECT_EQ(read(), std::pair(json::value(3), null)) << "no run was observed";
  service.outlooks["job-1"] = {0, now + 60'000};
  service.admit("job-1");
  service.step("job-1", 0, 1, 8);
  EXPECT_EQ(read(), std::pair(null, json::value(now + 60'000))) << "it runs, although it was next a second ago";
  service.outlooks["job-1"].eta_ms = now - 60'000;
  EXPECT_GE(read().second.as_int64(), now) << "it runs for longer than predicted";
  service.jobs["job-1"].state = service.jobs["job-1"].unit_records[0].state = job::State::kCanceling;
  EXPECT_EQ(read(), std::pair(null, null));
  service.outlooks["job-1"] = {0, now + 60'000};
  service.succeed("job-1", 0, "x");
  EXPECT_EQ(read(), std::pair(null, null)) << "it has ended";
}

TEST_F(GatewayApi, TheOutlookIsReadOnceASecond) {
  send("POST", "/v1/jobs", R"({"prompt":"x"})");
  for (int i = 0; i < 20; ++i) send("GET", "/v1/jobs");
  EXPECT_LE(service.outlook_reads, 3);
}

TEST_F(GatewayApi, ACancelingJobIsShown) {
  send("POST", "/v1/jobs", R"({"prompt":"x"})");
  service.admit("job-1");
  service.step("job-1", 0, 8, 8);
  auto& record = service.jobs["job-1"];
  record.state = record.unit_records[0].state = job::State::kCanceling;
  const auto job = body_of(send("GET", "/v1/jobs/job-1"));
  EXPECT_EQ(job.at("state").as_string(), "canceling");
  EXPECT_EQ(job.at("unit_records").at(0).at("state").as_string(), "canceling");
  EXPECT_EQ(job.at("unit_records").at(0).at("phase").as_string(), "decoding");
  EXPECT_EQ(body_of(send("GET", "/v1/jobs?state=canceling")).at("jobs").as_array().size(), 1u);
  EXPECT_EQ(body_of(send("GET", "/v1/jobs?state=running")).at("jobs").as_array().size(), 0u);
  EXPECT_THAT(send("GET", "/v1/jobs?state=cancelling").body, HasSubstr("running, canceling, succeeded"));
}

TEST_F(GatewayApi, PausesAndResumesJobs) {
  send("POST", "/v1/jobs", R"({"prompt":"x"})");
  service.admit("job-1");
  for (const auto& [action, state] : {std::pair{"pause", "paused"}, {"pause", "paused"}, {"resume", "ready"}}) {
    const auto answer = send("POST", std::string("/v1/jobs/job-1/") + action);
    EXPECT_EQ(answer.status, 202);
    EXPECT_EQ(body_of(answer).at("state").as_string(), state);
  }
  EXPECT_EQ(send("POST", "/v1/jobs/other/pause").status, 404);
  service.jobs["job-1"].state = job::State::kCanceling;
  EXPECT_THAT(send("POST", "/v1/jobs/job-1/pause").body, HasSubstr("job 'job-1' is being canceled"));
  service.jobs["job-1"].state = job::State::kSucceeded;
  const auto refused = send("POST", "/v1/jobs/job-1/resume");
  EXPECT_EQ(refused.status, 409);
  EXPECT_THAT(refused.body, HasSubstr("job 'job-1' has already ended"));
}

TEST_F(GatewayApi, RefusesBadJobs) {
  const std::vector<std::pair<std::string, int>> cases = {
      {"", 400},
      {"{", 400},
      {"[1]", 400},
      {"{\"prompt\":\"\xff\xfe\"}", 400},
      {R"({"prompt":"x","wat":1})", 400},
      {R"({"prompt":7})", 400},
      {R"({"prompt":"x","n":0})", 400},
      {R"({"prompt":"x","n":100000})", 400},
      {R"({"prompt":"x","width":250})", 400},
      {R"({"prompt":"x","width":1000000,"height":16})", 400},
      {R"({"prompt":"x","num_inference_steps":0})", 400},
      {R"({"prompt":"x","num_inference_steps":100000})", 400},
      {R"({"prompt":"x","guidance_scale":"high"})", 400},
      {R"({"prompt":"x","model":"nope"})", 404},
  };
  for (const auto& [body, status] : cases) {
    for (const char* route : {"/v1/jobs", "/v1/images/generations"}) {
      if (std::string(route) == "/v1/images/generations" && body.find("width") != std::string::npos) continue;
      const Response response = send("POST", route, body);
      EXPECT_EQ(response.status, status) << route << " " << body << " " << response.body;
      EXPECT_FALSE(body_of(response).at("error").at("message").as_string().empty());
    }
  }
  EXPECT_EQ(send("POST", "/v1/jobs", "prompt=x", {{"Content-Type", "application/x-www-form-urlencoded"}}).status, 415);
  const Response packed =
      send("POST", "/v1/jobs", "\x1f\x8b", {{"Content-Type", "application/json"}, {"Content-Encoding", "gzip"}});
  EXPECT_EQ(packed.status, 415);
  EXPECT_THAT(packed.body, HasSubstr("gzip"));
  const Response size = send("POST", "/v1/images/generations", R"({"prompt":"x","size":"250x256"})");
  EXPECT_EQ(size.status, 400);
  EXPECT_EQ(body_of(size).at("error").at("param").as_string(), "size");
  const Response model = send("POST", "/v1/images/generations", R"({"prompt":"x","model":"dall-e-3"})");
  EXPECT_EQ(model.status, 404);
  EXPECT_EQ(body_of(model).at("error").at("code").as_string(), "model_not_found");
  EXPECT_TRUE(service.submissions.empty());
}

TEST_F(GatewayApi, AMediaTypeMayBeSpelledAnyWay) {
  EXPECT_EQ(
      send("POST", "/v1/jobs", R"({"prompt":"x"})", {{"Content-Type", "Application/JSON ; charset=utf-8"}}).status,
      202);
}

TEST_F(GatewayApi, AnEmptyPromptIsFine) { EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":""})").status, 202); }

TEST_F(GatewayApi, TheSameKeyIsTheSameJob) {
  const NameValues key = {{"Idempotency-Key", "k1"}};
  const auto first = body_of(send("POST", "/v1/jobs", R"({"prompt":"a","n":2})", key));
  // Spelled differently, the same job.
  const Response again = send("POST", "/v1/jobs", R"({ "n": 2, "prompt": "a" })", key);
  EXPECT_EQ(again.status, 202);
  EXPECT_EQ(body_of(again).at("id"), first.at("id"));
  EXPECT_EQ(header(again, "Idempotent-Replayed"), "true");
  EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":"b","n":2})", key).status, 422);
  EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":"a"})", {{"Idempotency-Key", ""}}).status, 400);
  EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":"a"})", {{"Idempotency-Key", std::string(256, 'k')}}).status, 400);
}

TEST_F(GatewayApi, AKeyWhoseJobIsGoneIsNotAnsweredWithAStateThatIsMadeUp) {
  const NameValues key = {{"Idempotency-Key", "k1"}};
  const auto first = body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})", key));
  service.jobs.clear();
  const Response again = send("POST", "/v1/jobs", R"({"prompt":"a"})", key);
  EXPECT_EQ(again.status, 503) << again.body;
  EXPECT_EQ(header(again, "Retry-After").empty(), false);
}

TEST_F(GatewayApi, AdviceAgainstAJobIs429) {
  start({}, [](const job::JobSpec& spec, const std::string& tenant) {
    EXPECT_EQ(spec.fields.integer("width"), 256);  // it sees the complete spec
    EXPECT_EQ(tenant, "default");
    if (spec.deadline_ms) return Result<void>(Error{Code::kResourceExhausted, "too soon", "deadline_ms"});
    if (spec.n.value_or(1) < 3) return Result<void>();
    return Result<void>(Error{
        .code = Code::kResourceExhausted, .message = "the queue is full", .retry_after = std::chrono::seconds(17)});
  });
  EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":"a"})").status, 202);
  for (const char* route : {"/v1/jobs", "/v1/images/generations"}) {
    const Response refused = send("POST", route, R"({"prompt":"a","n":3})");
    EXPECT_EQ(refused.status, 429);
    EXPECT_EQ(header(refused, "Retry-After"), "17");
    EXPECT_EQ(body_of(refused), json::parse(R"({"error":{"message":"the queue is full","type":"rate_limit_error",
                                                "param":null,"code":"resource_exhausted"}})"));
    // Where a field of the request is at fault, it is named.
    EXPECT_EQ(body_of(send("POST", route, R"({"prompt":"a","deadline_ms":5})")).at("error").at("param"), "deadline_ms");
  }
}

TEST_F(GatewayApi, ListsAndPages) {
  for (int i = 0; i < 5; ++i) send("POST", "/v1/jobs", R"({"prompt":"a"})");
  const auto page = body_of(send("GET", "/v1/jobs?limit=2"));
  EXPECT_EQ(page.at("jobs").as_array().size(), 2u);
  EXPECT_EQ(page.at("jobs").at(0).at("id").as_string(), "job-5");
  const std::string cursor(page.at("next_cursor").as_string());
  EXPECT_EQ(body_of(send("GET", "/v1/jobs?limit=200&cursor=" + cursor)).at("jobs").as_array().size(), 3u);
  EXPECT_EQ(body_of(send("GET", "/v1/jobs?state=failed")).at("jobs").as_array().size(), 0u);
  for (const char* bad : {"state=wat", "limit=0", "limit=201", "limit=x", "sort=up"}) {
    EXPECT_EQ(send("GET", std::string("/v1/jobs?") + bad).status, 400) << bad;
  }
}

TEST_F(GatewayApi, AResultIsReadByRanges) {
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})")).at("id").as_string());
  const std::string result = "/v1/jobs/" + id + "/results/0";
  service.admit(id);
  service.succeed(id, 0, "0123456789");
  const std::string etag = "\"" + sha256_hex("0123456789") + "\"";
  const auto get = [&](const std::string& range, NameValues more = {}) {
    more.emplace_back("Range", range);
    return send("GET", result, {}, std::move(more));
  };
  EXPECT_EQ(header(send("GET", result), "Accept-Ranges"), "bytes");
  for (const auto& [range, body, content_range] : {std::tuple{"bytes=2-4", "234", "bytes 2-4/10"},
                                                   {"bytes=7-", "789", "bytes 7-9/10"},
                                                   {"bytes=-3", "789", "bytes 7-9/10"},
                                                   {"bytes=-30", "0123456789", "bytes 0-9/10"},
                                                   {"bytes=0-99", "0123456789", "bytes 0-9/10"},
                                                   {"Bytes=9-9", "9", "bytes 9-9/10"}}) {
    const Response got = get(range);
    EXPECT_EQ(got.status, 206) << range;
    EXPECT_EQ(got.body, body) << range;
    EXPECT_EQ(header(got, "Content-Range"), content_range) << range;
    EXPECT_EQ(header(got, "ETag"), etag);
  }
  for (const char* range : {"bytes=10-", "bytes=10-12", "bytes=-0"}) {
    const Response got = get(range);
    EXPECT_EQ(got.status, 416) << range;
    EXPECT_EQ(header(got, "Content-Range"), "bytes */10") << range;
    EXPECT_THAT(got.body, HasSubstr("has 10 bytes")) << range;
  }
  for (const char* range : {"bytes=4-2", "bytes=1-2,4-5", "bytes=x-2", "bytes=-", "bytes=", "bytes=1", "lines=1-2",
                            "bytes=--3", "bytes=+1-2"}) {
    const Response got = get(range);
    EXPECT_EQ(got.status, 200) << range;
    EXPECT_EQ(got.body, "0123456789") << range;
    EXPECT_EQ(header(got, "Content-Range"), "") << range;
  }
  EXPECT_EQ(get("bytes=2-4", {{"If-Range", etag}}).status, 206);
  EXPECT_EQ(get("bytes=2-4", {{"If-Range", "\"other\""}}).status, 200);
  EXPECT_EQ(get("bytes=2-4", {{"If-Range", "Wed, 21 Oct 2015 07:28:00 GMT"}}).status, 200);
  EXPECT_EQ(get("bytes=2-4", {{"If-None-Match", etag}}).status, 304);
  const Response head = send("HEAD", result, {}, {{"Range", "bytes=2-4"}});
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.stream_bytes, 10u);
  EXPECT_FALSE(head.stream);
  service.blobs.clear();
  EXPECT_EQ(get("bytes=2-4").status, 410);
  EXPECT_EQ(send("HEAD", result).status, 410);
}

// Whole and in part, and cut off before its end if it is damaged.
TEST_F(GatewayApi, ALargeResultIsStreamed) {
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})")).at("id").as_string());
  const std::string result = "/v1/jobs/" + id + "/results/0";
  std::string bytes((2 << 20) + 5, 'x');
  for (std::size_t i = 0; i < bytes.size(); i += 1000) bytes[i] = static_cast<char>(i / 1000);
  service.admit(id);
  service.succeed(id, 0, bytes);
  Response whole = send("GET", result);
  EXPECT_EQ(whole.status, 200);
  EXPECT_EQ(whole.stream_bytes, bytes.size());
  EXPECT_TRUE(drain(whole));
  EXPECT_TRUE(sink.text == bytes);
  EXPECT_GT(sink.writes, 20);
  sink.text.clear();
  Response part = send("GET", result, {}, {{"Range", "bytes=100000-"}});
  EXPECT_EQ(part.status, 206);
  EXPECT_TRUE(drain(part));
  EXPECT_TRUE(sink.text == bytes.substr(100000));
  EXPECT_EQ(send("GET", result, {}, {{"Range", "bytes=-1048576"}}).body, bytes.substr(bytes.size() - (1 << 20)));
  sink.text.clear();
  service.blobs.begin()->second.back() = 'y';
  Response damaged = send("GET", result);
  EXPECT_TRUE(drain(damaged));
  EXPECT_TRUE(sink.aborted);
  EXPECT_LT(sink.text.size(), bytes.size());
}

TEST_F(GatewayApi, ResultsComeWhenTheyAreThere) {
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a","n":2})")).at("id").as_string());
  const std::string result = "/v1/jobs/" + id + "/results/0";
  EXPECT_EQ(send("GET", result).status, 409);
  service.admit(id);
  EXPECT_EQ(send("GET", result).status, 409);
  service.succeed(id, 0, "picture");
  const Response got = send("GET", result);
  EXPECT_EQ(got.status, 200);
  EXPECT_EQ(got.body, "picture");
  EXPECT_EQ(got.content_type, "image/png");
  EXPECT_EQ(header(got, "ETag"), "\"" + sha256_hex("picture") + "\"");
  EXPECT_EQ(send("GET", result, {}, {{"If-None-Match", header(got, "ETag")}}).status, 304);
  EXPECT_EQ(send("GET", "/v1/jobs/" + id + "/results/1").status, 409);
  for (const char* index : {"2", "-1", "x", "99999999999"}) {
    EXPECT_EQ(send("GET", "/v1/jobs/" + id + "/results/" + index).status, 404) << index;
  }
  EXPECT_EQ(send("GET", "/v1/jobs/none/results/0").status, 404);
  service.blobs.clear();
  EXPECT_EQ(send("GET", result).status, 410);
  const auto job = body_of(send("GET", "/v1/jobs/" + id));
  EXPECT_EQ(job.at("unit_records").at(0).at("result").at("url").as_string(), "http://localhost:80" + result);
  EXPECT_EQ(job.at("unit_records").at(0).at("result").at("seed").as_int64(), 7);
  EXPECT_TRUE(job.at("unit_records").at(1).at("result").is_null());
}

TEST_F(GatewayApi, CancelsOnce) {
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})")).at("id").as_string());
  const Response canceled = send("DELETE", "/v1/jobs/" + id);
  EXPECT_EQ(canceled.status, 202);
  EXPECT_EQ(body_of(canceled).at("state").as_string(), "canceled");
  EXPECT_EQ(send("DELETE", "/v1/jobs/" + id).status, 409);
  EXPECT_EQ(send("DELETE", "/v1/jobs/none").status, 404);
  EXPECT_EQ(send("DELETE", "/v1/jobs/no%2Fsuch%20id").status, 404);
}

// RFC 9110 §5.3: which of two is meant nobody can say.
TEST_F(GatewayApi, AHeaderThatHasOneLineIsRefusedWithTwo) {
  start({{"acme", sha256_hex("a"), false}, {"bolt", sha256_hex("b"), false}});
  const NameValues key = {{"Authorization", "Bearer a"}};
  for (const char* name : {"Authorization", "Idempotency-Key", "Content-Type", "Last-Event-ID"}) {
    NameValues twice = key;
    std::string other(name);
    for (char& c : other) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    twice.emplace_back(name, "Bearer a");
    twice.emplace_back(other, "Bearer b");
    const Response refused = send("POST", "/v1/jobs", R"({"prompt":"a"})", twice);
    EXPECT_EQ(refused.status, 400) << name;
    EXPECT_THAT(refused.body, HasSubstr("more than one " + std::string(name) + " header"));
  }
  EXPECT_TRUE(service.jobs.empty());
  NameValues lists = key;
  lists.emplace_back("Accept", "image/png");
  lists.emplace_back("Accept", "image/webp");
  EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":"a"})", lists).status, 202);
}

TEST_F(GatewayApi, AWorkerThatIsNotHeardIsSilentWhateverItSaidLast) {
  queue::WorkerInfo worker;
  worker.name = "w1";
  worker.state = "ready";
  worker.unheard_ms = 3'500;  // as of worker.heartbeat_ms
  service.worker_infos = {worker};
  const auto state = [&] {
    return std::string(body_of(send("GET", "/v1/workers")).at("workers").at(0).at("state").as_string());
  };
  EXPECT_EQ(state(), "ready");
  service.worker_infos[0].unheard_ms = 3'501;
  EXPECT_EQ(state(), "silent");
}

TEST_F(GatewayApi, AWorkerIsDrainedResumedAndStoppedByAnAdministrator) {
  start({{"acme", sha256_hex("a"), false}, {"ops", sha256_hex("o"), true}});
  const NameValues a = {{"Authorization", "Bearer a"}}, ops = {{"Authorization", "Bearer o"}};
  queue::WorkerInfo worker{.name = "gpu-1", .boot = "b", .state = "ready", .heartbeat_ms = 1'000, .unheard_ms = 500};
  service.worker_infos = {worker};
  for (const auto& [act, desired] :
       {std::pair("drain", queue::Desired::kDraining), std::pair("resume", queue::Desired::kReady),
        std::pair("stop", queue::Desired::kStopped)}) {
    const std::string path = "/v1/workers/gpu-1/" + std::string(act);
    service.desired.clear();
    EXPECT_EQ(send("POST", path).status, 401);
    EXPECT_EQ(send("POST", path, {}, a).status, 403);
    EXPECT_TRUE(service.desired.empty());
    const Response done = send("POST", path, {}, ops);
    EXPECT_EQ(done.status, 202);
    EXPECT_EQ(body_of(done).at("name").as_string(), "gpu-1");
    EXPECT_EQ(service.desired, (std::map<std::string, queue::Desired>{{"gpu-1", desired}}));
  }
  const Response unknown = send("POST", "/v1/workers/gpu-2/drain", {}, ops);
  EXPECT_EQ(unknown.status, 404);
  EXPECT_THAT(unknown.body, HasSubstr("did you mean 'gpu-1'?"));
  EXPECT_THAT(send("POST", "/v1/workers/something/drain", {}, ops).body, HasSubstr("see GET /v1/workers"));

  const auto empty_in = [&] { return body_of(send("POST", "/v1/workers/gpu-1/drain", {}, ops)).at("empty_in_ms"); };
  EXPECT_TRUE(empty_in().is_null()) << "no coordinator leads";
  service.fleet_forecast.emplace();
  EXPECT_EQ(empty_in(), json::value(0));
  service.fleet_forecast->ends_ms["gpu-1:b"] = 2'300;
  EXPECT_EQ(empty_in(), json::value(800)) << "by Redis' clock, not by this host's";
  service.fleet_forecast->ends_ms["gpu-1:b"] = 1'200;
  EXPECT_EQ(empty_in(), json::value(0)) << "it runs longer than predicted";
}

TEST_F(GatewayApi, ScalingNeedsAForecastAndCountsWorkers) {
  const Response unknown = send("GET", "/v1/scaling");
  EXPECT_EQ(unknown.status, 503) << "zeros would make an autoscaler stop the workers";
  EXPECT_THAT(unknown.body, HasSubstr("no coordinator leads"));
  service.fleet_forecast = {.ready_workers = 2};
  service.fleet_forecast->models["flux"] = {.backlog_us = 120'000'001, .units = 50, .ready_workers = 2};
  service.fleet_forecast->models["tiny"] = {.backlog_us = 900'000'000, .units = 2, .ready_workers = 1};
  const auto needed = [&](const std::string& query, const char* model) {
    const auto body = body_of(send("GET", "/v1/scaling" + query));
    return (*model ? body.at("models").at(model) : body).at("workers_needed").as_int64();
  };
  EXPECT_EQ(needed("", "flux"), 3) << "two minutes and a bit in one minute each";
  EXPECT_EQ(needed("", "tiny"), 2) << "no more than units";
  EXPECT_EQ(needed("", ""), 18);
  EXPECT_EQ(needed("?seconds=86400", "flux"), 1);
  const auto body = body_of(send("GET", "/v1/scaling?seconds=10"));
  EXPECT_DOUBLE_EQ(body.at("backlog_gpu_seconds").to_number<double>(), 1020.000001);
  EXPECT_EQ(body.at("ready_workers").as_int64(), 2);
  EXPECT_EQ(body.at("units").as_int64(), 52);
  EXPECT_EQ(body.at("seconds").as_int64(), 10);
  for (const char* wrong : {"?seconds=0", "?seconds=1.5", "?seconds=86401", "?seconds=", "?second=1"})
    EXPECT_EQ(send("GET", "/v1/scaling" + std::string(wrong)).status, 400) << wrong;
  service.fleet_forecast.emplace().models["tiny"];
  EXPECT_EQ(needed("", "tiny"), 0);
}

TEST_F(GatewayApi, WorkersListTheMemoryOfTheirModels) {
  queue::WorkerInfo worker;
  worker.name = "w1";
  worker.memory["flux"] = {.limits = {{"block", 1 << 20}}, .available_bytes = 5, .bytes = 4, .resident = false};
  service.worker_infos = {worker};
  EXPECT_EQ(json::serialize(body_of(send("GET", "/v1/workers")).at("workers").at(0).at("memory")),
            R"({"flux":{"limits":[{"plan":"block","max_pixels":1048576}],"available_bytes":5,"bytes":4,)"
            R"("resident":false,"load_us":0}})");
}

TEST_F(GatewayApi, TenantsDoNotSeeEachOther) {
  start({{"acme", sha256_hex("a"), false}, {"bolt", sha256_hex("b"), false}, {"ops", sha256_hex("o"), true}});
  const NameValues a = {{"Authorization", "Bearer a"}}, b = {{"Authorization", "Bearer b"}},
                   ops = {{"Authorization", "Bearer o"}};
  EXPECT_EQ(send("GET", "/v1/jobs").status, 401);
  const Response wrong = send("GET", "/v1/jobs", {}, {{"Authorization", "Bearer nope"}});
  EXPECT_EQ(wrong.status, 401);
  EXPECT_EQ(body_of(wrong).at("error").at("code").as_string(), "invalid_api_key");
  EXPECT_EQ(send("GET", "/healthz").status, 200);
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"secret"})", a)).at("id").as_string());
  service.admit(id);
  service.succeed(id, 0, "picture");
  queue::WorkerInfo worker;
  worker.name = "w1";
  worker.units = {{id, 0}};
  worker.adapters = {std::string(64, 'a')};
  worker.host_adapters = {std::string(64, 'a'), std::string(64, 'b')};
  service.worker_infos = {worker};
  const std::string job = "/v1/jobs/" + id;
  for (const std::string& path : {job, job + "/events", job + "/results/0", job + "/previews/1700000000000-1"}) {
    const Response hidden = send("GET", path, {}, b);
    EXPECT_EQ(hidden.status, 404) << path;
    EXPECT_THAT(hidden.body, Not(HasSubstr("secret")));
  }
  EXPECT_EQ(send("DELETE", job, {}, b).status, 404);
  EXPECT_EQ(body_of(send("GET", "/v1/jobs", {}, b)).at("jobs").as_array().size(), 0u);
  EXPECT_EQ(body_of(send("GET", "/v1/workers", {}, b)).at("workers").at(0).at("jobs").as_array().size(), 0u);
  EXPECT_EQ(body_of(send("GET", "/v1/workers", {}, b)).at("workers").at(0).at("busy_units").as_int64(), 1);
  EXPECT_EQ(body_of(send("GET", "/v1/workers", {}, a)).at("workers").at(0).at("jobs").as_array().size(), 1u);
  for (const char* digests : {"adapters", "host_adapters"}) {
    EXPECT_EQ(body_of(send("GET", "/v1/workers", {}, b)).at("workers").at(0).at(digests).as_array().size(), 0u)
        << digests;
    EXPECT_NE(body_of(send("GET", "/v1/workers", {}, ops)).at("workers").at(0).at(digests).as_array().size(), 0u)
        << digests;
  }
  EXPECT_EQ(send("GET", job, {}, ops).status, 200);
  // The link of the owner works without a key, and only as it is.
  const std::string url(body_of(send("GET", job, {}, a)).at("unit_records").at(0).at("result").at("url").as_string());
  const std::string link = url.substr(std::string("http://localhost:80").size());
  EXPECT_EQ(send("GET", link).body, "picture");
  EXPECT_EQ(send("GET", link + "0").status, 401);
  EXPECT_EQ(send("GET", job + "/results/0").status, 401);
}

TEST_F(GatewayApi, AnUploadIsReadByItsTenant) {
  start({{"acme", sha256_hex("a"), false}, {"bolt", sha256_hex("b"), false}});
  const NameValues a = {{"Authorization", "Bearer a"}}, b = {{"Authorization", "Bearer b"}};
  std::string file = "GIF87a";  // 1×1, without colours
  file += std::string("\1\0\1\0\0\0\0", 7);
  file += std::string(",\0\0\0\0\1\0\1\0\0\2\2\x44\1\0;", 16);
  const std::string id = sha256_hex(file), path = "/v1/uploads/" + id + "/content";
  service.owned_inputs["acme"][id] = static_cast<std::int64_t>(file.size());
  service.blobs[id] = file;
  const Response got = send("GET", path, {}, a);
  EXPECT_EQ(got.status, 200) << got.body;
  EXPECT_EQ(got.content_type, "image/gif");
  EXPECT_EQ(got.body, file);
  NameValues again = a;
  again.emplace_back("If-None-Match", header(got, "ETag"));
  EXPECT_EQ(send("GET", path, {}, again).status, 304);
  EXPECT_EQ(send("GET", path, {}, b).status, 404);
  EXPECT_EQ(send("GET", path).status, 401);
}

TEST_F(GatewayApi, SynchronousGenerationWaitsForItsJob) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a","n":2,"response_format":"b64_json"})");
  ASSERT_TRUE(response.later);
  Response done = finish(response, [&] {
    service.admit("job-1");
    service.step("job-1", 0, 1, 8);
    service.succeed("job-1", 1, "second");
    service.succeed("job-1", 0, "first");
  });
  EXPECT_EQ(done.status, 200) << done.body;
  ASSERT_TRUE(done.stream);
  drain(done);
  const auto body = *parse_json(sink.text);
  EXPECT_EQ(body.at("created").as_int64(), 1700000000);
  EXPECT_EQ(body.at("data").at(0).at("b64_json").as_string(), base64("first"));
  EXPECT_EQ(body.at("data").at(1).at("b64_json").as_string(), base64("second"));
  EXPECT_EQ(header(done, "X-Job-Id"), "job-1");
  EXPECT_FALSE(header(done, "X-Request-Id").empty());
  EXPECT_EQ(hub->subscriptions(), 0u);
}

// Many slow readers of large answers must not fill the memory.
TEST_F(GatewayApi, PicturesAreSentInSmallPieces) {
  std::string large;
  for (unsigned i = 0; i < 500'000; ++i) large += static_cast<char>(i * 7919 >> 5);
  const auto generate = [&](const std::string& fields) {
    sink = RecordingSink();
    return send("POST", "/v1/images/generations",
                R"({"prompt":"a","n":3,"safety_identifier":"\"b64_json\":\"\"",)" + fields + "}",
                {{"Idempotency-Key", "k"}});
  };
  std::size_t most = 0, before = 0;
  const auto watch = [&] {
    sink.after_write = [&] {
      most = std::max(most, sink.text.size() - before);
      before = sink.text.size();
    };
    before = 0;
  };
  Response response = generate(R"("response_format":"b64_json")");
  Response done = finish(response, [&] {
    service.admit("job-1");
    for (int unit = 0; unit < 3; ++unit) service.succeed("job-1", unit, large + std::to_string(unit));
  });
  ASSERT_TRUE(done.stream) << done.body;
  EXPECT_EQ(done.content_type, "application/json");
  watch();
  drain(done);
  const auto body = parse_json(sink.text);
  ASSERT_TRUE(body.ok()) << body.error().message << sink.text.substr(0, 300);
  for (int unit = 0; unit < 3; ++unit)
    EXPECT_TRUE(body->at("data").at(unit).at("b64_json").as_string() == base64(large + std::to_string(unit))) << unit;
  EXPECT_EQ(body->at("safety_identifier").as_string(), R"("b64_json":"")");
  EXPECT_LE(most, 200'000u);
  // The same pictures as events.
  Response streamed = generate(R"("response_format":"b64_json","stream":true)");
  ASSERT_TRUE(streamed.stream) << streamed.body;
  watch();
  drain(streamed);
  EXPECT_NE(sink.text.find("\"b64_json\":\"" + base64(large + "2") + "\""), std::string::npos);
  EXPECT_TRUE(sink.text.ends_with("\n\n"));
  EXPECT_LE(most, 200'000u);
}

TEST_F(GatewayApi, APictureThatIsGoneIsAnErrorAndADamagedOneEndsTheConnection) {
  const auto again = [&] {
    sink = RecordingSink();
    Response response = send("POST", "/v1/images/generations", R"({"prompt":"a","response_format":"b64_json"})",
                             {{"Idempotency-Key", "k"}});
    return finish(response, [&] {
      if (!service.jobs["job-1"].unit_records.empty()) return;
      service.admit("job-1");
      service.succeed("job-1", 0, "picture");
    });
  };
  EXPECT_TRUE(again().stream);
  auto& [key, bytes] = *service.blobs.begin();
  bytes = "Picture";
  Response damaged = again();
  ASSERT_TRUE(damaged.stream);
  drain(damaged);
  EXPECT_TRUE(sink.aborted);
  EXPECT_FALSE(sink.text.ends_with("}"));
  service.blobs.clear();
  EXPECT_FALSE(again().stream);
}

TEST_F(GatewayApi, StreamsAndWaitingRequestsOfATenantHaveAQuota) {
  start({{"a", sha256_hex("ka"), false}, {"b", sha256_hex("kb"), false}});
  const auto generate = [&](const std::string& key, const std::string& more) {
    return send("POST", "/v1/images/generations", R"({"prompt":"x")" + more + "}",
                {{"Authorization", "Bearer " + key}});
  };
  std::vector<Response> open;  // of 12 places for streams, 6 for one tenant
  for (int i = 0; i < 3; ++i) {
    open.push_back(generate("ka", ""));
    ASSERT_TRUE(open.back().later) << open.back().body;
    open.push_back(generate("ka", R"(,"stream":true)"));
    ASSERT_TRUE(open.back().stream) << open.back().body;
  }
  const auto submitted = service.submissions.size();
  for (const char* more : {"", R"(,"stream":true)"}) {
    const Response refused = generate("ka", more);
    EXPECT_EQ(refused.status, 429);
    EXPECT_THAT(
        refused.body,
        HasSubstr("tenant 'a' has 6 open event streams, waiting image requests and downloads of large results"));
    EXPECT_FALSE(header(refused, "Retry-After").empty());
  }
  EXPECT_EQ(service.submissions.size(), submitted) << "a refused request submits nothing";
  EXPECT_EQ(send("GET", "/v1/jobs/job-1/events", {}, {{"Authorization", "Bearer ka"}}).status, 429);
  for (int i = 0; i < 6; ++i) open.push_back(generate("kb", ""));
  EXPECT_TRUE(open.back().later) << "another tenant has room";
  open.erase(open.begin());
  EXPECT_TRUE(generate("ka", "").later);
}

TEST_F(GatewayApi, SynchronousGenerationTellsWhyItFailed) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a"})");
  const Response done = finish(response, [&] {
    service.fail("job-1", {Code::kOutOfMemory, "the device is full", {}});
  });
  EXPECT_EQ(done.status, 503);
  EXPECT_THAT(done.body, HasSubstr("job job-1 failed: the device is full"));
  // The job has had its tries; a client that tries again by itself would only make another.
  EXPECT_EQ(header(done, "x-should-retry"), "false");
  EXPECT_EQ(header(done, "Retry-After"), "");
}

TEST_F(GatewayApi, AClientThatLeavesDoesNotCancelItsJob) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a"})");
  finish(response, [&] { sink.leave(); });
  EXPECT_FALSE(job::is_terminal(service.jobs["job-1"].state));
  EXPECT_EQ(hub->subscriptions(), 0u);
}

TEST_F(GatewayApi, AGapInTheFeedIsMadeGood) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a"})");
  const Response done = finish(response, [&] {
    service.admit("job-1");
    auto& record = service.jobs["job-1"];
    record.state = job::State::kFailed;
    record.error = Error{Code::kInternal, "unseen", {}};
    service.gap();
  });
  EXPECT_THAT(done.body, HasSubstr("unseen"));
}

TEST_F(GatewayApi, StoppingAnswersThoseWhoWait) {
  Response response = send("POST", "/v1/images/generations", R"({"prompt":"a"})");
  const Response done = finish(response, [&] { hub->stop(); });
  EXPECT_EQ(done.status, 503);
  EXPECT_THAT(done.body, HasSubstr("job job-1 continues"));
}

TEST_F(GatewayApi, CountsRequestsByRoute) {
  send("GET", "/v1/models/demo");
  send("GET", "/no/such/path");
  const Response metrics = send("GET", "/metrics");
  EXPECT_THAT(metrics.body,
              HasSubstr(R"(ditfleet_http_requests_total{code="200",method="GET",route="/v1/models/{model}"})"));
  EXPECT_THAT(metrics.body, HasSubstr(R"(ditfleet_http_requests_total{code="404",method="GET",route="none"})"));
  EXPECT_THAT(metrics.body, HasSubstr("ditfleet_http_request_duration_seconds_bucket"));
  EXPECT_THAT(metrics.body, HasSubstr("ditfleet_http_event_streams"));
}

// What a browser sends on behalf of a page of another site, or of a name that was rebound to this host.
TEST_F(GatewayApi, WithoutKeysForeignPagesAreRefused) {
  const std::string job = R"({"prompt":"x"})";
  const auto post = [&](NameValues headers) { return send("POST", "/v1/jobs", job, std::move(headers)).status; };
  Request plain = request("POST", "/v1/jobs", job);
  std::erase_if(plain.headers, [](const auto& field) { return field.first == "Content-Type"; });
  EXPECT_EQ(run_task(context, api->handle(plain)).status, 415) << "fetch() with mode no-cors sends no type";
  EXPECT_EQ(post({{"Sec-Fetch-Site", "cross-site"}}), 403);
  EXPECT_EQ(post({{"Origin", "https://evil.example"}}), 403);
  EXPECT_EQ(post({{"Origin", "null"}}), 403);
  EXPECT_EQ(post({{"Origin", "http://localhost:81"}}), 403);
  EXPECT_EQ(post({{"Origin", "http://localhost:80"}, {"Sec-Fetch-Site", "same-origin"}}), 202);
  EXPECT_EQ(send("GET", "/v1/jobs", {}, {{"Sec-Fetch-Site", "cross-site"}}).status, 200) << "cannot be read there";
  for (const char* host : {"localhost", "LOCALHOST:8780", "127.0.0.1:8780", "127.8.9.1", "[::1]:8780", "[::1]"})
    EXPECT_EQ(send("GET", "/v1/jobs", {}, {{"Host", host}}).status, 200) << host;
  for (const char* host : {"evil.example", "evil.example:8780", "localhost.evil.example", "127.0.0.1.evil.example",
                           "127.evil.example", "10.0.0.1", "0.0.0.0", "[::2]", "[::1", "[", "]", "a:b:c"}) {
    const Response refused = send("GET", "/v1/jobs", {}, {{"Host", host}});
    ASSERT_EQ(refused.status, 403) << host;
    EXPECT_THAT(std::string(body_of(refused).at("error").at("message").as_string()), HasSubstr("gateway.public_url"));
    for (const char* vital : {"/healthz", "/readyz", "/metrics"})
      EXPECT_EQ(send("GET", vital, {}, {{"Host", host}}).status, 200) << host;
  }
  EXPECT_EQ(send("OPTIONS", "/v1/jobs", {}, {{"Origin", "https://evil.example"}}).status, 403);
  EXPECT_EQ(service.submissions.size(), 1u);
}

TEST_F(GatewayApi, WithoutKeysItsOwnNamesAreServed) {
  const auto get = [&](const char* host) { return send("GET", "/v1/jobs", {}, {{"Host", host}}).status; };
  adjust = [](config::Settings& settings) { settings.gateway.public_url = "https://Images.example/base"; };
  start({});
  EXPECT_EQ(get("images.example"), 200);
  EXPECT_EQ(get("images.example:8780"), 200);
  EXPECT_EQ(get("other.example"), 403);
  EXPECT_EQ(send("POST", "/v1/jobs", R"({"prompt":"x"})", {{"Origin", "https://images.example"}}).status, 202);
  adjust = [](config::Settings& settings) {
    settings.gateway.listen = "render-1:8780";
    settings.gateway.open = true;
  };
  start({});
  EXPECT_EQ(get("render-1:8780"), 200);
  EXPECT_EQ(get("10.1.2.3:8780"), 200) << "rebinding needs a name";
  EXPECT_EQ(get("evil.example"), 403);
  adjust = {};
  start({{"acme", sha256_hex("a"), false}});
  EXPECT_EQ(send("GET", "/v1/jobs", {}, {{"Host", "any.example"}, {"Authorization", "Bearer a"}}).status, 200)
      << "no foreign page has the key";
}

TEST_F(GatewayApi, MetricsNeedAnAdministratorOrThisHost) {
  const auto scrape = [&](bool local, NameValues headers = {}) {
    Request r = request("GET", "/metrics", {}, std::move(headers));
    r.from_loopback = local;
    return run_task(context, api->handle(std::move(r))).status;
  };
  EXPECT_EQ(scrape(false), 200) << "without keys";
  const std::vector<config::ApiKey> keys = {{"acme", sha256_hex("a"), false}, {"ops", sha256_hex("o"), true}};
  start(keys);
  EXPECT_EQ(scrape(true), 200);
  for (const char* name : {"X-Forwarded-For",
                           "X-Forwarded-Host",
                           "X-Forwarded-Proto",
                           "Forwarded",
                           "Via",
                           "X-Real-IP",
                           "x-real-ip",
                           "CF-Connecting-IP",
                           "CF-Ray",
                           "True-Client-IP",
                           "X-Client-IP",
                           "X-Cluster-Client-IP",
                           "Fastly-Client-IP",
                           "Fly-Client-IP",
                           "X-Azure-ClientIP",
                           "X-Remote-Addr",
                           "X-Envoy-External-Address",
                           "X-Original-Forwarded-For",
                           "X-ProxyUser-Ip",
                           "CDN-Loop"})
    EXPECT_EQ(scrape(true, {{name, "10.0.0.1"}}), 401) << "a proxy on this host: " << name;
  for (const char* host : {"images.example.org", "images.example.org:443", "10.0.0.1", ""})
    EXPECT_EQ(scrape(true, {{"Host", host}}), 401) << "a proxy that keeps the Host: " << host;
  for (const char* host : {"localhost:8780", "127.0.0.1:8780", "[::1]:8780"})
    EXPECT_EQ(scrape(true, {{"Host", host}, {"X-Prometheus-Scrape-Timeout-Seconds", "10"}, {"Accept", "*/*"}}), 200);
  EXPECT_EQ(scrape(false), 401);
  EXPECT_EQ(scrape(false, {{"Authorization", "Bearer a"}}), 403);
  EXPECT_EQ(scrape(false, {{"Authorization", "Bearer o"}}), 200);
  adjust = [](config::Settings& settings) { settings.gateway.metrics_listen = "127.0.0.1:9463"; };
  start(keys);
  EXPECT_EQ(scrape(true), 401);
}

TEST_F(GatewayApi, LinksDependOnTheSharedSecretOnly) {
  start({{"acme", sha256_hex("a"), false}});
  const NameValues a = {{"Authorization", "Bearer a"}};
  const std::string id(body_of(send("POST", "/v1/jobs", R"({"prompt":"a"})", a)).at("id").as_string());
  service.admit(id);
  service.succeed(id, 0, "picture");
  const auto job = body_of(send("GET", "/v1/jobs/" + id, {}, a));
  const std::string url(job.at("unit_records").at(0).at("result").at("url").as_string());
  const std::string link = url.substr(std::string("http://localhost:80").size());
  EXPECT_THAT(link, HasSubstr("&kid=7&sig="));
  start({{"bolt", sha256_hex("b"), false}});
  EXPECT_EQ(send("GET", link).status, 200) << "whichever keys are configured by now";
  api->signer().learn(7, std::string(32, 'x'));
  EXPECT_EQ(send("GET", link).status, 401);
}

constexpr const char* kPng =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=";

constexpr const char* kGreyPng =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg==";
constexpr const char* kWidePng =
    "iVBORw0KGgoAAAANSUhEUgAAAAIAAAABCAQAAABeK7cBAAAADUlEQVR42mP4z/CfAQAF/wH/KbAXegAAAABJRU5ErkJggg==";

class GatewayEdits : public GatewayApi {
 protected:
  GatewayEdits() {
    adjust_models = [](job::Catalogue& catalogue) {
      job::ModelEntry& edits = catalogue.models["edits"] = job::image_model("edits");
      edits.apply("image") = {.low = 1, .high = 3};
      edits.apply("mask");
      edits.apply("strength");
      edits.free_width = edits.free_height = 1024;
      catalogue.default_model = "edits";
    };
    start({});
  }
  std::string refused(const std::string& route, const std::string& body) {
    const Response response = send("POST", route, body);
    EXPECT_EQ(response.status, 400) << body;
    const json::value answer = body_of(response);
    const json::value& param = answer.at("error").at("param");
    return param.is_null() ? "" : std::string(param.as_string());
  }
  std::string last_spec() const { return service.submissions.back().spec; }
};

TEST_F(GatewayEdits, WaitForTheirImages) {
  Response response = send("POST", "/v1/images/edits",
                           R"({"prompt":"x","images":[{"image_url":"data:image/png;base64,)" + std::string(kPng) +
                               R"("}],"response_format":"b64_json"})");
  ASSERT_EQ(response.status, 200) << response.body;
  const std::string sha256 = service.blobs.begin()->first;
  EXPECT_EQ(last_spec(), R"({"prompt":"x","image":")" + sha256 + R"(","priority":0,"partial_images":0})")
      << "without a size";
  response = finish(response, [&] {
    service.admit("job-1");
    service.succeed("job-1", 0, "PNG");
  });
  EXPECT_EQ(response.status, 200);
}

// Of images and masks that came with the request or before.
TEST_F(GatewayEdits, RefuseMasksAsOpenAiDoes) {
  const std::string image = R"({"prompt":"x","image":")", mask = R"(","mask":")", end = "\"}";
  for (const char* wrong : {kGreyPng, kWidePng}) {
    EXPECT_EQ(refused("/v1/images/edits", image + kPng + mask + wrong + end), "mask");
    EXPECT_TRUE(service.blobs.empty()) << "stored";
    ASSERT_EQ(send("POST", "/v1/jobs", image + kPng + mask + wrong + end).status, 202) << "scaled, and white counts";
    std::string stored = last_spec().substr(last_spec().find("mask") + 7, 64);
    EXPECT_EQ(refused("/v1/images/edits", image + kPng + mask + stored + end), "mask");
    stored = last_spec().substr(last_spec().find("image") + 8, 64);
    EXPECT_EQ(refused("/v1/images/edits", image + stored + mask + wrong + end), "mask");
    service.blobs.clear();
    service.owned_inputs.clear();
  }
}

TEST_F(GatewayEdits, RefuseImagesThatTheModelDoesNotRead) {
  ASSERT_EQ(send("POST", "/v1/jobs", R"({"prompt":"x","image":")" + std::string(kPng) + "\"}").status, 202);
  const std::string stored = service.blobs.begin()->first;
  const auto change = adjust_models;
  adjust_models = [&](job::Catalogue& catalogue) {
    change(catalogue);
    catalogue.models.at("edits").least_image_side = 2;
  };
  start({});
  for (const std::string& image : {stored, std::string(kPng)}) {
    EXPECT_EQ(refused("/v1/jobs", R"({"prompt":"x","image":")" + image + "\"}"), "image");
    EXPECT_EQ(refused("/v1/images/edits", R"({"prompt":"x","images":[")" + image + "\"]}"), "images[0]");
  }
}

TEST_F(GatewayEdits, StreamEventsOfTheirOwn) {
  const std::string form =
      "--b\r\nContent-Disposition: form-data; name=\"prompt\"\r\n\r\nx\r\n--b\r\nContent-Disposition: form-data; "
      "name=\"stream\"\r\n\r\ntrue\r\n--b\r\nContent-Disposition: form-data; name=\"image[]\"\r\n\r\n" +
      std::string(kPng) + "\r\n--b--\r\n";
  Response response = send("POST", "/v1/images/edits", form, {{"Content-Type", "multipart/form-data; boundary=b"}});
  ASSERT_EQ(response.status, 200) << response.body;
  service.admit("job-1");
  service.succeed("job-1", 0, "PNG");
  drain(response);
  EXPECT_THAT(sink.text, HasSubstr("event: image_edit.completed\ndata: {\"type\":\"image_edit.completed\""));
}

// Native jobs and both routes of images: stored images beside sent ones, twice the same, and unknown ones.
TEST_F(GatewayEdits, NameTheImageThatIsWrong) {
  const std::string png(kPng), unknown(64, '0');
  for (const char* route : {"/v1/jobs", "/v1/images/generations", "/v1/images/edits"}) {
    const auto body = [](const std::string& fields) { return R"({"prompt":"x",)" + fields + "}"; };
    ASSERT_LT(send("POST", route, body(R"("image":")" + png + "\"")).status, 300);
    const std::string id = service.blobs.begin()->first;
    const std::string all = R"("images":[")" + id + R"(",")" + png + R"(",")" + png + "\"]";
    ASSERT_LT(send("POST", route, body(all)).status, 300);
    EXPECT_THAT(last_spec(), HasSubstr(R"("images":[")" + id + R"(",")" + id + R"(",")" + id + "\"]"));
    ASSERT_LT(send("POST", route, body(R"("images":[")" + png + R"("],"mask":")" + png + R"(","strength":0.5)")).status,
              300);
    EXPECT_THAT(last_spec(), HasSubstr(R"("image":")" + id + R"(","mask":")" + id + R"(","strength":0.5)"));
    EXPECT_EQ(service.blobs.size(), 1u);
    const std::vector<std::pair<std::string, std::string>> cases = {
        {R"("image":")" + unknown + "\"", "image"},
        {R"("images":[")" + unknown + "\"]", "images[0]"},
        {R"("images":[")" + png + R"(",")" + unknown + "\"]", "images[1]"},
        {R"("images":[")" + id + R"(","!"])", "images[1]"},
        {R"("images":[")" + png + R"(","QUJD",")" + unknown + "\"]", "images[1]"},
        {R"("images":[1])", "images[0]"},
        {R"("images":["a","b","c","d"])", "images"},
        {R"("images":["a"],"image":"b")", "images"},
        {R"("image":")" + id + R"(","mask":"QUJD")", "mask"},
        {R"("image":")" + id + R"(","mask":")" + unknown + "\"", "mask"},
        {R"("image":")" + id + R"(","strength":0)", "strength"},
        {R"("images":[")" + id + R"(",")" + id + R"("],"mask":")" + id + "\"", "mask"},
        {R"("image":")" + id + R"(","auto_resize":false)", "auto_resize"},
    };
    for (const auto& [fields, param] : cases) EXPECT_EQ(refused(route, body(fields)), param) << route << fields;
    const bool edit = route == std::string("/v1/images/edits");
    EXPECT_EQ(refused(route, body(R"("mask":")" + id + "\"")), edit ? "image" : "mask");
    EXPECT_EQ(refused(route, body(R"("model":"demo","image":")" + png + "\"")), "image") << "it takes none";
    EXPECT_EQ(refused(route, body(R"("model":"demo","images":[")" + png + "\"]")),
              route == std::string("/v1/jobs") ? "image" : "images");
    service.blobs.clear();
    service.owned_inputs.clear();
  }
  EXPECT_EQ(refused("/v1/images/edits", R"({"prompt":"x"})"), "image");
}

TEST_F(GatewayEdits, VariationsNameTheWayOut) {
  const Response response = send("POST", "/v1/images/variations", "--b--", {{"Content-Type", "multipart/form-data"}});
  EXPECT_EQ(response.status, 400);
  EXPECT_THAT(response.body, HasSubstr("use POST /v1/images/edits"));
}

TEST_F(GatewayApi, AVideoBeginsWithTheReferenceOfTheRequest) {
  adjust_models = [](job::Catalogue& catalogue) {
    job::ModelEntry& clips = catalogue.models["clips"] = job::image_model("clips");
    clips.media = job::MediaKind::kVideo;
    clips.apply("image").required = true;
    clips.apply("frames") = {.low = 1, .high = 81, .multiple_of = 4, .remainder = 1};
    clips.apply("fps");
    clips.defaults = {};
    clips.defaults.set("fps", 16);
    clips.defaults.set("frames", 81);
    catalogue.default_model = "clips";
  };
  start({});
  const auto create = [&](const std::string& reference) {
    return send("POST", "/v1/videos", R"({"prompt":"x","seconds":"4")" + reference + "}");
  };
  const Response without = create("");
  EXPECT_EQ(without.status, 400);
  EXPECT_EQ(body_of(without).at("error").at("param").as_string(), "image");
  const Response made =
      create(R"(,"input_reference":{"image_url":"data:image/png;base64,)" + std::string(kPng) + "\"}");
  ASSERT_EQ(made.status, 200) << made.body;
  const auto video = body_of(made);
  EXPECT_EQ(video.at("seconds").as_string(), "4");
  EXPECT_EQ(video.at("size").as_string(), "auto") << "the image decides it";
  ASSERT_EQ(service.blobs.size(), 1u);
  const std::string sha256 = service.blobs.begin()->first;
  EXPECT_THAT(service.submissions.back().spec, HasSubstr("\"image\":\"" + sha256 + "\""));
  EXPECT_THAT(service.submissions.back().spec, HasSubstr("\"frames\":65"));
  const std::string id = R"(,"input_reference":{"file_id":")";
  EXPECT_EQ(create(id + sha256 + "\"}").status, 200);
  const Response unknown = create(id + std::string(64, '0') + "\"}");
  EXPECT_EQ(unknown.status, 400);
  EXPECT_EQ(body_of(unknown).at("error").at("param").as_string(), "input_reference");
  EXPECT_EQ(service.submissions.size(), 2u);
}

TEST_F(GatewayApi, ARemixIsTheFormerJobWithAnotherPrompt) {
  adjust_models = [](job::Catalogue& catalogue) { catalogue.models["demo"].media = job::MediaKind::kVideo; };
  start({{"acme", sha256_hex("a"), false}, {"bolt", sha256_hex("b"), false}});
  const auto remix = [&](const std::string& id, const std::string& body, const char* key = "a") {
    return send("POST", "/v1/videos/" + id + "/remix", body, {{"Authorization", std::string("Bearer ") + key}});
  };
  const std::string prompt = R"({"prompt":"y"})";
  const std::string former =
      R"({"model":"demo","prompt":"x","width":64,"height":32,"num_inference_steps":4,"seed":7,"priority":1,)";
  queue::JobRecord& record = service.jobs["job-1"];
  record.id = "job-1";
  record.tenant = "acme";
  record.spec = former + R"("deadline_ms":9,"n":2})";
  EXPECT_THAT(remix("job-1", prompt).body, HasSubstr("'job-1' is queued; only a completed video can be remixed"));
  record.state = job::State::kFailed;
  EXPECT_THAT(remix("job-1", prompt).body, HasSubstr("is failed"));
  record.state = job::State::kSucceeded;
  EXPECT_EQ(remix("job-1", prompt, "b").status, 404);
  EXPECT_EQ(remix("none", prompt).status, 404);
  for (const char* wrong : {"{}", R"({"prompt":null})", R"({"prompt":5})", R"({"prompt":"x","seconds":"4"})", "[]"})
    EXPECT_EQ(remix("job-1", wrong).status, 400) << wrong;
  ASSERT_TRUE(service.submissions.empty());
  const Response made = remix("job-1", prompt);
  ASSERT_EQ(made.status, 200) << made.body;
  EXPECT_EQ(
      service.submissions.back().spec,
      R"({"model":"demo","prompt":"y","n":1,"width":64,"height":32,"num_inference_steps":4,"seed":7,"priority":1,)"
      R"("partial_images":0,"remixed_from":"job-1"})");
  EXPECT_EQ(service.submissions.back().deadline_in_ms, 0);
  EXPECT_EQ(body_of(made).at("remixed_from_video_id").as_string(), "job-1");
  EXPECT_EQ(header(made, "Location"), "/v1/videos/job-2");
}

}  // namespace
}  // namespace ditfleet::gateway
