// The process's Prometheus registry and W3C trace ids. Thread safe.
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

// One for the process; families are made once by the modules that own them.
prometheus::Registry& registry();

// A family of that registry. Whoever owns it asks once and keeps it:
//   static auto& total = telemetry::counters("ditfleet_things_total", "Things done");
prometheus::Family<prometheus::Counter>& counters(const std::string& name, const std::string& help);
prometheus::Family<prometheus::Gauge>& gauges(const std::string& name, const std::string& help);
prometheus::Family<prometheus::Histogram>& histograms(const std::string& name, const std::string& help);

// Text exposition format 0.0.4 of everything registered.
std::string render_metrics();

// A valid traceparent ("00-<32 hex>-<16 hex>-<2 hex>") with a fresh span id that keeps the trace id of
// `incoming` where that is valid (W3C Trace Context §3.2), else a new trace.
std::string child_traceparent(std::string_view incoming);
bool is_valid_traceparent(std::string_view text);

}  // namespace ditfleet::telemetry
