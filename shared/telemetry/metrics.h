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

// Registers a family. Its owner calls this once and keeps the reference:
//   static auto& total = telemetry::counters("ditfleet_things_total", "Things done");
prometheus::Family<prometheus::Counter>& counters(const std::string& name, const std::string& help);
prometheus::Family<prometheus::Gauge>& gauges(const std::string& name, const std::string& help);
prometheus::Family<prometheus::Histogram>& histograms(const std::string& name, const std::string& help);

// Text exposition format 0.0.4 of everything registered.
std::string render_metrics();

// A valid traceparent ("00-<32 hex>-<16 hex>-<2 hex>") with a new span id. It keeps the trace id of `incoming` if that
// is valid (W3C Trace Context §3.2), else it starts a new trace.
std::string child_traceparent(std::string_view incoming);
bool is_valid_traceparent(std::string_view text);

}  // namespace ditfleet::telemetry
