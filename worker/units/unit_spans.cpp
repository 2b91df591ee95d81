#include "worker/units/unit_spans.h"

#include "shared/core/bytes.h"
#include "shared/job/catalogue.h"

namespace ditfleet::worker {
namespace {

// Every worker computes the same id, so a retry can link to the attempt before it.
std::string span_id_of(const queue::UnitRef& ref, int attempt) {
  return sha256_hex(ref.job + "/" + std::to_string(ref.unit) + "/" + std::to_string(attempt)).substr(0, 16);
}

// A job without a traceparent is a trace of its own.
telemetry::SpanContext job_context(const queue::MailboxEntry& entry) {
  auto job = telemetry::SpanContext::parse(entry.traceparent);
  if (!job.valid()) {
    job.trace_id = sha256_hex(entry.ref.job).substr(0, 32);
    job.sampled = telemetry::is_sampled(job.trace_id);
  }
  if (!job.sampled && telemetry::spans_wanted()) job.buffer = std::make_shared<telemetry::SpanBuffer>();
  return job;
}

std::chrono::system_clock::time_point at_ms(std::int64_t ms) {
  return std::chrono::system_clock::time_point(std::chrono::milliseconds(ms));
}

}  // namespace

void begin_span(Unit& unit) {
  const auto& entry = unit.entry;
  const auto job = job_context(entry);
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
    telemetry::SpanTimer route("route", job);
    describe(route);
    route.attribute("ditfleet.route.reason", entry.reason);
    route.began(at_ms(entry.assigned_ms));
  }
  auto self = job;
  self.span_id = span_id_of(entry.ref, entry.attempt);
  unit.span = telemetry::SpanTimer::of("unit", self, job.span_id, telemetry::SpanKind::kConsumer);
  if (entry.attempt > 1) unit.span.link(job.trace_id, span_id_of(entry.ref, entry.attempt - 1));
  describe(unit.span);
  unit.span.attribute("gen_ai.operation.name", std::string("generate_content"));
  unit.span.attribute("gen_ai.provider.name", std::string("ditfleet"));
  unit.span.attribute("gen_ai.output.type", std::string("image"));
  unit.span.attribute("gen_ai.request.model", unit.spec.model);
  unit.span.attribute("gen_ai.request.seed", unit.request.seed);
  if (unit.spec.n > 1) unit.span.attribute("gen_ai.request.choice.count", std::int64_t{*unit.spec.n});
  unit.span.attribute("ditfleet.class", entry.class_key);
  const job::FieldValues& fields = unit.request.fields;
  unit.span.attribute("ditfleet.width", fields.integer("width").value_or(0));
  unit.span.attribute("ditfleet.height", fields.integer("height").value_or(0));
  unit.span.attribute("ditfleet.steps", std::int64_t{job::steps_of(fields)});
}

void end_span(Unit& unit, const char* outcome) {
  unit.span.attribute("ditfleet.outcome", std::string(outcome));
  unit.span.end();
  const auto& buffer = unit.span.context().buffer;
  if (!buffer) return;
  const bool failed = outcome == std::string_view("failed") || outcome == std::string_view("stale");
  const auto took = std::chrono::system_clock::now() - at_ms(unit.entry.created_ms);
  if (failed || unit.entry.attempt > 1 || (unit.entry.created_ms > 0 && telemetry::is_slow(took))) buffer->send();
}

}  // namespace ditfleet::worker
