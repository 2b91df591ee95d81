// Exports spans to an OpenTelemetry receiver in the background, with OTLP over HTTP and JSON bodies.
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
  std::string url;  // for traces: http://127.0.0.1:4318/v1/traces
  std::vector<std::pair<std::string, std::string>> headers;
  Attributes resource;  // service.name and the like
  std::string scope_version;
  std::size_t queue_spans = 4096;             // maximum of queued spans; further spans are dropped
  std::size_t batch_spans = 512;              // maximum per request
  std::chrono::milliseconds delay{1000};      // how long a span waits for a full batch
  std::chrono::milliseconds timeout{10'000};  // of one request
  int attempts = 5;                           // per batch, with exponential backoff; then the batch is dropped
};

// Returns the options for the configured receiver. Its URL is `endpoint` (telemetry.otlp_endpoint), else
// OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else OTEL_EXPORTER_OTLP_ENDPOINT. All but OTEL_EXPORTER_OTLP_TRACES_ENDPOINT are
// base URLs, to which /v1/traces is added. OTEL_EXPORTER_OTLP_[TRACES_]HEADERS and _TIMEOUT, OTEL_SERVICE_NAME and
// OTEL_RESOURCE_ATTRIBUTES also apply. The URL is empty if no receiver is configured, OTEL_SDK_DISABLED is true or
// OTEL_TRACES_EXPORTER is none.
OtlpOptions otlp_options(const std::string& endpoint, const std::string& program, const std::string& version);

// While it exists, the exporter is the process's span sink. A separate thread sends batches. take() never blocks and is
// thread-safe. Spans that exceed the queue or that the receiver rejects are dropped and counted in
// ditfleet_spans_total{result="exported"|"queue_full"|"refused"|"unreachable"}.
class OtlpExporter final : public SpanSink {
 public:
  // kInvalidArgument: the URL is invalid.
  static Result<std::unique_ptr<OtlpExporter>> start(OtlpOptions options);
  // Sends the queued spans, for at most two seconds. Other threads must have stopped recording spans.
  ~OtlpExporter() override;

  void take(Span span) noexcept override;
  // Blocks until all earlier spans have been sent or dropped. For tests.
  void flush();

 private:
  class Impl;
  explicit OtlpExporter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Returns `configured` (telemetry.sample_rate) if it is less than 1, else the rate of OTEL_TRACES_SAMPLER and
// OTEL_TRACES_SAMPLER_ARG. Every sampler counts as parent-based.
double sample_rate(double configured);

// telemetry.* of the configuration.
struct Tracing {
  std::string endpoint;
  double sample_rate = 1, slow_s = 0;
};

// Sets the process's sampling, starts an exporter with otlp_options() and logs its URL. Returns null if no receiver is
// configured.
Result<std::unique_ptr<OtlpExporter>> start_tracing(const Tracing& tracing, const std::string& program,
                                                    const std::string& version);

}  // namespace ditfleet::telemetry
