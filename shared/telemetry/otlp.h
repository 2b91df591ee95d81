// Sends spans to an OpenTelemetry receiver in the background: OTLP over HTTP with JSON bodies.
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
  std::size_t queue_spans = 4096;             // further spans are dropped
  std::size_t batch_spans = 512;              // per request at most
  std::chrono::milliseconds delay{1000};      // the longest wait of a span for a full batch
  std::chrono::milliseconds timeout{10'000};  // of one request
  int attempts = 5;                           // per batch, with exponential backoff; then it is dropped
};

// The configured receiver: `endpoint` (telemetry.otlp_endpoint), else OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, which is used
// unchanged, else OTEL_EXPORTER_OTLP_ENDPOINT. A base URL gets /v1/traces. OTEL_EXPORTER_OTLP_[TRACES_]HEADERS and
// _TIMEOUT, OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES apply. The url is empty if no receiver is configured,
// OTEL_SDK_DISABLED is true or OTEL_TRACES_EXPORTER is none.
OtlpOptions otlp_options(const std::string& endpoint, const std::string& program, const std::string& version);

// The process's span sink while it lives. Sends batches from a thread of its own. take() never blocks: spans that
// exceed the queue, and spans that the receiver does not accept, are dropped and counted
// (ditfleet_spans_total{result="exported"|"queue_full"|"refused"|"unreachable"}).
class OtlpExporter final : public SpanSink {
 public:
  // kInvalidArgument: the URL is invalid.
  static Result<std::unique_ptr<OtlpExporter>> start(OtlpOptions options);
  // Sends the queued spans, for two seconds at most. No other thread may record spans any more.
  ~OtlpExporter() override;

  void take(Span span) noexcept override;
  // Returns once all earlier spans have been sent or dropped. For tests.
  void flush();

 private:
  class Impl;
  explicit OtlpExporter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Starts an exporter with otlp_options() and logs its URL; null if no receiver is configured.
Result<std::unique_ptr<OtlpExporter>> start_tracing(const std::string& endpoint, const std::string& program,
                                                    const std::string& version);

}  // namespace ditfleet::telemetry
