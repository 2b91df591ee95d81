// The gateway's pure parts: targets, routes, errors, events, keys, OpenAI's form.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "coordinator/gateway/backend/link_signer.h"
#include "coordinator/gateway/backend/redis_error.h"
#include "coordinator/gateway/events/event_stream.h"
#include "coordinator/gateway/http/http.h"
#include "coordinator/gateway/http/multipart.h"
#include "coordinator/gateway/routes/auth.h"
#include "coordinator/gateway/routes/embedded.h"
#include "coordinator/gateway/routes/errors.h"
#include "coordinator/gateway/routes/job_json.h"
#include "coordinator/gateway/routes/openai_images.h"
#include "coordinator/gateway/routes/openapi.h"
#include "coordinator/gateway/routes/router.h"
#include "shared/core/bytes.h"
#include "shared/core/json.h"
#include "shared/core/short_numbers.h"
#include "tests/fixtures/image_model.h"

namespace ditfleet::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Request get(const std::string& target, const std::string& method = "GET") {
  Request request;
  request.method = method;
  EXPECT_TRUE(parse_target(target, request).ok()) << target;
  return request;
}

TEST(GatewayTarget, SplitsPathAndQuery) {
  const Request request = get("/v1/jobs/a%20b/events?last_event_id=1-2&x=a+b%26c&flag");
  EXPECT_THAT(request.segments, ElementsAre("v1", "jobs", "a b", "events"));
  EXPECT_EQ(request.query_value("last_event_id"), "1-2");
  EXPECT_EQ(request.query_value("x"), "a b&c");
  EXPECT_EQ(request.query_value("flag"), "");
  EXPECT_EQ(request.query_value("none"), std::nullopt);
  EXPECT_FALSE(request.trailing_slash);
  EXPECT_TRUE(get("/v1/jobs/").trailing_slash);
  EXPECT_TRUE(get("/").segments.empty());
}

TEST(GatewayTarget, TakesTheFormForProxies) {
  EXPECT_THAT(get("http://host:80/v1/jobs?limit=3").segments, ElementsAre("v1", "jobs"));
  EXPECT_EQ(get("HTTP://host?limit=3").query_value("limit"), "3");
  EXPECT_TRUE(get("https://[::1]:80").segments.empty());
}

TEST(GatewayRequest, EntityTagsAreAList) {
  EXPECT_TRUE(names_etag("\"a\"", "\"a\""));
  EXPECT_TRUE(names_etag("\"b\" , W/\"a\"", "\"a\""));  // a proxy that compressed it made it weak
  EXPECT_TRUE(names_etag("*", "\"a\""));
  EXPECT_FALSE(names_etag("", "\"a\""));
  EXPECT_FALSE(names_etag("W/\"a\"", "\"a\"", true));
  EXPECT_TRUE(names_etag("W/\"a\", \"a\"", "\"a\"", true));
  EXPECT_FALSE(names_etag("\"b\", a, ,", "\"a\""));
}

TEST(GatewayRequest, MediaTypesIgnoreCaseAndParameters) {
  EXPECT_EQ(media_type_of("Application/JSON\t; charset=UTF-8"), "application/json");
  EXPECT_EQ(media_type_of(" ;x"), "");
}

TEST(GatewayRequest, RangesOfBytes) {
  const auto range = [](std::string_view field, std::int64_t size = 100) -> std::string {
    const auto found = parse_range(field, size);
    return found ? std::to_string(found->first) + "+" + std::to_string(found->size) : "ignored";
  };
  EXPECT_EQ(range("bytes=0-0"), "0+1");
  EXPECT_EQ(range("bytes=10-19"), "10+10");
  EXPECT_EQ(range("bytes=10-"), "10+90");
  EXPECT_EQ(range("bytes=90-1000"), "90+10");
  EXPECT_EQ(range("BYTES=0-9"), "0+10");
  EXPECT_EQ(range("bytes=-7"), "93+7");
  EXPECT_EQ(range("bytes=-1000"), "0+100");
  for (const char* unsatisfiable : {"bytes=100-", "bytes=100-200", "bytes=9223372036854775807-"})
    EXPECT_TRUE(range(unsatisfiable).ends_with("+0")) << unsatisfiable;
  EXPECT_TRUE(range("bytes=-0").ends_with("+0"));
  EXPECT_TRUE(range("bytes=-5", 0).ends_with("+0"));
  EXPECT_TRUE(range("bytes=0-", 0).ends_with("+0"));
  for (const char* ignored : {"", "bytes", "bytes=", "bytes=-", "bytes=9-3", "bytes=0-1,3-4", "bytes=a-b", "bytes=-1-2",
                              "items=0-1", "bytes=0x1-2", "bytes=99999999999999999999-", "bytes=1", "bytes= 1-2"})
    EXPECT_EQ(range(ignored), "ignored") << ignored;
}

