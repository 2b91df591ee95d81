#include "tests/fault/job_history.h"

#include <map>
#include <set>
#include <utility>

#include "shared/job/state.h"

namespace ditfleet::testing {
namespace {

struct UnitHistory {
  std::string state = "none";  // none, ready, delayed, assigned, started or a final state
  std::string attempt, worker;
  int step = 0, starts = 0;
  bool ended = false;
};

std::pair<long long, long long> number(const std::string& id) {
  const auto dash = id.find('-');
  if (dash == std::string::npos) return {-1, -1};
  return {std::stoll(id.substr(0, dash)), std::stoll(id.substr(dash + 1))};
}

std::string field(const queue::Event& event, const char* name) {
  const auto at = event.fields.find(name);
  return at == event.fields.end() ? std::string() : at->second;
}

bool is_end(const std::string& type) {
  const auto state = job::state_from_name(type);
  return state && job::is_terminal(*state);
}

// Applies an event to its unit. Returns the fault, or an empty string.
std::string follow(UnitHistory& unit, const queue::Event& event, const HistoryRules& rules) {
  if (unit.ended) return "comes after its unit had ended as " + unit.state;
  const auto from = unit.state;
  if (event.type == "ready") {
    const bool delayed = event.fields.contains("not_before_ms");
    if (from == "ready" && !delayed) return "comes twice in a row";  // a unit that waits may be paused
    unit.state = delayed ? "delayed" : "ready";
  } else if (event.type == "assigned") {
    if (from != "ready") return "follows " + from + ", not ready";
    unit.state = event.type;
    unit.attempt = field(event, "attempt");
    unit.worker = field(event, "worker");
  } else if (event.type == "started") {
    if (from != "assigned") return "follows " + from + ", not assigned";
    if (field(event, "attempt") != unit.attempt)
      return "is attempt " + field(event, "attempt") + ", assigned was " + unit.attempt;
    if (field(event, "worker") != unit.worker)
      return "is on " + field(event, "worker") + ", assigned was " + unit.worker;
    unit.state = event.type;
    unit.step = 0;
    if (++unit.starts > rules.max_attempts) return "is start number " + std::to_string(unit.starts);
  } else if (event.type == "step") {
    if (from != "started") return "follows " + from + ", not started";
    const int step = std::stoi(field(event, "step"));
    if (step < unit.step) return "goes from step " + std::to_string(unit.step) + " to " + std::to_string(step);
    unit.step = step;
  } else if (event.type == "paused" || event.type == "resumed") {
  } else if (event.type == "preview") {
    if (from != "started") return "follows " + from + ", not started";
  } else if (is_end(event.type)) {
    if (event.type == "succeeded" && from != "started") return "follows " + from + ", not started";
    if (event.type == "failed" && from != "started" && from != "assigned") return "follows " + from + ", not started";
    unit.state = event.type;
    unit.ended = true;
  } else {
    return "is no event of a unit";
  }
  return {};
}

}  // namespace

std::string faults_in(const std::vector<queue::Event>& events, const HistoryRules& rules) {
  std::map<int, UnitHistory> units;
  bool queued = false;
  std::string ended, seen;
  std::pair<long long, long long> last{-1, -1};
  for (const auto& event : events) {
    const auto is = [&](const std::string& what) {
      return "event " + event.id + " " + event.type + " of unit " + std::to_string(event.unit) + " " + what +
             " (after:" + seen + ")";
    };
    const auto id = number(event.id);
    if (id <= last) return is("does not grow");
    last = id;
    if (!ended.empty()) return is("comes after the job had ended as " + ended);
    if (event.unit >= 0) {
      if (!queued) return is("comes before the job was queued");
      if (auto wrong = follow(units[event.unit], event, rules); !wrong.empty()) return is(wrong);
    } else if (event.type == "queued") {
      if (queued || !units.empty()) return is("is not the first");
      queued = true;
    } else if (is_end(event.type)) {
      std::set<std::string> ends;
      for (const auto& [index, unit] : units) {
        if (!unit.ended) return is("comes while unit " + std::to_string(index) + " is " + unit.state);
        ends.insert(unit.state);
      }
      if (!ends.empty() && !ends.contains(event.type)) return is("is how none of its units ended");
      if (event.type == "succeeded" && ends.size() != 1) return is("hides that not all of its units did");
      ended = event.type;
    } else if (event.type != "paused" && event.type != "resumed") {
      return is("is no event of a job");
    }
    if (event.type != "step") seen += " " + event.type;
  }
  if (!queued) return "it was never queued";
  if (ended.empty() && rules.must_have_ended) return "it has not ended (" + seen + " )";
  return {};
}

}  // namespace ditfleet::testing
