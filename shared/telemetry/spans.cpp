#include "shared/telemetry/spans.h"

#include <atomic>
#include <charconv>

#include "shared/core/ids.h"
#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {
namespace {

constexpr std::size_t kMostHeld = 256;

std::atomic<SpanSink*> the_sink{nullptr};
std::atomic<double> the_rate{1}, the_slow_limit_s{0};
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

void SpanBuffer::take(Span span) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    if (sent_) return record(std::move(span));
    if (held_.size() < kMostHeld)
      held_.push_back(std::move(span));
    else
      held_.back() = std::move(span);
  } catch (...) {  // out of memory: the span is dropped
  }
}

void SpanBuffer::send() noexcept {
  const std::lock_guard lock(mutex_);
  sent_ = true;
  for (Span& span : held_) record(std::move(span));
  held_.clear();
}

void set_sample_rate(double rate) { the_rate = rate; }

bool is_sampled(std::string_view trace_id) {
  const double rate = the_rate.load(std::memory_order_relaxed);
  if (rate >= 1) return true;
  // W3C's second level of trace context: the last 56 bits are random.
  constexpr std::size_t kDigits = 14;
  std::uint64_t random = 0;
  const std::string_view last = trace_id.substr(trace_id.size() - std::min(kDigits, trace_id.size()));
  std::from_chars(last.data(), last.data() + last.size(), random, 16);
  return static_cast<double>(random) < rate * static_cast<double>(std::uint64_t{1} << (4 * kDigits));
}

void set_slow_limit(std::chrono::duration<double> limit) { the_slow_limit_s = limit.count(); }

bool is_slow(std::chrono::duration<double> took) {
  const double limit_s = the_slow_limit_s.load(std::memory_order_relaxed);
  return limit_s > 0 && took.count() >= limit_s;
}

const SpanContext& current_span() { return the_context; }

ContextScope::ContextScope(SpanContext context) : before_(std::exchange(the_context, std::move(context))) {}
ContextScope::~ContextScope() { the_context = std::move(before_); }

SpanTimer::SpanTimer(std::string name, const SpanContext& parent, SpanKind kind) : context_(parent) {
  begin(std::move(name), parent.span_id, kind, {});
}

void SpanTimer::begin(std::string name, std::string parent_id, SpanKind kind, std::string id) {
  if (!context_.valid() || !(context_.sampled || context_.buffer) || !spans_wanted()) return;
  context_.span_id = id.empty() ? new_span_id() : std::move(id);
  span_.emplace();
  span_->name = std::move(name);
  span_->trace_id = context_.trace_id;
  span_->span_id = context_.span_id;
  span_->parent_id = std::move(parent_id);
  span_->kind = kind;
  span_->start = std::chrono::system_clock::now();
}

SpanTimer SpanTimer::of(std::string name, const SpanContext& self, std::string parent_id, SpanKind kind) {
  SpanTimer timer;
  timer.context_ = self;
  timer.begin(std::move(name), std::move(parent_id), kind, self.span_id);
  return timer;
}

void SpanTimer::rename() {
  if (span_) span_->span_id = new_span_id();
}

void SpanTimer::end_at(std::chrono::system_clock::time_point at) noexcept {
  if (!span_) return;
  span_->end = at;
  if (context_.sampled)
    record(std::move(*span_));
  else
    context_.buffer->take(std::move(*span_));
  span_.reset();
}

}  // namespace ditfleet::telemetry
