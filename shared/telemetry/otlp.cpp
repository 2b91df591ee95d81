#include "shared/telemetry/otlp.h"

#include <curl/curl.h>
#include <pthread.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "shared/core/environment.h"
#include "shared/core/excerpt.h"
#include "shared/core/host_name.h"
#include "shared/core/http_url.h"
#include "shared/core/log_throttle.h"
#include "shared/core/text.h"
#include "shared/telemetry/metrics.h"
#include "shared/telemetry/otlp_json.h"

namespace ditfleet::telemetry {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFlushAtEnd{2000}, kFirstPause{500}, kLongestPause{8000};
constexpr std::size_t kMaxAnswerBytes = 64 * 1024;

void count(const char* result, std::size_t spans) {
  static const Counters total("ditfleet_spans_total");
  total({result}).Increment(static_cast<double>(spans));
}

// The signal's own variable, else the general one.
std::string otlp_variable(const std::string& suffix) {
  const std::string own = environment_variable(("OTEL_EXPORTER_OTLP_TRACES_" + suffix).c_str());
  return own.empty() ? environment_variable(("OTEL_EXPORTER_OTLP_" + suffix).c_str()) : own;
}

std::string percent_decoded(const std::string& text) {
  int size = 0;
  const std::unique_ptr<char, decltype(&curl_free)> decoded(
      curl_easy_unescape(nullptr, text.c_str(), static_cast<int>(text.size()), &size), curl_free);
  return {decoded.get(), static_cast<std::size_t>(size)};
}

// "key=value,key2=value2", values percent-encoded.
std::vector<std::pair<std::string, std::string>> pairs(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> out;
  for (const std::string_view one : split(text, ',')) {
    if (const auto equals = one.find('='); equals != std::string_view::npos && !trimmed(one.substr(0, equals)).empty())
      out.emplace_back(trimmed(one.substr(0, equals)), percent_decoded(std::string(trimmed(one.substr(equals + 1)))));
  }
  return out;
}

void put(Attributes& attributes, const std::string& key, AttributeValue value) {
  for (auto& [known, old] : attributes)
    if (known == key) {
      old = std::move(value);
      return;
    }
  attributes.emplace_back(key, std::move(value));
}

bool worth_another_try(long status) { return status == 429 || status == 502 || status == 503 || status == 504; }

}  // namespace

OtlpOptions otlp_options(const std::string& endpoint, const std::string& program, const std::string& version) {
  OtlpOptions options;
  if (environment_variable("OTEL_SDK_DISABLED") == "true" || environment_variable("OTEL_TRACES_EXPORTER") == "none")
    return options;
  const std::string whole = environment_variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
  options.url = endpoint.empty() && !whole.empty() ? whole
                : endpoint.empty()                 ? environment_variable("OTEL_EXPORTER_OTLP_ENDPOINT")
                                                   : endpoint;
  if (options.url.empty()) return options;
  if (!endpoint.empty() || whole.empty()) {
    while (options.url.ends_with('/')) options.url.pop_back();
    if (!options.url.ends_with("/v1/traces")) options.url += "/v1/traces";
  }
  options.headers = pairs(otlp_variable("HEADERS"));
  const std::string timeout = otlp_variable("TIMEOUT");
  if (const int ms = leading_integer<int>(timeout); ms > 0) options.timeout = milliseconds(ms);
  const std::string host = host_name();
  options.scope_version = version;
  options.resource = {{"service.name", program},    {"service.namespace", "ditfleet"},
                      {"service.version", version}, {"service.instance.id", host + ":" + std::to_string(::getpid())},
                      {"host.name", host},          {"process.pid", static_cast<std::int64_t>(::getpid())}};
  for (auto& [key, value] : pairs(environment_variable("OTEL_RESOURCE_ATTRIBUTES"))) put(options.resource, key, value);
  if (const std::string name = environment_variable("OTEL_SERVICE_NAME"); !name.empty())
    put(options.resource, "service.name", name);
  return options;
}