TEST(GatewayForm, SplitsParts) {
  const auto parts = [](std::string_view type, const std::string& body) -> std::string {
    const auto form = parse_form(type, body);
    if (!form) return "refused";
    std::string text;
    for (const FormPart& part : *form)
      text += part.name + (part.is_file ? "(file)=" : "=") + std::string(part.contents) + ";";
    return text;
  };
  const auto part = [](const std::string& disposition, const std::string& contents) {
    return "--b\r\nContent-Disposition: form-data; " + disposition + "\r\n\r\n" + contents + "\r\n";
  };
  const std::string one = part("name=\"a\"", "1"), type = "multipart/form-data; boundary=b";
  EXPECT_EQ(parts(type, one + "--b--\r\n"), "a=1;");
  EXPECT_EQ(parts("multipart/form-data; boundary=\"b\"", one + "--b--"), "a=1;");
  EXPECT_EQ(parts(type, one + one + "--b--\r\n"), "a=1;a=1;") << "both of one name are seen";
  EXPECT_EQ(parts(type, part("name=\"f\"; filename=\"x.png\"", "") + "--b--"), "f(file)=;");
  for (const std::string& body : std::vector<std::string>{"", one, one + "--b", part("filename=\"x\"", "1") + "--b--"})
    EXPECT_EQ(parts(type, body), "refused") << body;
  EXPECT_EQ(parts("multipart/form-data", one + "--b--"), "refused");
  std::string many;
  for (int i = 0; i < 65; ++i) many += one;
  EXPECT_EQ(parts(type, many + "--b--"), "refused");
}

TEST(GatewayTarget, RefusesWhatIsNoPath) {
  Request request;
  for (const char* bad : {"", "v1/jobs", "*", "http:///v1", "http://[::1/v1", "ftp://host/v1", "/%", "/%4", "/%zz",
                          "/%00", "/%ff", "/a?b=%e0%80"}) {
    EXPECT_FALSE(parse_target(bad, request).ok()) << bad;
  }
}

TEST(GatewayRequest, HeaderNamesIgnoreCase) {
  Request request;
  request.headers = {{"Content-Type", "application/json"}};
  EXPECT_EQ(request.header("content-type"), "application/json");
  EXPECT_TRUE(request.has_header("CONTENT-TYPE"));
  EXPECT_FALSE(request.has_header("content"));
}

Router router() {
  Router router;
  for (const auto& [method, pattern] :
       std::vector<std::pair<const char*, const char*>>{{"GET", "/"},
                                                        {"POST", "/v1/jobs"},
                                                        {"GET", "/v1/jobs/{id}"},
                                                        {"DELETE", "/v1/jobs/{id}"},
                                                        {"GET", "/v1/jobs/{id}/results/{index}"},
                                                        {"POST", "/v1/images/generations"}}) {
    router.add({.method = method, .pattern = pattern, .handler = {}});
  }
  return router;
}

TEST(GatewayRouter, MatchesPathsAndMethods) {
  const Router routes = router();
  const auto pattern = [&](const std::string& target, const std::string& method = "GET") {
    const auto match = routes.match(get(target, method));
    return match.route == nullptr ? std::string() : std::string(match.route->method) + " " + std::string(match.pattern);
  };
  EXPECT_EQ(pattern("/v1/jobs/j1/results/3"), "GET /v1/jobs/{id}/results/{index}");
  EXPECT_THAT(routes.match(get("/v1/jobs/j1/results/3")).params, ElementsAre("j1", "3"));
  EXPECT_EQ(pattern("/"), "GET /");
  EXPECT_EQ(pattern("/v1/jobs", "POST"), "POST /v1/jobs");
  EXPECT_EQ(pattern("/v1/jobs/j1", "HEAD"), "GET /v1/jobs/{id}");
  EXPECT_EQ(pattern("/v1/jobs/j1", "DELETE"), "DELETE /v1/jobs/{id}");
}

TEST(GatewayRouter, ListsTheMethodsOfAPath) {
  const Router routes = router();
  auto match = routes.match(get("/v1/jobs/j1", "PUT"));
  EXPECT_EQ(match.route, nullptr);
  EXPECT_EQ(match.allow, "GET, HEAD, DELETE, OPTIONS");
  EXPECT_EQ(routes.match(get("/v1/images/generations")).allow, "POST, OPTIONS");
  EXPECT_TRUE(routes.match(get("/v1/nothing")).allow.empty());
  EXPECT_TRUE(routes.match(get("/v1/jobs/")).allow.empty());
  EXPECT_TRUE(routes.match(get("/v1/jobs/a/b/c/d")).allow.empty());
}

void check_references(const json::value& value, const json::value& root) {
  if (value.is_array()) {
    for (const auto& element : value.as_array()) check_references(element, root);
  } else if (value.is_object()) {
    for (const auto& [key, element] : value.as_object()) {
      if (key == "$ref") {
        boost::system::error_code ec;
        EXPECT_NE(root.find_pointer(std::string_view(element.as_string()).substr(1), ec), nullptr)
            << element.as_string();
      } else {
        check_references(element, root);
      }
    }
  }
}

TEST(GatewayOpenApi, ReferencesLeadSomewhere) {
  auto document = parse_json(openapi_document());
  ASSERT_TRUE(document.ok());
  check_references(*document, *document);
}

TEST(GatewayOpenApi, DescribesEveryFieldOfAJob) {
  const auto document = parse_json(openapi_document());
  ASSERT_TRUE(document.ok());
  const auto& schemas = document->at("components").at("schemas").as_object();
  const auto& of_job = schemas.at("JobRequest").at("properties").as_object();
  EXPECT_EQ(of_job.size(), job::kFieldRows.size());
  for (const job::FieldRow& row : job::kFieldRows) {
    ASSERT_TRUE(of_job.contains(row.name)) << row.name;
    EXPECT_EQ(of_job.at(row.name).at("description").as_string(), row.description);
  }
  EXPECT_EQ(of_job.at("width").at("minimum").as_int64(), 1);
  EXPECT_EQ(of_job.at("guidance_scale").at("type").as_string(), "number");
  const auto& of_image = schemas.at("ImageRequest").at("properties").as_object();
  EXPECT_TRUE(of_image.contains("num_inference_steps"));
  EXPECT_FALSE(of_image.contains("width"));
}

