#include "shared/telemetry/turns.h"

#include <spdlog/spdlog.h>

#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {
namespace {

constexpr std::chrono::milliseconds kLong{50};

thread_local int depth = 0;
thread_local bool told = false;  // the turn is logged once, with its innermost long handler

}  // namespace

Turn::Turn(std::string_view kind, std::string_view name)
    : kind_(kind), name_(name), began_(std::chrono::steady_clock::now()) {
  ++depth;
}

Turn::~Turn() {
  static const Histograms stalls("ditfleet_event_loop_stall_seconds");
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
  if (took >= kLong && !std::exchange(told, true)) {
    spdlog::warn("{}{}{} kept the event loop for {:.0f} ms; everything else waited meanwhile", kind_,
                 name_.empty() ? "" : " ", name_, took.count() * 1e3);
  }
  if (--depth > 0) return;
  told = false;
  stalls().Observe(took.count());
}

}  // namespace ditfleet::telemetry
