// Declares every metric. `ditfleet config metrics` prints the table as deploy/observability/METRICS.md.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ditfleet::telemetry {

enum class MetricType { kCounter, kGauge, kHistogram };

struct MetricRow {
  std::string_view name;
  MetricType type;
  std::vector<std::string_view> labels;
  std::string_view unit;             // empty: a number
  std::string_view help;             // one sentence without a full stop
  std::string_view panel;            // DASHBOARD/PANEL in deploy/observability/dashboards
  std::vector<double> buckets = {};  // upper bounds of a histogram
};

std::span<const MetricRow> metric_table();
// std::logic_error: there is no such metric.
const MetricRow& metric_row(std::string_view name);
std::string_view type_name(MetricType type);
std::string metrics_markdown();

}  // namespace ditfleet::telemetry
