// Spans of a trace (W3C Trace Context, OpenTelemetry's data model). Without a sink (otlp.h) nothing is recorded, and a
// span costs one check of a flag. The functions are thread-safe, the objects are not.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ditfleet::telemetry {

struct SpanContext {
  std::string trace_id;  // 32 hexadecimal digits; empty: none, child spans are not recorded
  std::string span_id;   // 16
  bool sampled = false;

  bool valid() const { return !trace_id.empty(); }
  std::string traceparent() const;
  // The context of a traceparent; not valid() if the traceparent is invalid.
  static SpanContext parse(std::string_view traceparent);
  // The root of a new trace, sampled if there is a sink.
  static SpanContext fresh();
};

using AttributeValue = std::variant<std::string, std::int64_t, double, bool>;
using Attributes = std::vector<std::pair<std::string, AttributeValue>>;
enum class SpanKind { kInternal = 1, kServer = 2, kConsumer = 5 };  // the numbers of OTLP

struct Span {
  std::string name, trace_id, span_id, parent_id;  // parent_id empty: a root
  SpanKind kind = SpanKind::kInternal;
  std::chrono::system_clock::time_point start, end;
  Attributes attributes;
  std::string error;  // the status' message; empty: no error
};

class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void take(Span span) noexcept = 0;  // must not block
};

// Null: spans are dropped. The sink must stay alive until another (or null) is set and no thread records any more.
void set_span_sink(SpanSink* sink);
bool spans_wanted();
void record(Span span) noexcept;

// The context of this thread; not valid() if there is none.
const SpanContext& current_span();

// Sets this thread's context until the end of the scope. A context is not inherited by other threads: pass it along.
class ContextScope {
 public:
  explicit ContextScope(SpanContext context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  SpanContext before_;
};

// A span from its construction to end() or its destruction. It may move between threads, as coroutines do; one thread
// at a time uses it.
class SpanTimer {
 public:
  SpanTimer() = default;  // records nothing
  // A child of `parent`. Records nothing if the parent is not valid or not sampled.
  SpanTimer(std::string name, const SpanContext& parent, SpanKind kind = SpanKind::kInternal);
  // The span with this context, whose id has been passed on already; `parent_id` may be empty.
  static SpanTimer of(std::string name, const SpanContext& self, std::string parent_id, SpanKind kind);
  ~SpanTimer() { end(); }
  SpanTimer(SpanTimer&& other) noexcept : span_(std::exchange(other.span_, std::nullopt)), context_(other.context_) {}
  SpanTimer& operator=(SpanTimer&& other) noexcept {
    end();
    span_ = std::exchange(other.span_, std::nullopt);
    context_ = other.context_;
    return *this;
  }

  const SpanContext& context() const { return context_; }  // for children; the parent's if nothing is recorded
  void attribute(std::string key, AttributeValue value) {
    if (span_) span_->attributes.emplace_back(std::move(key), std::move(value));
  }
  void began(std::chrono::system_clock::time_point at) {
    if (span_) span_->start = at;
  }
  void failed(std::string message) {
    if (span_) span_->error = std::move(message);
  }
  void end() noexcept { end_at(std::chrono::system_clock::now()); }
  void end_at(std::chrono::system_clock::time_point at) noexcept;

 private:
  std::optional<Span> span_;
  SpanContext context_;
};

// A span until the end of the scope: a child of the thread's context, and the thread's context meanwhile.
class ScopedSpan : public SpanTimer {
 public:
  explicit ScopedSpan(std::string name) : SpanTimer(std::move(name), current_span()), scope_(context()) {}

 private:
  ContextScope scope_;
};

}  // namespace ditfleet::telemetry