TEST(GatewayModels, SayWhatTheirFieldsTake) {
  job::ModelEntry model = job::image_model("m");
  model.apply("guidance_scale_2");
  const json::object object = model_json(model, 1);
  const json::value& fields = object.at("fields");
  EXPECT_EQ(fields.as_object().size(), model.fields.size());
  EXPECT_EQ(fields.at("width").at("multipleOf").as_int64(), 16);
  EXPECT_EQ(fields.at("width").at("maximum").as_int64(), 2048);
  EXPECT_EQ(fields.at("width").at("default").as_int64(), 1024);
  EXPECT_EQ(fields.at("guidance_scale_2").at("type").as_string(), "number");
  EXPECT_FALSE(fields.at("guidance_scale_2").as_object().contains("default"));
  EXPECT_EQ(object.at("defaults").at("num_inference_steps").as_int64(), 28);
}

TEST(GatewayConsole, LoadsNothingFromElsewhere) {
  EXPECT_THAT(std::string(kConsolePage), HasSubstr("</html>"));
  for (const char* outside : {"src=\"http", "href=\"http", "@import", "url(http", "//cdn", "import("}) {
    EXPECT_EQ(kConsolePage.find(outside), std::string_view::npos) << outside;
  }
}

// Fields of the model that the form lacks get an input from its `fields`: tests/clients/console_test.py.
TEST(GatewayConsole, OffersTheFieldsOfAJob) {
  const std::string page(kConsolePage);
  const std::set<job::Field> left_out = {"size",         "priority", "deadline_ms",       "output_compression", "user",
                                         "remixed_from", "webhook",  "pause_after_steps", "resume_from"};
  for (const job::Field field : job::kFields) {
    if (field.row().use != job::FieldUse::kJob || left_out.contains(field)) continue;
    const std::string name(field.name());
    EXPECT_TRUE(page.find(" name=\"" + name + "\"") != std::string::npos ||
                page.find("body." + name + " = ") != std::string::npos || page.find(name + ": ") != std::string::npos)
        << name;
  }
  const std::regex input(R"re( id="\w+" name="(\w+)")re");
  for (std::sregex_iterator match(page.begin(), page.end(), input), end; match != end; ++match)
    EXPECT_TRUE(job::find_field((*match)[1].str())) << (*match)[1];
}

TEST(GatewayErrors, HaveOpenAisForm) {
  const Response response = error_response(invalid_argument("'n' must be 1 to 10", "n"));
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(response.body, R"({"error":{"message":"'n' must be 1 to 10","type":"invalid_request_error","param":"n",)"
                           R"("code":"invalid_argument"}})"
                           "\n");
  const Response away = error_response(unavailable("Redis is away"));
  EXPECT_EQ(away.status, 503);
  EXPECT_THAT(away.headers, ::testing::Contains(std::pair<std::string, std::string>("Retry-After", "1")));
  EXPECT_THAT(away.body, HasSubstr(R"("type":"server_error","param":null)"));
  EXPECT_EQ(error_response(Error{Code::kIdempotencyMismatch, "", {}}).status, 422);
  EXPECT_EQ(error_response(Error{Code::kResourceExhausted, "", {}}).status, 429);
  EXPECT_THAT(error_response(Error{Code::kConflict, "[queue] the job id x is taken", {}}).body,
              HasSubstr(R"("message":"the job id x is taken")"));
}

TEST(GatewayErrors, ARedisThatIsAwayIsOneSentence) {
  const Error lost{.code = Code::kUnavailable,
                   .message = "[redis] lost the connection to unix:///r.sock: Operation canceled",
                   .source = Source::kRedisConnection};
  EXPECT_EQ(redis_error(lost, "the queue's Redis (unix:///r.sock)", "nothing was lost, try again shortly", "").message,
            "the queue's Redis (unix:///r.sock) does not answer; nothing was lost, try again shortly");
  const Error refused{.code = Code::kUnavailable, .message = "[redis] NOREPLICAS Not enough", .source = Source::kRedis};
  EXPECT_EQ(redis_error(refused, "Redis", "", "").message,
            "Redis rejects commands at the moment; nothing was changed, try again shortly (NOREPLICAS Not enough)");
}

TEST(GatewayEvents, AreFormattedAsTheStandardSays) {
  EXPECT_EQ(format_event("5-0", "step", "{}"), "id: 5-0\nevent: step\ndata: {}\n\n");
  EXPECT_EQ(format_event("", "x", "a\nb"), "event: x\ndata: a\ndata: b\n\n");
  EXPECT_EQ(format_comment("keep-alive"), ": keep-alive\n\n");
}

