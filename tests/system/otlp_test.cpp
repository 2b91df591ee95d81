// Spans and their way to an OTLP receiver.
#include "shared/telemetry/otlp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "shared/telemetry/metrics.h"
#include "tests/system/otlp_receiver.h"

namespace ditfleet::telemetry {
namespace {

using namespace std::chrono_literals;
using ditfleet::testing::attribute;
using ditfleet::testing::OtlpReceiver;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

const std::string kTrace = "4bf92f3577b34da6a3ce929d0e0e4736", kSpan = "00f067aa0ba902b7";
const std::string kParent = "00-" + kTrace + "-" + kSpan + "-01";

double counted(const std::string& result) {
  const std::string metrics = render_metrics(), name = "ditfleet_spans_total{result=\"" + result + "\"} ";
  const auto at = metrics.find(name);
  return at == std::string::npos ? 0 : std::stod(metrics.substr(at + name.size()));
}

class Variables {
 public:
  Variables(std::initializer_list<std::pair<const char*, const char*>> values) : values_(values) {
    for (const auto& [name, value] : values_) ::setenv(name, value, 1);
  }
  Variables(const Variables&) = delete;
  ~Variables() {
    for (const auto& [name, value] : values_) ::unsetenv(name);
  }

 private:
  const std::vector<std::pair<const char*, const char*>> values_;
};

std::unique_ptr<OtlpExporter> exporter_to(const OtlpReceiver& receiver, OtlpOptions options = {}) {
  const auto configured = otlp_options(receiver.url(), "test-program", "1.2");
  options.url = configured.url;
  options.resource = configured.resource;
  options.scope_version = configured.scope_version;
  options.headers = configured.headers;
  auto exporter = OtlpExporter::start(std::move(options));
  EXPECT_TRUE(exporter.ok());
  return std::move(exporter).value();
}

TEST(Otlp, SpansArriveWithTheirParentsTimesAndAttributes) {
  OtlpReceiver receiver;
  const Variables headers({{"OTEL_EXPORTER_OTLP_HEADERS", "x-token=a%20b,x-more=1"},
                           {"OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test"}});
  const auto exporter = exporter_to(receiver);
  const auto before =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  {
    SpanTimer outer("outer", SpanContext::parse(kParent), SpanKind::kConsumer);
    const ContextScope scope(outer.context());
    ScopedSpan inner("inner");
    inner.attribute("text", std::string("ä \"x\""));
    inner.attribute("number", std::int64_t{1} << 60);
    inner.attribute("half", 0.5);
    inner.attribute("yes", true);
    inner.failed("it broke");
    { const ScopedSpan innermost("innermost"); }
    EXPECT_EQ(current_span().span_id, inner.context().span_id);
  }
  EXPECT_FALSE(current_span().valid()) << "a scope gives back what was before it";
  exporter->flush();
  const auto spans = receiver.spans();
  ASSERT_EQ(spans.size(), 3u);
  const auto &innermost = spans[0], &inner = spans[1], &outer = spans[2];
  EXPECT_EQ(innermost.at("name"), "innermost");
  EXPECT_EQ(innermost.at("parentSpanId"), inner.at("spanId"));
  EXPECT_EQ(inner.at("parentSpanId"), outer.at("spanId"));
  EXPECT_EQ(outer.at("parentSpanId"), json::value(kSpan));
  for (const auto& span : spans) {
    EXPECT_EQ(span.at("traceId"), json::value(kTrace));
    EXPECT_EQ(span.at("spanId").as_string().size(), 16u);
    const auto start = std::stoll(span.at("startTimeUnixNano").as_string().c_str()),
               end = std::stoll(span.at("endTimeUnixNano").as_string().c_str());
    EXPECT_GE(start, before);
    EXPECT_GE(end, start);
  }
  EXPECT_EQ(outer.at("kind"), 5);
  EXPECT_EQ(inner.at("kind"), 1);
  EXPECT_EQ(attribute(inner, "text"), "ä \"x\"");
  EXPECT_EQ(attribute(inner, "number"), "1152921504606846976");
  EXPECT_EQ(attribute(inner, "half"), json::serialize(json::value(0.5)));
  EXPECT_EQ(attribute(inner, "yes"), "true");
  EXPECT_EQ(inner.at("status").at("code"), 2);
  EXPECT_EQ(inner.at("status").at("message"), "it broke");
  EXPECT_FALSE(outer.contains("status"));
  const auto request = receiver.requests().at(0);
  EXPECT_THAT(request.head, ::testing::StartsWith("POST /v1/traces HTTP/1.1"));
  EXPECT_THAT(request.head, HasSubstr("Content-Type: application/json"));
  EXPECT_THAT(request.head, HasSubstr("x-token: a b"));
  EXPECT_THAT(request.head, HasSubstr("x-more: 1"));
  const auto& resource = request.body.at("resourceSpans").at(0).at("resource").as_object();
  EXPECT_EQ(attribute(resource, "service.name"), "test-program");
  EXPECT_EQ(attribute(resource, "service.version"), "1.2");
  EXPECT_EQ(attribute(resource, "deployment.environment.name"), "test");
  EXPECT_NE(attribute(resource, "service.instance.id"), "");
}

TEST(Otlp, WhatIsNotSampledOrBelongsToNoTraceIsNotRecorded) {
  OtlpReceiver receiver;
  const auto exporter = exporter_to(receiver);
  { SpanTimer span("unsampled", SpanContext::parse("00-" + kTrace + "-" + kSpan + "-00")); }
  { SpanTimer span("invalid", SpanContext::parse("00-x")); }
  { ScopedSpan span("alone"); }
  { SpanTimer span("flags of a later version", SpanContext::parse("00-" + kTrace + "-" + kSpan + "-03")); }
  exporter->flush();
  ASSERT_EQ(receiver.spans().size(), 1u);
  EXPECT_EQ(receiver.spans()[0].at("name"), "flags of a later version");
}

TEST(Otlp, WithoutAnExporterNothingIsRecorded) {
  EXPECT_FALSE(spans_wanted());
  const SpanTimer span("x", SpanContext::parse(kParent));
  EXPECT_EQ(span.context().span_id, kSpan) << "children go below the parent";
  EXPECT_FALSE(SpanContext::fresh().sampled);
}

TEST(Otlp, WithARateTheTraceIdDecides) {
  const std::string low = "ffffffffffffffff0000000000000001", middle = "00000000000000000080000000000000",
                    high = "0000000000000000ffffffffffffffff";
  set_sample_rate(0.5);
  EXPECT_TRUE(is_sampled(low));
  EXPECT_FALSE(is_sampled(middle));
  EXPECT_FALSE(is_sampled(high));
  EXPECT_TRUE(SpanContext::parse(child_traceparent(kParent)).sampled) << "a caller's flag is kept";
  int sampled = 0;
  for (int i = 0; i < 1000; ++i) sampled += SpanContext::parse(child_traceparent("")).sampled;
  EXPECT_NEAR(sampled, 500, 100);  // more than six standard deviations
  set_sample_rate(0);
  EXPECT_FALSE(is_sampled(low));
  set_sample_rate(1);
  EXPECT_TRUE(is_sampled(high));
}

TEST(Otlp, TheRateIsTheOptionElseTheVariables) {
  EXPECT_EQ(sample_rate(1), 1);
  const Variables ratio({{"OTEL_TRACES_SAMPLER", "parentbased_traceidratio"}, {"OTEL_TRACES_SAMPLER_ARG", "0.25"}});
  EXPECT_EQ(sample_rate(1), 0.25);
  EXPECT_EQ(sample_rate(0.5), 0.5) << "the option comes first";
  ::setenv("OTEL_TRACES_SAMPLER_ARG", "nan", 1);
  EXPECT_EQ(sample_rate(1), 1);
  ::setenv("OTEL_TRACES_SAMPLER", "always_off", 1);
  EXPECT_EQ(sample_rate(1), 0);
}

TEST(Otlp, ABufferHoldsTheSpansOfATraceThatIsNotSampled) {
  OtlpReceiver receiver;
  const auto exporter = exporter_to(receiver);
  auto parent = SpanContext::parse("00-" + kTrace + "-" + kSpan + "-00");
  parent.buffer = std::make_shared<SpanBuffer>();
  SpanTimer unit("unit", parent);
  unit.link(kTrace, kSpan);
  for (int i = 0; i < 300; ++i) SpanTimer("child", unit.context()).end();
  unit.end();
  exporter->flush();
  EXPECT_EQ(receiver.spans().size(), 0u);
  parent.buffer->send();
  SpanTimer("late", unit.context()).end();
  exporter->flush();
  ASSERT_EQ(receiver.spans().size(), 257u) << "256 were held";
  EXPECT_EQ(receiver.spans()[255].at("name"), "unit") << "the last is always held";
  EXPECT_EQ(receiver.spans()[255].at("links").at(0).at("spanId"), json::value(kSpan));
}

TEST(Otlp, ABatchIsOneRequest) {
  OtlpReceiver receiver;
  const auto exporter = exporter_to(receiver, {.batch_spans = 100, .delay = 10s});
  for (int i = 0; i < 250; ++i) SpanTimer("s" + std::to_string(i), SpanContext::parse(kParent)).end();
  exporter->flush();
  EXPECT_EQ(receiver.spans().size(), 250u);
  EXPECT_EQ(receiver.requests().size(), 3u);
}

TEST(Otlp, AReceiverThatIsBusyIsAskedAgain) {
  OtlpReceiver receiver;
  receiver.answer_with({503, 429, 200});
  const double exported = counted("exported");
  const auto exporter = exporter_to(receiver);
  SpanTimer("s", SpanContext::parse(kParent)).end();
  exporter->flush();
  EXPECT_EQ(receiver.spans().size(), 1u);
  EXPECT_EQ(receiver.requests().size(), 3u);
  EXPECT_EQ(counted("exported") - exported, 1);
}

TEST(Otlp, WhatIsRefusedIsDroppedAndCounted) {
  OtlpReceiver receiver;
  receiver.answer_with({400});
  const double refused = counted("refused"), exported = counted("exported");
  const auto exporter = exporter_to(receiver);
  SpanTimer("s", SpanContext::parse(kParent)).end();
  exporter->flush();
  EXPECT_EQ(receiver.requests().size(), 1u) << "it would be refused again";
  EXPECT_EQ(counted("refused") - refused, 1);
  receiver.answer_with({200}, R"({"partialSuccess":{"rejectedSpans":"2","errorMessage":"no"}})");
  for (int i = 0; i < 3; ++i) SpanTimer("s", SpanContext::parse(kParent)).end();
  exporter->flush();
  EXPECT_EQ(counted("refused") - refused, 3);
  EXPECT_EQ(counted("exported") - exported, 1);
}

// A receiver that hangs: whoever records spans does not notice, the queue is bounded, and the end takes two seconds.
TEST(Otlp, AReceiverThatHangsDelaysNobody) {
  OtlpReceiver receiver;
  receiver.hold(true);
  const double full = counted("queue_full"), unreachable = counted("unreachable");
  {
    const auto exporter = exporter_to(receiver, {.queue_spans = 50, .batch_spans = 10, .delay = 1ms});
    auto slowest = Clock::duration::zero();
    for (int i = 0; i < 20'000; ++i) {
      const auto begun = Clock::now();
      SpanTimer("s", SpanContext::parse(kParent)).end();
      slowest = std::max(slowest, Clock::now() - begun);
    }
    EXPECT_LT(slowest, 500ms);
    const auto begun = Clock::now();
    // Its destructor.
    const_cast<std::unique_ptr<OtlpExporter>&>(exporter).reset();
    EXPECT_LT(Clock::now() - begun, 4s);
  }
  receiver.hold(false);
  EXPECT_GT(counted("queue_full") + counted("unreachable") - full - unreachable, 19'900);
}

TEST(Otlp, NobodyThereIsCountedAndTheQueueGoesOn) {
  std::string url;
  { url = OtlpReceiver().url(); }
  const double unreachable = counted("unreachable");
  auto exporter = OtlpExporter::start({.url = url + "/v1/traces", .delay = 1ms, .attempts = 2});
  ASSERT_TRUE(exporter.ok());
  SpanTimer("s", SpanContext::parse(kParent)).end();
  (*exporter)->flush();
  EXPECT_EQ(counted("unreachable") - unreachable, 1);
}

TEST(Otlp, TheReceiverIsTheOptionElseTheVariables) {
  EXPECT_EQ(otlp_options("", "p", "1").url, "");
  EXPECT_EQ(otlp_options("http://h:1", "p", "1").url, "http://h:1/v1/traces");
  EXPECT_EQ(otlp_options("http://h:1/v1/traces", "p", "1").url, "http://h:1/v1/traces");
  {
    const Variables general({{"OTEL_EXPORTER_OTLP_ENDPOINT", "http://g:2/base/"},
                             {"OTEL_EXPORTER_OTLP_TIMEOUT", "1500"},
                             {"OTEL_SERVICE_NAME", "mine"}});
    const auto options = otlp_options("", "p", "1");
    EXPECT_EQ(options.url, "http://g:2/base/v1/traces");
    EXPECT_EQ(options.timeout, 1500ms);
    EXPECT_EQ(std::get<std::string>(options.resource[0].second), "mine");
    EXPECT_EQ(otlp_options("http://h:1", "p", "1").url, "http://h:1/v1/traces") << "the option comes first";
    {
      const Variables own({{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t:3/own"}});
      EXPECT_EQ(otlp_options("", "p", "1").url, "http://t:3/own") << "used as it is";
    }
    const Variables off({{"OTEL_SDK_DISABLED", "true"}});
    EXPECT_EQ(otlp_options("http://h:1", "p", "1").url, "");
  }
  EXPECT_THAT(OtlpExporter::start({.url = "h:1"}).error().message, HasSubstr("must be a URL such as"));
}

}  // namespace
}  // namespace ditfleet::telemetry
