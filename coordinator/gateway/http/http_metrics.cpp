#include "coordinator/gateway/http/http_metrics.h"

#include <string>

#include "shared/telemetry/metrics.h"

namespace ditfleet::gateway {
namespace {

struct Families {
  prometheus::Family<prometheus::Counter>& requests =
      telemetry::counters("ditfleet_http_requests_total", "HTTP requests answered, by route, method and status code");
  prometheus::Family<prometheus::Histogram>& durations =
      telemetry::histograms("ditfleet_http_request_duration_seconds",
                            "Seconds from the end of a request to its response, or to the first byte of a stream");
  prometheus::Gauge& streams =
      telemetry::gauges("ditfleet_http_event_streams", "Open server-sent event streams").Add({});
  prometheus::Gauge& connections = telemetry::gauges("ditfleet_http_connections", "Open HTTP connections").Add({});
};

Families& families() {
  static Families instance;
  return instance;
}

// Generating an image takes seconds to minutes, any other request about a millisecond.
const prometheus::Histogram::BucketBoundaries kBoundaries = {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                                             0.5,    1,     2.5,    5,     10,   30,    60,   120, 300};

// Bounds the number of label values: clients may send any method.
std::string_view known_method(std::string_view method) {
  for (const std::string_view known : {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}) {
    if (method == known) return known;
  }
  return "other";
}

}  // namespace

void count_request(std::string_view route, std::string_view method, int status, double seconds) {
  families()
      .requests
      .Add({{"route", std::string(route)},
            {"method", std::string(known_method(method))},
            {"code", std::to_string(status)}})
      .Increment();
  families().durations.Add({{"route", std::string(route)}}, kBoundaries).Observe(seconds);
}

void count_event_streams(int change) { families().streams.Increment(change); }
void count_connections(int change) { families().connections.Increment(change); }

}  // namespace ditfleet::gateway
