// The process's Prometheus metrics, which metric_table.h declares, and W3C trace ids. Thread-safe.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <initializer_list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "shared/telemetry/metric_table.h"

namespace ditfleet::telemetry {

// One per process.
prometheus::Registry& registry();

// The series of one metric:
//   static const telemetry::Counters jobs("ditfleet_jobs_total");
//   jobs({"succeeded"}).Increment();
template <class Kind>
class Series {
 public:
  // Registers the metric; exports its only series if it has no labels. std::logic_error: metric_table() does not have
  // it, or with another type.
  explicit Series(std::string_view name);
  // The series with these values of the metric's labels, in their order. A label has at most kMostLabelValues values;
  // further ones become "other". The reference stays valid. std::logic_error: another number of values.
  Kind& operator()(std::initializer_list<std::string_view> values = {}) const;
  double total() const;  // of all series of the process; of counters only

 private:
  const MetricRow& row_;
  prometheus::Family<Kind>& family_;
  mutable std::mutex mutex_;
  mutable std::vector<std::set<std::string, std::less<>>> seen_;  // by label
  mutable std::map<std::vector<std::string>, Kind*> series_;
};

inline constexpr std::size_t kMostLabelValues = 100;

using Counters = Series<prometheus::Counter>;
using Gauges = Series<prometheus::Gauge>;
using Histograms = Series<prometheus::Histogram>;

// Returns all metrics in text exposition format 0.0.4.
std::string render_metrics();

// Returns a traceparent ("00-<32 hex>-<16 hex>-<2 hex>") with a new span id. Keeps the trace id of `incoming` if
// `incoming` is valid (W3C Trace Context §3.2); otherwise starts a new trace.
std::string child_traceparent(std::string_view incoming);
bool is_valid_traceparent(std::string_view text);

}  // namespace ditfleet::telemetry
