// The process's Prometheus registry and W3C trace ids. Thread-safe.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>
#include <string_view>

namespace ditfleet::telemetry {

// One per process. The module that owns a family registers it once.
prometheus::Registry& registry();

// Register a family. Call them once per family and keep the reference:
//   static auto& total = telemetry::counters("ditfleet_things_total", "Things done");
prometheus::Family<prometheus::Counter>& counters(const std::string& name, const std::string& help);
prometheus::Family<prometheus::Gauge>& gauges(const std::string& name, const std::string& help);
prometheus::Family<prometheus::Histogram>& histograms(const std::string& name, const std::string& help);

// Returns all metrics in text exposition format 0.0.4.
std::string render_metrics();

// Returns a traceparent ("00-<32 hex>-<16 hex>-<2 hex>") with a new span id. Keeps the trace id of `incoming` if
// `incoming` is valid (W3C Trace Context §3.2); otherwise starts a new trace.
std::string child_traceparent(std::string_view incoming);
bool is_valid_traceparent(std::string_view text);

}  // namespace ditfleet::telemetry