class OtlpExporter::Impl {
 public:
  explicit Impl(OtlpOptions options) : options_(std::move(options)), thread_([this] { work(); }) {}
  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
      end_by_ = Clock::now() + kFlushAtEnd;
    }
    changed_.notify_all();
    thread_.join();
  }

  void take(Span span) noexcept {
    try {
      bool enough = false;
      {
        const std::lock_guard lock(mutex_);
        if (waiting_.size() >= options_.queue_spans) {
          ++dropped_;
          return;
        }
        if (waiting_.empty()) oldest_ = Clock::now();
        waiting_.push_back(std::move(span));
        enough = waiting_.size() == options_.batch_spans || waiting_.size() == 1;
      }
      if (enough) changed_.notify_all();
    } catch (...) {  // out of memory: the span is dropped
      ++dropped_;
    }
  }

  void flush() {
    std::unique_lock lock(mutex_);
    flushing_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return waiting_.empty() && !busy_; });
    flushing_ = false;
  }

 private:
  void work() {
    ::pthread_setname_np(::pthread_self(), "spans");
    curl_ = curl_easy_init();
    curl_slist* headers = nullptr;
    headers = curl_slist_append(headers, "Content-Type: application/json");
    headers = curl_slist_append(headers, "Expect:");
    for (const auto& [name, value] : options_.headers)
      headers = curl_slist_append(headers, (name + ": " + value).c_str());
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
      if (!waiting_.empty() && waiting_.size() < options_.batch_spans)
        changed_.wait_until(lock, oldest_ + options_.delay,
                            [this] { return ending_ || flushing_ || waiting_.size() >= options_.batch_spans; });
      if (const auto dropped = dropped_.exchange(0)) {
        count("queue_full", dropped);
        warn("the queue of " + std::to_string(options_.queue_spans) + " spans is full; " + std::to_string(dropped) +
             " were dropped");
      }
      if (waiting_.empty()) {
        if (ending_) break;
        continue;
      }
      std::vector<Span> batch;
      while (!waiting_.empty() && batch.size() < options_.batch_spans) {
        batch.push_back(std::move(waiting_.front()));
        waiting_.pop_front();
      }
      oldest_ = Clock::now();
      busy_ = true;
      if (ending_ && Clock::now() >= end_by_)
        count("unreachable", batch.size());
      else
        deliver(lock, batch, headers);
      busy_ = false;
      changed_.notify_all();
    }
    curl_slist_free_all(headers);
    curl_easy_cleanup(curl_);
  }

  // Called and returns with the lock held; releases it in between.
  void deliver(std::unique_lock<std::mutex>& lock, const std::vector<Span>& batch, curl_slist* headers) {
    auto pause = kFirstPause;
    for (int attempt = 1;; ++attempt) {
      lock.unlock();
      std::string answer;
      long status = 0;
      const std::string body = otlp_json(batch, options_.resource, options_.scope_version);
      const CURLcode code = post(body, headers, answer, status);
      lock.lock();
      if (code == CURLE_OK && status >= 200 && status < 300) {
        const std::size_t rejected = std::min(rejected_spans(answer), batch.size());
        count("exported", batch.size() - rejected);
        if (rejected > 0) {
          count("refused", rejected);
          warn("the receiver rejected " + std::to_string(rejected) + " of " + std::to_string(batch.size()) + " spans");
        }
        return;
      }
      const bool reached = code == CURLE_OK;
      if (reached && !worth_another_try(status)) {
        count("refused", batch.size());
        warn("the receiver returned status " + std::to_string(status) + "; " + std::to_string(batch.size()) +
             " spans were dropped");
        return;
      }
      const bool late = ending_ && Clock::now() + pause >= end_by_;
      if (attempt >= options_.attempts || late) {
        count("unreachable", batch.size());
        warn((reached ? "the receiver returned status " + std::to_string(status)
                      : std::string(curl_easy_strerror(code))) +
             "; " + std::to_string(batch.size()) + " spans were dropped");
        return;
      }
      changed_.wait_for(lock, pause, [this, was = ending_] { return ending_ && !was; });
      pause = std::min(pause * 2, kLongestPause);
    }
  }

  CURLcode post(const std::string& body, curl_slist* headers, std::string& answer, long& status) {
    curl_easy_setopt(curl_, CURLOPT_URL, options_.url.c_str());
    curl_easy_setopt(curl_, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl_, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(curl_, CURLOPT_USERAGENT, "ditfleet-otlp");
    curl_easy_setopt(curl_, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl_, CURLOPT_POST, 1L);
    curl_easy_setopt(curl_, CURLOPT_POSTFIELDS, body.data());
    curl_easy_setopt(curl_, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
    curl_easy_setopt(curl_, CURLOPT_TIMEOUT_MS, static_cast<long>(options_.timeout.count()));
    curl_easy_setopt(curl_, CURLOPT_CONNECTTIMEOUT_MS,
                     static_cast<long>(std::min(options_.timeout, milliseconds(3000)).count()));
    curl_easy_setopt(curl_, CURLOPT_WRITEDATA, &answer);
    curl_easy_setopt(
        curl_, CURLOPT_WRITEFUNCTION, +[](char* bytes, std::size_t, std::size_t count, void* into) -> std::size_t {
          auto& text = *static_cast<std::string*>(into);
          if (text.size() + count <= kMaxAnswerBytes) text.append(bytes, count);
          return count;
        });
    curl_easy_setopt(curl_, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl_, CURLOPT_XFERINFODATA, this);
    curl_easy_setopt(
        curl_, CURLOPT_XFERINFOFUNCTION, +[](void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) -> int {
          auto& impl = *static_cast<Impl*>(self);
          const std::lock_guard lock(impl.mutex_);
          return impl.ending_ && Clock::now() >= impl.end_by_ ? 1 : 0;
        });
    const CURLcode code = curl_easy_perform(curl_);
    if (code == CURLE_OK) curl_easy_getinfo(curl_, CURLINFO_RESPONSE_CODE, &status);
    return code;
  }

  void warn(const std::string& message) {
    if (const auto more = throttle_.admit())
      spdlog::warn("spans are not delivered to {}: {}{}", options_.url, message, *more);
  }

  const OtlpOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Span> waiting_;
  Clock::time_point oldest_{}, end_by_{};
  std::atomic<std::size_t> dropped_{0};
  LogThrottle throttle_;  // of the thread
  CURL* curl_ = nullptr;
  bool busy_ = false, ending_ = false, flushing_ = false;
  std::thread thread_;  // last: it uses the others
};

OtlpExporter::OtlpExporter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) { set_span_sink(this); }
OtlpExporter::~OtlpExporter() { set_span_sink(nullptr); }
void OtlpExporter::take(Span span) noexcept { impl_->take(std::move(span)); }
void OtlpExporter::flush() { impl_->flush(); }

