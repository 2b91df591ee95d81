#include "worker/units/unit_spans.h"

namespace ditfleet::worker {
namespace {

std::chrono::system_clock::time_point at_ms(std::int64_t ms) {
  return std::chrono::system_clock::time_point(std::chrono::milliseconds(ms));
}

}  // namespace

void begin_span(Unit& unit) {
  const auto& entry = unit.entry;
  const auto job = telemetry::SpanContext::parse(entry.traceparent);
  const auto describe = [&](telemetry::SpanTimer& span) {
    span.attribute("ditfleet.job.id", entry.ref.job);
    span.attribute("ditfleet.unit", std::int64_t{entry.ref.unit});
    span.attribute("ditfleet.attempt", std::int64_t{entry.attempt});
  };
  if (entry.created_ms > 0 && entry.assigned_ms >= entry.created_ms) {
    telemetry::SpanTimer queued("queue_wait", job);
    describe(queued);
    queued.began(at_ms(entry.created_ms));
    queued.end_at(at_ms(entry.assigned_ms));
  }
  unit.span = telemetry::SpanTimer("unit", job, telemetry::SpanKind::kConsumer);
  describe(unit.span);
  unit.span.attribute("gen_ai.request.model", unit.spec.model);
  unit.span.attribute("ditfleet.class", entry.class_key);
  const job::FieldValues& fields = unit.request.fields;
  unit.span.attribute("ditfleet.width", fields.integer("width").value_or(0));
  unit.span.attribute("ditfleet.height", fields.integer("height").value_or(0));
  unit.span.attribute("ditfleet.steps", fields.integer("num_inference_steps").value_or(0));
}

void end_span(Unit& unit, const char* outcome) {
  unit.span.attribute("ditfleet.outcome", std::string(outcome));
  unit.span.end();
}

}  // namespace ditfleet::worker
