#include "shared/telemetry/metrics.h"

#include <prometheus/text_serializer.h>

#include "shared/core/ids.h"

namespace ditfleet::telemetry {
namespace {

bool is_lower_hex(std::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

}  // namespace

prometheus::Registry& registry() {
  static prometheus::Registry instance;
  return instance;
}

prometheus::Family<prometheus::Counter>& counters(const std::string& name, const std::string& help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry());
}
prometheus::Family<prometheus::Gauge>& gauges(const std::string& name, const std::string& help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry());
}
prometheus::Family<prometheus::Histogram>& histograms(const std::string& name, const std::string& help) {
  return prometheus::BuildHistogram().Name(name).Help(help).Register(registry());
}

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
  const std::string flags = valid ? std::string(incoming.substr(53, 2)) : "01";
  return "00-" + trace + "-" + new_nonce().substr(0, 16) + "-" + flags;
}

}  // namespace ditfleet::telemetry