TEST(GatewayEvents, CarryNumbersAsNumbersAndNoSecrets) {
  queue::Event event;
  event.id = "5-1";
  event.job = "j";
  event.type = "step";
  event.unit = 2;
  event.at_ms = 9;
  event.fields = {{"step", "3"},    {"total", "28"}, {"nonce", "123"},
                  {"worker", "42"}, {"key", "df:x"}, {"manifest", "{}"}};
  EXPECT_EQ(parse_json(event_json(event, "")).value(), json::value({{"id", "5-1"},
                                                                    {"job", "j"},
                                                                    {"type", "step"},
                                                                    {"unit", 2},
                                                                    {"at_ms", 9},
                                                                    {"step", 3},
                                                                    {"total", 28},
                                                                    {"worker", "42"}}));
  event.unit = -1;
  event.fields.clear();
  const auto whole = parse_json(event_json(event, "/p")).value();
  EXPECT_TRUE(whole.at("unit").is_null());
  EXPECT_EQ(whole.at("url").as_string(), "/p");
}

TEST(GatewayEvents, IdsAreCheckedAndOrdered) {
  EXPECT_EQ(*parse_event_id("1700000000000-12"), "1700000000000-12");
  EXPECT_EQ(*parse_event_id("0"), "0-0");
  EXPECT_EQ(*parse_event_id("5"), "5-0");
  EXPECT_TRUE(parse_event_id("18446744073709551615-18446744073709551615").ok());
  for (const char* bad : {"", "-", "1-", "-1", "1-2-3", "x", "1 ", "$", "99999999999999999999999-1",
                          "18446744073709551616", "18446744073709551616-0", "0-18446744073709551616"}) {
    EXPECT_FALSE(parse_event_id(bad).ok()) << bad;
  }
}

TEST(GatewayEvents, OnlyTheJobsOwnEndEndsIt) {
  queue::Event event;
  event.type = "succeeded";
  event.unit = 0;
  EXPECT_FALSE(ends_job(event));
  event.unit = -1;
  EXPECT_TRUE(ends_job(event));
  event.type = "step";
  EXPECT_FALSE(ends_job(event));
}

KeyRing ring() { return KeyRing({{"acme", sha256_hex("key-a"), false}, {"ops", sha256_hex("key-o"), true}}); }

TEST(GatewayKeys, DecideTheTenant) {
  EXPECT_EQ(ring().authenticate("Bearer key-a")->tenant, "acme");
  EXPECT_EQ(ring().authenticate("bearer  key-a ")->view(), "acme");
  EXPECT_TRUE(ring().authenticate("Bearer key-o")->sees_all);
  EXPECT_EQ(ring().authenticate("Bearer key-o")->view(), "");
  for (const char* bad : {"", "Bearer", "Bearer ", "Bearer key-b", "Basic key-a", "key-a", "Bearer KEY-A"}) {
    auto caller = ring().authenticate(bad);
    ASSERT_FALSE(caller.ok()) << bad;
    EXPECT_EQ(caller.error().code, Code::kUnauthenticated);
  }
}

TEST(GatewayKeys, AddedOnesReplaceEachOtherBesideTheConfigured) {
  KeyRing keys = ring();
  const Key added{.id = "1", .tenant = "new", .sha256 = sha256_hex("key-n"), .created_ms = 1};
  keys.set_added({added});
  EXPECT_EQ(keys.authenticate("Bearer key-n")->key, "1");
  EXPECT_EQ(keys.authenticate("Bearer key-a")->key, "keys.0");
  EXPECT_EQ(keys.tenants(), (std::set<std::string>{"acme", "new", "ops"}));
  keys.set_added({});
  EXPECT_FALSE(keys.authenticate("Bearer key-n").ok());
  EXPECT_TRUE(keys.authenticate("Bearer key-a").ok());
  // Nobody is let in before it is known whether there are keys.
  KeyRing some = ring();
  some.await_added();
  EXPECT_TRUE(some.authenticate("Bearer key-a").ok());
  EXPECT_EQ(some.authenticate("Bearer added").error().code, Code::kUnavailable) << "it may have been added";
  some.set_added({});
  EXPECT_EQ(some.authenticate("Bearer added").error().code, Code::kUnauthenticated);
  KeyRing none({});
  none.await_added();
  EXPECT_EQ(none.authenticate("").error().code, Code::kUnavailable);
  none.set_added({added});
  EXPECT_FALSE(none.authenticate("").ok());
}

TEST(GatewayKeys, ARingThatRequiresKeysIsNeverOpen) {
  KeyRing keys({});
  keys.require_keys("delete 'FILE'");
  EXPECT_FALSE(keys.open());
  for (const char* header : {"", "Bearer k"}) {
    const auto refused = keys.authenticate(header);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().code, Code::kUnauthenticated);
    EXPECT_THAT(refused.error().message, testing::HasSubstr("FILE"));
  }
  keys.set_added({{.id = "1", .tenant = "a", .sha256 = sha256_hex("k"), .created_ms = 1}});
  EXPECT_TRUE(keys.authenticate("Bearer k").ok());
  keys.set_added({});
  EXPECT_FALSE(keys.authenticate("").ok());
}

