#include "shared/telemetry/metrics.h"

#include <prometheus/family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <type_traits>

#include "shared/core/ids.h"
#include "shared/telemetry/process.h"
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
struct Series<Kind>::Store {
  explicit Store(const MetricRow& its_row)
      : row(its_row), family(telemetry::family<Kind>(row)), used(row.labels.size()) {}

  // Removes the series with the least recently used value of a label.
  void make_room(std::size_t label) {
    const auto oldest = std::min_element(used[label].begin(), used[label].end(),
                                         [](const auto& a, const auto& b) { return a.second < b.second; });
    std::erase_if(series, [&](const auto& entry) {
      if (entry.first[label] != oldest->first) return false;
      if constexpr (std::is_same_v<Kind, prometheus::Counter>) removed += entry.second->Value();
      family.Remove(entry.second);
      return true;
    });
    used[label].erase(oldest);
  }

  const MetricRow& row;
  prometheus::Family<Kind>& family;
  std::recursive_mutex mutex;
  std::uint64_t uses = 0;
  std::vector<std::map<std::string, std::uint64_t>> used;  // by label: each value with the number of its last use
  std::map<std::vector<std::string>, Kind*> series;
  double removed = 0;  // the sum of the removed counters
};

template <class Kind>
typename Series<Kind>::Store& Series<Kind>::store(std::string_view name) {
  static std::mutex mutex;
  static std::map<std::string_view, Store> stores;
  const MetricRow& row = metric_row(name);
  const std::lock_guard lock(mutex);
  return stores.try_emplace(row.name, row).first->second;
}

template <class Kind>
Series<Kind>::Series(std::string_view name) : store_(store(name)) {
  if (store_.row.labels.empty()) (*this)();  // so that zero differs from "not exported"
}

template <class Kind>
Handle<Kind> Series<Kind>::operator()(Values values) const {
  const MetricRow& row = store_.row;
  if (values.size() != row.labels.size())
    throw std::logic_error("metric " + std::string(row.name) + " has another number of labels");
  std::unique_lock lock(store_.mutex);
  const std::vector<std::string> key(values.begin(), values.end());
  ++store_.uses;
  for (std::size_t i = 0; i < key.size(); ++i) {
    auto& used = store_.used[i];
    if (used.size() == kMostLabelValues && !used.contains(key[i])) store_.make_room(i);
    used[key[i]] = store_.uses;
  }
  Kind*& series = store_.series[key];
  if (!series) {
    prometheus::Labels labels;
    for (std::size_t i = 0; i < key.size(); ++i) labels.emplace(row.labels[i], key[i]);
    if constexpr (std::is_same_v<Kind, prometheus::Histogram>)
      series = &store_.family.Add(labels, prometheus::Histogram::BucketBoundaries(row.buckets));
    else
      series = &store_.family.Add(labels);
  }
  return {std::move(lock), *series};
}

template <class Kind>
bool Series<Kind>::has(Values values) const {
  const std::lock_guard lock(store_.mutex);
  return store_.series.contains({values.begin(), values.end()});
}

template <class Kind>
double Series<Kind>::total() const {
  const std::lock_guard lock(store_.mutex);
  double sum = store_.removed;
  for (const auto& family : store_.family.Collect())
    for (const auto& metric : family.metric) sum += metric.counter.value;
  return sum;
}

template class Series<prometheus::Counter>;
template class Series<prometheus::Gauge>;
template class Series<prometheus::Histogram>;

std::vector<prometheus::MetricFamily> collect_metrics() {
  record_process();
  return registry().Collect();
}

std::string render_metrics() { return prometheus::TextSerializer().Serialize(collect_metrics()); }

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
