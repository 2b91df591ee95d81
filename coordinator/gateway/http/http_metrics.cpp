#include "coordinator/gateway/http/http_metrics.h"

#include <string>

#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

// Bounds the number of label values: clients may send any method.
std::string_view known_method(std::string_view method) {
  for (const std::string_view known : {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}) {
    if (method == known) return known;
  }
  return "other";
}

}  // namespace

void count_request(std::string_view route, std::string_view method, int status, double seconds) {
  static const telemetry::Counters requests("ditfleet_http_requests_total");
  static const telemetry::Histograms durations("ditfleet_http_request_duration_seconds");
  requests({route, known_method(method), std::to_string(status)}).Increment();
  durations({route}).Observe(seconds);
}

void count_event_streams(int change) {
  static const telemetry::Gauges streams("ditfleet_http_event_streams");
  streams().Increment(change);
}

void show_certificate_expiry(std::int64_t unix_s) {
  static const telemetry::Gauges expiry("ditfleet_certificate_expiry_timestamp_seconds");
  expiry().Set(static_cast<double>(unix_s));
}

void count_connections(int change) {
  static const telemetry::Gauges connections("ditfleet_http_connections");
  connections().Increment(change);
}

}  // namespace ditfleet::gateway