TEST(GatewayKeys, ACallerIsAcceptedAsLongAsItsKey) {
  KeyRing keys({{"ops", sha256_hex("o"), true}});
  Key key{.id = "1", .tenant = "a", .sha256 = sha256_hex("k"), .created_ms = 1};
  keys.set_added({key});
  const Caller caller = keys.authenticate("Bearer k").value(), configured = keys.authenticate("Bearer o").value();
  EXPECT_TRUE(keys.still_accepts(caller));
  key.sha256 = sha256_hex("new");  // rotated
  keys.set_added({key});
  EXPECT_FALSE(keys.still_accepts(caller));
  keys.set_added({});  // revoked
  EXPECT_FALSE(keys.still_accepts(caller));
  EXPECT_TRUE(keys.still_accepts(configured));
  KeyRing none({});
  const Caller anyone = none.authenticate("").value();
  EXPECT_TRUE(none.still_accepts(anyone));
  none.set_added({key});
  EXPECT_FALSE(none.still_accepts(anyone));
  EXPECT_TRUE(none.still_accepts({.tenant = "", .sees_all = true})) << "a signed link";
}

TEST(GatewayKeys, WithoutKeysEveryoneIsTheDefaultTenant) {
  const KeyRing open({});
  EXPECT_EQ(open.authenticate("")->tenant, "default");
  EXPECT_EQ(open.authenticate("Bearer anything")->tenant, "default");
}

TEST(GatewayLinks, HoldForOnePathAndATime) {
  const std::string path = "/v1/jobs/j/results/0";
  LinkSigner signer;
  EXPECT_EQ(signer.sign(path, 1000), "") << "no secret yet";
  signer.learn(3, std::string(32, 'a'));
  const std::string link = signer.sign(path, 1000);
  ASSERT_TRUE(link.starts_with("expires=1000&kid=3&sig=")) << link;
  const std::string signature = link.substr(23);
  EXPECT_TRUE(signer.verify(path, "1000", "3", signature, 999));
  EXPECT_FALSE(signer.verify(path, "1000", "3", signature, 1001));
  EXPECT_FALSE(signer.verify(path, "2000", "3", signature, 999));
  EXPECT_FALSE(signer.verify(path, "1000", "4", signature, 999));
  EXPECT_FALSE(signer.verify(path, "1000", "", signature, 999));
  EXPECT_FALSE(signer.verify("/v1/jobs/j/results/1", "1000", "3", signature, 999));
  EXPECT_FALSE(signer.verify(path, "1000", "3", "", 999));
  // Another secret signs from now on. Links that the old one signed stay valid until it is replaced.
  signer.learn(4, std::string(32, 'b'));
  EXPECT_TRUE(signer.sign(path, 1000).starts_with("expires=1000&kid=4&"));
  EXPECT_TRUE(signer.verify(path, "1000", "3", signature, 999));
  signer.learn(3, std::string(32, 'c'));
  EXPECT_FALSE(signer.verify(path, "1000", "3", signature, 999));
  EXPECT_FALSE(LinkSigner().verify(path, "1000", "3", signature, 999));
  signer.learn(3, "short");
  EXPECT_FALSE(signer.verify(path, "1000", "3", "", 999));
}

Result<ImageCall> parse_image_call(std::string_view body, bool edit = false) {
  return gateway::parse_image_call("application/json", body, edit);
}

TEST(GatewayImages, MapsOpenAisFields) {
  auto call =
      parse_image_call(R"({"prompt":"a red circle","model":"demo","n":2,"size":"256x128","response_format":"b64_json",
    "output_format":"webp","output_compression":80,"stream":true,"partial_images":2,"user":"u1","quality":"high",
    "background":"auto","style":"vivid","moderation":"low","seed":7,"num_inference_steps":4,"guidance_scale":2.5,
    "negative_prompt":"blue","true_cfg_scale":3,"max_sequence_length":64,"priority":5,"deadline_ms":60000})");
  ASSERT_TRUE(call.ok()) << call.error().message;
  EXPECT_TRUE(call->b64_json);
  EXPECT_TRUE(call->stream);
  EXPECT_EQ(call->quality, "high");
  const auto& spec = call->spec;
  EXPECT_EQ(spec.prompt, "a red circle");
  EXPECT_EQ(spec.model, "demo");
  EXPECT_EQ(spec.n, 2);
  EXPECT_EQ(spec.fields.integer("width"), 256);
  EXPECT_EQ(spec.fields.integer("height"), 128);
  EXPECT_EQ(spec.output_format, job::OutputFormat::kWebp);
  EXPECT_EQ(spec.output_compression, 80);
  EXPECT_EQ(spec.partial_images, 2);
  EXPECT_EQ(spec.user, "u1");
  EXPECT_EQ(spec.seed, 7);
  EXPECT_EQ(spec.fields.integer("num_inference_steps"), 4);
  EXPECT_EQ(spec.fields.real("guidance_scale"), 2.5);
  EXPECT_EQ(*spec.fields.text("negative_prompt"), "blue");
  EXPECT_EQ(spec.fields.real("true_cfg_scale"), 3);
  EXPECT_EQ(spec.fields.integer("max_sequence_length"), 64);
  EXPECT_EQ(spec.priority, 5);
  EXPECT_EQ(spec.deadline_ms, 60000);
}

