// Spans of a trace (W3C Trace Context, OpenTelemetry's data model). Without a sink (otlp.h), spans are not recorded and
// cost one check of a flag. Functions are thread-safe; objects are not.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace ditfleet::telemetry {

class SpanBuffer;

struct SpanContext {
  std::string trace_id;  // 32 hexadecimal digits; empty: no trace, child spans are not recorded
  std::string span_id;   // 16 hexadecimal digits
  bool sampled = false;
  std::shared_ptr<SpanBuffer> buffer = nullptr;  // of a trace that is not sampled: takes its spans, if not null

  bool valid() const { return !trace_id.empty(); }
  std::string traceparent() const;
  // Parses a traceparent. The result is not valid() if the traceparent is invalid.
  static SpanContext parse(std::string_view traceparent);
  // Returns the root of a new trace, which is sampled if there is a sink.
  static SpanContext fresh();
};

using AttributeValue = std::variant<std::string, std::int64_t, double, bool>;
using Attributes = std::vector<std::pair<std::string, AttributeValue>>;
enum class SpanKind { kInternal = 1, kServer = 2, kConsumer = 5 };  // the numbers of OTLP

struct Span {
  std::string name, trace_id, span_id, parent_id;  // parent_id is empty for a root
  SpanKind kind = SpanKind::kInternal;
  std::chrono::system_clock::time_point start, end;
  Attributes attributes;
  std::string error;  // empty: no error
  struct Link {
    std::string trace_id, span_id;
  };
  std::vector<Link> links;
};

class SpanSink {
 public:
  virtual ~SpanSink() = default;
  virtual void take(Span span) noexcept = 0;  // must not block
};

// With null, spans are dropped. The sink must outlive its use: first set another sink or null, and stop recording in
// all threads.
void set_span_sink(SpanSink* sink);
bool spans_wanted();
void record(Span span) noexcept;

// Holds the spans of one attempt in a trace that is not sampled, until it is known whether they are of interest. Keeps
// the first 255 spans and the last, which is the attempt's own. Thread-safe.
class SpanBuffer {
 public:
  void take(Span span) noexcept;
  void send() noexcept;  // records the spans it holds; those that follow are recorded at once

 private:
  std::mutex mutex_;
  std::vector<Span> held_;
  bool sent_ = false;
};

// The share of new traces that are sampled, from 0 to 1. All processes decide alike, by the trace id.
void set_sample_rate(double rate);
bool is_sampled(std::string_view trace_id);

// How long a job takes that is always sent, or zero for none. With no limit set, no job is slow.
void set_slow_limit(std::chrono::duration<double> limit);
bool is_slow(std::chrono::duration<double> took);

// Returns this thread's context, which is not valid() if none is set.
const SpanContext& current_span();

// Sets this thread's context until the end of the scope. New threads do not inherit the context.
class ContextScope {
 public:
  explicit ContextScope(SpanContext context);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

 private:
  SpanContext before_;
};

// A span that lasts from construction to end() or destruction. It may move between threads, but only one thread may use
// it at a time.
class SpanTimer {
 public:
  SpanTimer() = default;  // records nothing
  // Starts a child of `parent`. Records nothing if the parent is not valid, or not sampled and without a buffer.
  SpanTimer(std::string name, const SpanContext& parent, SpanKind kind = SpanKind::kInternal);
  // Starts the span with the context `self`, if its id was already sent elsewhere. `parent_id` may be empty.
  static SpanTimer of(std::string name, const SpanContext& self, std::string parent_id, SpanKind kind);
  ~SpanTimer() { end(); }
  SpanTimer(SpanTimer&& other) noexcept
      : span_(std::exchange(other.span_, std::nullopt)), context_(std::move(other.context_)) {}
  SpanTimer& operator=(SpanTimer&& other) noexcept {
    end();
    span_ = std::exchange(other.span_, std::nullopt);
    context_ = std::move(other.context_);
    return *this;
  }

  const SpanContext& context() const {
    return context_;
  }  // for children; the parent's context if this span is not recorded
  void attribute(std::string key, AttributeValue value) {
    if (span_) span_->attributes.emplace_back(std::move(key), std::move(value));
  }
  void link(std::string trace_id, std::string span_id) {
    if (span_) span_->links.push_back({std::move(trace_id), std::move(span_id)});
  }
  // Gives the span another id, which its children do not have.
  void rename();
  void began(std::chrono::system_clock::time_point at) {
    if (span_) span_->start = at;
  }
  void failed(std::string message) {
    if (span_) span_->error = std::move(message);
  }
  void end() noexcept { end_at(std::chrono::system_clock::now()); }
  void end_at(std::chrono::system_clock::time_point at) noexcept;

 private:
  void begin(std::string name, std::string parent_id, SpanKind kind, std::string id);  // an empty id: a new one

  std::optional<Span> span_;
  SpanContext context_;
};

// A span that lasts until the end of the scope. It is a child of the thread's context, and is the context until then.
class ScopedSpan : public SpanTimer {
 public:
  explicit ScopedSpan(std::string name) : SpanTimer(std::move(name), current_span()), scope_(context()) {}

 private:
  ContextScope scope_;
};

}  // namespace ditfleet::telemetry
