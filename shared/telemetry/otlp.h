// Spans to an OpenTelemetry receiver: OTLP over HTTP with JSON bodies, in the background.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shared/core/result.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::telemetry {

struct OtlpOptions {
  std::string url;  // of the traces signal: http://127.0.0.1:4318/v1/traces
  std::vector<std::pair<std::string, std::string>> headers;
  Attributes resource;  // service.name and the like
  std::string scope_version;
  std::size_t queue_spans = 4096;             // waiting; more are dropped
  std::size_t batch_spans = 512;              // of one request at most
  std::chrono::milliseconds delay{1000};      // a span waits no longer for others
  std::chrono::milliseconds timeout{10'000};  // of one request
  int attempts = 5;                           // of one batch, with growing pauses; then it is dropped
};

// The receiver that is configured: `endpoint` (telemetry.otlp_endpoint), else OTEL_EXPORTER_OTLP_TRACES_ENDPOINT (used
// as it is), else OTEL_EXPORTER_OTLP_ENDPOINT; a base URL gets /v1/traces. OTEL_EXPORTER_OTLP_[TRACES_]HEADERS and
// _TIMEOUT, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES are heeded. An empty url: none is configured,
// OTEL_SDK_DISABLED is true or OTEL_TRACES_EXPORTER is none.
OtlpOptions otlp_options(const std::string& endpoint, const std::string& program, const std::string& version);

// Takes spans, is the process's sink while it lives, and sends batches from a thread of its own. Nobody waits for it:
// what the queue cannot hold and what the receiver does not take is dropped and counted
// (ditfleet_spans_total{result="exported"|"queue_full"|"refused"|"unreachable"}).
class OtlpExporter final : public SpanSink {
 public:
  // kInvalidArgument: the URL is none.
  static Result<std::unique_ptr<OtlpExporter>> start(OtlpOptions options);
  // Sends what waits, for two seconds at most. No other thread may record any more.
  ~OtlpExporter() override;

  void take(Span span) noexcept override;
  // Waits until all that was taken before has been sent or dropped. For tests.
  void flush();

 private:
  class Impl;
  explicit OtlpExporter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// otlp_options and, where a receiver is configured, an exporter, which is logged; null otherwise.
Result<std::unique_ptr<OtlpExporter>> start_tracing(const std::string& endpoint, const std::string& program,
                                                    const std::string& version);

}  // namespace ditfleet::telemetry