TEST(GatewayImages, TakeEveryFieldOfAJob) {
  for (const job::Field field : job::kFields) {
    const job::FieldRow& row = field.row();
    json::object body{{"prompt", "x"}};
    switch (row.type) {
      case job::FieldType::kInteger:
      case job::FieldType::kReal: body[row.name] = row.low; break;
      case job::FieldType::kText: body[row.name] = "x"; break;
      case job::FieldType::kFormat: body[row.name] = "webp"; break;
      case job::FieldType::kSize: body[row.name] = "64x64"; break;
      case job::FieldType::kAdapters: body[row.name] = json::array(); break;
      case job::FieldType::kFlag: body[row.name] = false; break;
      case job::FieldType::kImage: body[row.name] = "x"; break;
      case job::FieldType::kImages: body[row.name] = json::array{"x", "y"}; break;
      case job::FieldType::kCache: body[row.name] = {{"mode", "off"}}; break;
      case job::FieldType::kWebhook: body[row.name] = "https://app.example/"; break;
    }
    EXPECT_EQ(parse_image_call(json::serialize(body)).ok(), is_image_field(field)) << row.name;
  }
}

TEST(GatewayImages, DefaultsAndNulls) {
  auto call =
      parse_image_call(R"({"prompt":"x","size":"auto","n":null,"response_format":null,"stream":null,"user":null})");
  ASSERT_TRUE(call.ok()) << call.error().message;
  EXPECT_FALSE(call->b64_json);
  EXPECT_FALSE(call->stream);
  EXPECT_FALSE(call->spec.fields.has("width"));
  EXPECT_FALSE(call->spec.n.has_value());
}

TEST(GatewayImages, ASafetyIdentifierReplacesTheUser) {
  auto call =
      parse_image_call(R"({"prompt":"x","user":"a","safety_identifier":"b","quality":"max","complexity":"low"})");
  ASSERT_TRUE(call.ok()) << call.error().message;
  EXPECT_EQ(call->spec.user, "b");
  EXPECT_EQ(parse_image_call(R"({"prompt":"x","user":"a","safety_identifier":""})")->spec.user, "a");
}

TEST(GatewayImages, NamesTheFieldThatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({})", "prompt"},
      {R"({"prompt":null})", "prompt"},
      {R"({"prompt":5})", "prompt"},
      {R"({"prompt":"x","size":"big"})", "size"},
      {R"({"prompt":"x","size":"0x16"})", "size"},
      {R"({"prompt":"x","size":"-16x16"})", "size"},
      {R"({"prompt":"x","size":"16x16x"})", "size"},
      {R"({"prompt":"x","size":256})", "size"},
      {R"({"prompt":"x","size":"99999999999x16"})", "size"},
      {R"({"prompt":"x","response_format":"png"})", "response_format"},
      {R"({"prompt":"x","stream":"yes"})", "stream"},
      {R"({"prompt":"x","background":"transparent"})", "background"},
      {R"({"prompt":"x","quality":"best"})", "quality"},
      {R"({"prompt":"x","complexity":"none"})", "complexity"},
      {R"({"prompt":"x","safety_identifier":5})", "safety_identifier"},
      {R"({"prompt":"x","frame_count":4})", "frame_count"},
      {R"({"prompt":"x","n":"2"})", "n"},
      {R"({"prompt":"x","n":0})", "n"},
      {R"({"prompt":"x","seed":-1})", "seed"},
      {R"({"prompt":"x","output_format":"gif"})", "output_format"},
      {R"({"prompt":"x","output_compression":101})", "output_compression"},
      {R"({"prompt":"x","partial_images":4})", "partial_images"},
      {R"({"prompt":"x","num_inference_step":4})", "num_inference_step"},
      {R"({"prompt":"x","image":5})", "image"},
      {R"({"prompt":"x","image":{"image_url":"a","file_id":"b"}})", "image"},
      {R"({"prompt":"x","image":["QQ==",{"url":"a"}]})", "image[1]"},
      {R"({"prompt":"x","images":"QQ=="})", "images"},
      {R"({"prompt":"x","images":[]})", "images"},
      {R"({"prompt":"x","images":["QQ==",null]})", "images[1]"},
      {R"({"prompt":"x","images":["a","b","c","d","e"]})", "images"},
      {R"({"prompt":"x","images":["a"],"image":"b"})", "images"},
      {R"({"prompt":"x","mask":["a"]})", "mask"},
      {R"({"prompt":"x","markup":"a"})", "markup"},
      {R"({"prompt":"x","input_fidelity":"best"})", "input_fidelity"},
  };
  for (const auto& [body, param] : cases) {
    auto call = parse_image_call(body);
    ASSERT_FALSE(call.ok()) << body;
    EXPECT_EQ(call.error().code, Code::kInvalidArgument) << body;
    EXPECT_EQ(call.error().param, param) << body << ": " << call.error().message;
  }
  for (const char* body : {"", "{", "[]", "\"x\"", "{\"prompt\":\"\xff\"}", "{\"prompt\":\"x\"} {}"}) {
    EXPECT_FALSE(parse_image_call(body).ok()) << body;
  }
}

// Each image of the request: field, index, what the client calls it, and a file's or text's contents.
std::vector<std::string> shown(const SentImages& images) {
  std::vector<std::string> out;
  for (const SentImage& image : images)
    out.push_back(std::string(image.field.name()) + std::to_string(image.index) + " " + image.param + " " +
                  (image.form == SentImage::Form::kStored ? "stored" : image.contents));
  return out;
}

