#include "shared/telemetry/metrics.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "shared/core/ids.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::telemetry {
namespace {

bool is_lower_hex(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace

prometheus::Registry& registry() {
  static prometheus::Registry instance;
  return instance;
}

namespace {

template <class Kind>
prometheus::Family<Kind>& family(const MetricRow& row) {
  const auto build = [&](auto builder, MetricType type) -> prometheus::Family<Kind>& {
    if (row.type != type) throw std::logic_error("metric " + std::string(row.name) + " has another type");
    return builder.Name(std::string(row.name)).Help(std::string(row.help)).Register(registry());
  };
  if constexpr (std::is_same_v<Kind, prometheus::Counter>)
    return build(prometheus::BuildCounter(), MetricType::kCounter);
  else if constexpr (std::is_same_v<Kind, prometheus::Gauge>)
    return build(prometheus::BuildGauge(), MetricType::kGauge);
  else
    return build(prometheus::BuildHistogram(), MetricType::kHistogram);
}

}  // namespace

template <class Kind>
Series<Kind>::Series(std::string_view name)
    : row_(metric_row(name)), family_(family<Kind>(row_)), seen_(row_.labels.size()) {
  if (row_.labels.empty()) (*this)();  // so that zero differs from "not exported"
}

template <class Kind>
Kind& Series<Kind>::operator()(std::initializer_list<std::string_view> values) const {
  if (values.size() != row_.labels.size())
    throw std::logic_error("metric " + std::string(row_.name) + " has another number of labels");
  const std::lock_guard lock(mutex_);
  std::vector<std::string> key;
  for (std::size_t i = 0; const std::string_view value : values) {
    auto& seen = seen_[i++];
    const bool known = seen.contains(value) || seen.size() < kMostLabelValues;
    key.emplace_back(known ? value : "other");
    if (known) seen.emplace(value);
  }
  Kind*& series = series_[key];
  if (!series) {
    prometheus::Labels labels;
    for (std::size_t i = 0; i < key.size(); ++i) labels.emplace(row_.labels[i], key[i]);
    if constexpr (std::is_same_v<Kind, prometheus::Histogram>)
      series = &family_.Add(labels, prometheus::Histogram::BucketBoundaries(row_.buckets));
    else
      series = &family_.Add(labels);
  }
  return *series;
}

template <class Kind>
double Series<Kind>::total() const {
  double sum = 0;
  for (const auto& family : family_.Collect())
    for (const auto& metric : family.metric) sum += metric.counter.value;
  return sum;
}

template class Series<prometheus::Counter>;
template class Series<prometheus::Gauge>;
template class Series<prometheus::Histogram>;

std::string render_metrics() { return prometheus::TextSerializer().Serialize(registry().Collect()); }

bool is_valid_traceparent(std::string_view t) {
  if (t.size() < 55 || t[2] != '-' || t[35] != '-' || t[52] != '-') return false;
  const auto version = t.substr(0, 2), trace = t.substr(3, 32), span = t.substr(36, 16), flags = t.substr(53, 2);
  if (!is_lower_hex(version) || !is_lower_hex(trace) || !is_lower_hex(span) || !is_lower_hex(flags)) return false;
  if (version == "ff" || (version == "00" && t.size() != 55) || (t.size() > 55 && t[55] != '-')) return false;
  return trace.find_first_not_of('0') != std::string_view::npos &&
         span.find_first_not_of('0') != std::string_view::npos;
}

std::string child_traceparent(std::string_view incoming) {
  const bool valid = is_valid_traceparent(incoming);
  const std::string trace = valid ? std::string(incoming.substr(3, 32)) : new_nonce();
  const std::string flags = valid ? std::string(incoming.substr(53, 2)) : is_sampled(trace) ? "01" : "00";
  return "00-" + trace + "-" + new_nonce().substr(0, 16) + "-" + flags;
}

}  // namespace ditfleet::telemetry
