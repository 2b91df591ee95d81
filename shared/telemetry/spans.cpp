#include "shared/telemetry/spans.h"

#include <atomic>

#include "shared/core/ids.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {
namespace {

std::atomic<SpanSink*> the_sink{nullptr};
thread_local SpanContext the_context;

std::string new_span_id() { return new_nonce().substr(0, 16); }

}  // namespace

std::string SpanContext::traceparent() const { return "00-" + trace_id + "-" + span_id + (sampled ? "-01" : "-00"); }

SpanContext SpanContext::parse(std::string_view t) {
  if (!is_valid_traceparent(t)) return {};
  const char low = t[54];
  const int digit = low <= '9' ? low - '0' : low - 'a' + 10;
  return {std::string(t.substr(3, 32)), std::string(t.substr(36, 16)), (digit & 1) != 0};
}

SpanContext SpanContext::fresh() { return {new_nonce(), new_span_id(), spans_wanted()}; }

void set_span_sink(SpanSink* sink) { the_sink.store(sink, std::memory_order_release); }
bool spans_wanted() { return the_sink.load(std::memory_order_relaxed) != nullptr; }

void record(Span span) noexcept {
  if (SpanSink* sink = the_sink.load(std::memory_order_acquire)) sink->take(std::move(span));
}

const SpanContext& current_span() { return the_context; }

ContextScope::ContextScope(SpanContext context) : before_(std::exchange(the_context, std::move(context))) {}
ContextScope::~ContextScope() { the_context = std::move(before_); }

SpanTimer::SpanTimer(std::string name, const SpanContext& parent, SpanKind kind) : context_(parent) {
  if (!parent.valid() || !parent.sampled || !spans_wanted()) return;
  context_.span_id = new_span_id();
  span_.emplace();
  span_->name = std::move(name);
  span_->trace_id = context_.trace_id;
  span_->span_id = context_.span_id;
  span_->parent_id = parent.span_id;
  span_->kind = kind;
  span_->start = std::chrono::system_clock::now();
}

SpanTimer SpanTimer::of(std::string name, const SpanContext& self, std::string parent_id, SpanKind kind) {
  SpanTimer timer(std::move(name), self, kind);
  timer.context_ = self;
  if (!timer.span_) return timer;
  timer.span_->span_id = self.span_id;
  timer.span_->parent_id = std::move(parent_id);
  return timer;
}

void SpanTimer::end_at(std::chrono::system_clock::time_point at) noexcept {
  if (!span_) return;
  span_->end = at;
  record(std::move(*span_));
  span_.reset();
}

}  // namespace ditfleet::telemetry