Result<std::unique_ptr<OtlpExporter>> OtlpExporter::start(OtlpOptions options) {
  if (const auto problem = http_url_problem(options.url)) {
    const std::string shown =
        options.url.find('@') == std::string::npos ? " is '" + excerpt(options.url, 128) + "', which " : " ";
    return invalid_argument("the OTLP endpoint" + shown + *problem + "; it must be a URL such as http://127.0.0.1:4318",
                            "telemetry.otlp_endpoint");
  }
  static const CURLcode ready = curl_global_init(CURL_GLOBAL_DEFAULT);
  if (ready != CURLE_OK)
    return internal_error("libcurl cannot be initialized: " + std::string(curl_easy_strerror(ready)));
  return std::unique_ptr<OtlpExporter>(new OtlpExporter(std::make_unique<Impl>(std::move(options))));
}

double sample_rate(double configured) {
  const std::string sampler = environment_variable("OTEL_TRACES_SAMPLER");
  if (configured < 1 || sampler.empty()) return configured;
  if (sampler.ends_with("always_off")) return 0;
  const bool by_ratio = sampler.ends_with("traceidratio");
  if (!by_ratio && !sampler.ends_with("always_on"))
    spdlog::warn(
        "OTEL_TRACES_SAMPLER is '{}'; it must be always_on, always_off or traceidratio, or one of these after "
        "parentbased_",
        excerpt(sampler, 64));
  const std::string argument = environment_variable("OTEL_TRACES_SAMPLER_ARG");
  if (!by_ratio || argument.empty()) return 1;
  if (const auto rate = number_of<double>(argument, 0, 1)) return *rate;
  spdlog::warn("OTEL_TRACES_SAMPLER_ARG is '{}'; it must be a number from 0 to 1", excerpt(argument, 64));
  return 1;
}

Result<std::unique_ptr<OtlpExporter>> start_tracing(const Tracing& tracing, const std::string& program,
                                                    const std::string& version) {
  set_sample_rate(sample_rate(tracing.sample_rate));
  set_slow_limit(std::chrono::duration<double>(tracing.slow_s));
  OtlpOptions options = otlp_options(tracing.endpoint, program, version);
  if (options.url.empty()) return std::unique_ptr<OtlpExporter>();
  const std::string url = options.url;
  auto exporter = OtlpExporter::start(std::move(options));
  if (exporter) spdlog::info("exporting spans to {}", url);
  return exporter;
}

}  // namespace ditfleet::telemetry