TEST(GatewayImages, AnEditHasImagesInTheWaysOfOpenAi) {
  const std::string id(64, 'a'), none(kUnknownSha256);
  const auto one =
      parse_image_call(R"({"prompt":"x","image":{"image_url":"data:a"},"mask":{"file_id":")" + id + "\"}}", true);
  ASSERT_TRUE(one.ok()) << one.error().message;
  EXPECT_THAT(shown(one->images), ElementsAre("image0 image data:a", "mask0 mask stored"));
  EXPECT_EQ(*one->spec.fields.text("image"), none);
  EXPECT_EQ(*one->spec.fields.text("mask"), id);
  for (const char* name : {"image", "images"}) {
    const auto several = parse_image_call(R"({"prompt":"x","input_fidelity":"high",")" + std::string(name) +
                                              R"(":["QQ==",{"file_id":")" + id + R"("},"QQ=="]})",
                                          true);
    ASSERT_TRUE(several.ok()) << several.error().message;
    EXPECT_EQ(*several->spec.fields.text("image"), none + "," + id + "," + none);
    EXPECT_THAT(shown(several->images),
                ElementsAre("image0 images[0] QQ==", "image1 images[1] stored", "image2 images[2] QQ=="));
    EXPECT_EQ(as_image_error(Error{.param = "images[1]"}, *several).param, std::string(name) + "[1]");
    EXPECT_EQ(as_image_error(Error{.param = "image"}, *several).param, name);
  }
  EXPECT_EQ(as_image_error(Error{.param = "width"}, *one).param, "size");
  EXPECT_TRUE(parse_image_call(R"({"prompt":"x","image":"QQ==","mask":"QQ==","strength":0.5})").ok());
}

TEST(GatewayImages, AnEditMayBeAForm) {
  const auto part = [](const std::string& disposition, const std::string& contents) {
    return "--b\r\nContent-Disposition: form-data; " + disposition + "\r\n\r\n" + contents + "\r\n";
  };
  const auto file = [&](const std::string& name, const std::string& contents) {
    return part("name=\"" + name + "\"; filename=\"a.png\"", contents);
  };
  const auto parse = [](const std::string& parts) {
    return gateway::parse_image_call("multipart/form-data; boundary=b", parts + "--b--\r\n", true);
  };
  const std::string prompt = part("name=\"prompt\"", "x"), id(64, 'a'), none(kUnknownSha256);
  const auto whole = parse(prompt + file("image", "1") + file("mask", "2") + part("name=\"stream\"", "true") +
                           part("name=\"n\"", "2") + part("name=\"strength\"", "0.5") +
                           part("name=\"auto_resize\"", "false") + part("name=\"size\"", "auto"));
  ASSERT_TRUE(whole.ok()) << whole.error().message;
  EXPECT_THAT(shown(whole->images), testing::Contains("image0 image 1"));
  EXPECT_THAT(shown(whole->images), testing::Contains("mask0 mask 2"));
  EXPECT_TRUE(whole->stream);
  EXPECT_EQ(whole->spec.n, 2);
  EXPECT_EQ(whole->spec.fields.real("strength"), 0.5);
  EXPECT_EQ(whole->spec.fields.integer("auto_resize"), 0);
  EXPECT_EQ(completed_event(*whole), "image_edit.completed");
  EXPECT_EQ(partial_image_event(*whole), "image_edit.partial_image");
  for (const char* name : {"image[]", "image", "images"}) {
    const auto several =
        parse(prompt + file(name, "1") + part("name=\"" + std::string(name) + "\"", id) + file(name, "3"));
    ASSERT_TRUE(several.ok()) << several.error().message;
    EXPECT_EQ(*several->spec.fields.text("image"), none + "," + id + "," + none) << name;
    const std::string shortened = name == std::string("images") ? name : "image";
    EXPECT_EQ(shown(several->images)[0], "image0 " + shortened + "[0] 1");
    EXPECT_EQ(shown(several->images)[1], "image2 " + shortened + "[2] 3");
  }
  EXPECT_EQ(*parse(prompt + file("images[]", "1"))->spec.fields.text("image"), none);
  const std::vector<std::pair<std::string, std::string>> refused = {
      {prompt, "image"},
      {file("image", "1"), "prompt"},
      {prompt + file("image", "1") + file("images", "1"), "images"},
      {prompt + file("image", "1") + file("image", "1") + file("image", "1") + file("image", "1") + file("image", "1"),
       "image"},
      {prompt + file("image", "1") + file("mask", "2") + file("mask", "2"), "mask"},
      {prompt + file("image", "1") + file("markup", "2"), "markup"},
      {prompt + file("image", "1") + file("user", "2"), "user"},
      {prompt + file("image", "1") + part("name=\"stream\"", "yes"), "stream"},
      {prompt + file("image", "1") + part("name=\"svg[model]\"", "a"), "svg"},
  };
  for (const auto& [form, param] : refused) {
    const auto call = parse(form);
    ASSERT_FALSE(call.ok()) << form;
    EXPECT_EQ(call.error().param, param) << form << call.error().message;
  }
}

TEST(GatewayImages, ASizeFollowsTheImageIfTheModelTakesItFromThere) {
  job::ModelEntry model = job::image_model("m", 256);
  model.apply("image");
  const std::string edit = R"({"prompt":"x","image":"QQ=="})";
  const auto size_of = [&](const std::string& body) {
    auto call = parse_image_call(body).value();
    call.complete_for(model);
    return call.size;
  };
  EXPECT_EQ(size_of(edit), "256x256");
  model.free_width = model.free_height = 256;
  EXPECT_EQ(size_of(edit), "auto");
  EXPECT_EQ(size_of(R"({"prompt":"x"})"), "256x256");
  EXPECT_EQ(size_of(R"({"prompt":"x","image":"QQ==","size":"64x32"})"), "64x32");
}

