// The process's Prometheus metrics, which metric_table.h declares, and W3C trace ids. Thread-safe.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <cstddef>
#include <initializer_list>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shared/telemetry/metric_table.h"

namespace ditfleet::telemetry {

// One per process.
prometheus::Registry& registry();

// All metrics, with the state of the process as it is now.
std::vector<prometheus::MetricFamily> collect_metrics();

inline constexpr std::size_t kMostLabelValues = 100;

// One series, for one expression. Do not keep it: it holds the metric's lock, so that no other thread removes the
// series.
template <class Kind>
class Handle {
 public:
  Handle(std::unique_lock<std::recursive_mutex> lock, Kind& series) : lock_(std::move(lock)), series_(series) {}
  void Increment(double by = 1) { series_.Increment(by); }
  void Set(double value) { series_.Set(value); }
  void Observe(double value) { series_.Observe(value); }
  double Value() const { return series_.Value(); }

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  Kind& series_;
};

// The series of one metric:
//   static const telemetry::Counters jobs("ditfleet_jobs_total");
//   jobs({"succeeded"}).Increment();
template <class Kind>
class Series {
 public:
  using Values = std::initializer_list<std::string_view>;
  // Registers the metric; exports its only series if it has no labels. std::logic_error: metric_table() does not have
  // it, or with another type.
  explicit Series(std::string_view name);
  // The series with these values of the metric's labels, in their order. A label has at most kMostLabelValues values:
  // a further one removes the series of the value that was used least recently. If that value is used again, its
  // series start at 0, as after a restart. std::logic_error: another number of values.
  Handle<Kind> operator()(Values values = {}) const;
  bool has(Values values) const;  // whether the series exists; does not count as a use
  double total() const;           // of all series since the start of the process; of counters only

 private:
  struct Store;  // of all objects with the same name
  static Store& store(std::string_view name);
  Store& store_;
};

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
