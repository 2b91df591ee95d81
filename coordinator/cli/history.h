// The history of ended jobs as a trace of the simulator.
#pragma once

#include <string>

#include "coordinator/cli/command.h"
#include "coordinator/simulation/trace.h"

namespace ditfleet::cli {

struct HistoryTrace {
  simulation::Trace trace;
  std::string summary;  // how many jobs it has, and how many were omitted, by reason
};

// `from`: "-24h" or "24h" ago (units m, h, d), "2026-11-24T08:00:00Z" or "2026-11-24"; in milliseconds since 1970.
// kInvalidArgument: another text.
Result<std::int64_t> parse_from(const std::string& from, std::int64_t now_ms);
// Jobs of the history that were created at `from` or later, one line per unit, in the order of arrival. Omits jobs that
// did not succeed, have no run time or do not fit into a trace. kNotFound: no job is left; errors of
// HttpClient::json().
Result<HistoryTrace> read_history(const Target& target, const std::string& from);

}  // namespace ditfleet::cli