TEST(GatewayImages, AnswersInTheFormThatWasAskedFor) {
  auto call = parse_image_call(R"({"prompt":"x","quality":"low"})").value();
  ImagePart part;
  part.url = "http://h/r";
  part.manifest.media_type = "image/png";
  part.manifest.width = 64;
  part.manifest.height = 32;
  part.manifest.seed = 9;
  const auto by_url = json::value(images_json(call, "j", 5, {part, part}));
  EXPECT_EQ(by_url.at("created").as_int64(), 5);
  EXPECT_EQ(by_url.at("data").as_array().size(), 2u);
  EXPECT_EQ(by_url.at("data").at(0).at("url").as_string(), "http://h/r");
  EXPECT_FALSE(by_url.at("data").at(0).as_object().contains("b64_json"));
  EXPECT_EQ(by_url.at("size").as_string(), "64x32");
  EXPECT_EQ(by_url.at("quality").as_string(), "low");
  call.b64_json = true;
  const auto by_bytes = json::value(images_json(call, "j", 5, {part}));
  EXPECT_EQ(by_bytes.at("data").at(0).at("b64_json").as_string(), "") << "the place of the picture";
  EXPECT_FALSE(by_bytes.at("data").at(0).as_object().contains("url"));
  const auto done = parse_json(completed_json(call, 5, part)).value();
  EXPECT_EQ(done.at("type").as_string(), "image_generation.completed");
  EXPECT_EQ(done.at("output_format").as_string(), "png");
  EXPECT_EQ(done.at("quality").as_string(), "low");
  const auto partial = parse_json(partial_image_json(call, 5, 1, 0, "\xff\xd8\xff")).value();
  EXPECT_EQ(partial.at("partial_image_index").as_int64(), 1);
  EXPECT_EQ(partial.at("output_format").as_string(), "jpeg");
  EXPECT_EQ(partial.at("size").as_string(), "auto");
}

TEST(GatewayJobJson, ProgressIsTheShareOfAllUnits) {
  queue::JobRecord record;
  record.units = 4;
  EXPECT_EQ(progress_of(record, nullptr, 0), 0);
  record.unit_records.resize(4);
  record.unit_records[0].state = job::State::kSucceeded;
  record.unit_records[1].step = 5;
  record.unit_records[1].total_steps = 9;
  EXPECT_DOUBLE_EQ(progress_of(record, nullptr, 0), 0.375) << "what follows the last step counts as one step";
  record.unit_records[1].step = 9;
  EXPECT_DOUBLE_EQ(progress_of(record, nullptr, 0), (1 + 0.9) / 4);
  record.state = job::State::kFailed;
  EXPECT_EQ(progress_of(record, nullptr, 0), 1);
}

// Steps of 10 ms, and 920 ms for what follows the eighth one.
TEST(GatewayJobJson, ProgressIsWeightedByHowLongPhasesTake) {
  const FleetHistory::Pace pace{.step_us = 10'000, .rest_us = 920'000};
  queue::JobRecord record;
  record.state = job::State::kRunning;
  record.unit_records.resize(1);
  auto& unit = record.unit_records[0];
  unit.state = job::State::kRunning;
  unit.started_ms = 1'000'000;
  unit.total_steps = 8;
  const auto at = [&](int step, std::int64_t ms) {
    unit.step = step;
    return progress_of(record, &pace, 1'000'000 + ms);
  };
  EXPECT_DOUBLE_EQ(at(4, 40), 0.04);
  EXPECT_DOUBLE_EQ(at(4, 45), 0.045) << "between two steps";
  EXPECT_DOUBLE_EQ(at(4, 700), 0.05) << "steps are slow: the next one is not counted before it is reported";
  EXPECT_DOUBLE_EQ(at(8, 80), 0.08);
  EXPECT_DOUBLE_EQ(at(8, 500), 0.5) << "while it is decoded";
  EXPECT_DOUBLE_EQ(at(8, 5'000), 0.99);
  EXPECT_DOUBLE_EQ(at(8, 20), 0.08) << "steps were fast, or the clocks differ";
  EXPECT_EQ(phase_of(unit), "decoding");
  unit.state = job::State::kCanceling;
  EXPECT_EQ(phase_of(unit), "decoding");
  unit.step = 7;
  EXPECT_EQ(phase_of(unit), "denoising");
  unit.state = job::State::kAssigned;
  EXPECT_EQ(phase_of(unit), "");
}

TEST(Json, NumbersAreTheShortestDecimals) {
  const auto again = [](std::string_view text) { return json_text(parse_json(text).value()); };
  EXPECT_EQ(again(R"({"scale":0.7,"n":[1.5,-0.25,1e300,0.1,3.0],"i":12})"),
            R"({"scale":0.7,"n":[1.5,-0.25,1e+300,0.1,3],"i":12})");
  EXPECT_EQ(again("0.7"), "0.7");
  EXPECT_EQ(again(R"({"E":"7E-1","a\"E1\\":"\"1E0","E2":2.5})"), R"({"E":"7E-1","a\"E1\\":"\"1E0","E2":2.5})");
  EXPECT_EQ(again("[0.0,1e-7,123456789.125]"), "[0,1e-07,123456789.125]");
}

}  // namespace
}  // namespace ditfleet::gateway
