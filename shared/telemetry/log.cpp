#include "shared/telemetry/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <ctime>

#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/telemetry/spans.h"

namespace ditfleet::telemetry {
namespace {

std::string utc(spdlog::log_clock::time_point at) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(at.time_since_epoch()).count();
  const std::time_t seconds = us / 1'000'000;
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 32> text{};
  const std::size_t n = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  return std::string(text.data(), n) + fmt::format(".{:06}Z", us % 1'000'000);
}

// A class because a spdlog pattern cannot escape the message.
class JsonFormatter final : public spdlog::formatter {
 public:
  explicit JsonFormatter(std::string program) : program_(std::move(program)) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const auto level = spdlog::level::to_string_view(message.level);
    json::object object{{"time", utc(message.time)},
                        {"level", std::string(level.data(), level.size())},
                        {"program", program_},
                        {"pid", static_cast<std::int64_t>(::getpid())},
                        {"message", std::string(message.payload.data(), message.payload.size())}};
    if (const SpanContext& span = current_span(); span.valid()) {
      object["trace_id"] = span.trace_id;
      object["span_id"] = span.span_id;
    }
    const std::string line = json::serialize(object);
    out.append(line.data(), line.data() + line.size());
    out.push_back('\n');
  }
  std::unique_ptr<spdlog::formatter> clone() const override { return std::make_unique<JsonFormatter>(program_); }

 private:
  std::string program_;
};

// A message as one line: a path or a prompt in it must not forge lines or control the terminal.
class OneLine final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& out) override {
    std::string text = escaped({message.payload.data(), message.payload.size()});
    if (const SpanContext& span = current_span(); span.valid())
      text += " trace_id=" + span.trace_id + " span_id=" + span.span_id;
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<OneLine>(); }
};

}  // namespace

Result<void> configure_log(const std::string& program, const std::string& level, const std::string& format) {
  const auto parsed = spdlog::level::from_str(level);
  if (parsed == spdlog::level::off && level != "off") {
    return invalid_argument("log.level is '" + level + "'; it must be trace, debug, info, warn, error or off",
                            "log.level");
  }
  auto logger = std::make_shared<spdlog::logger>(program, std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  if (format == "json") {
    logger->set_formatter(std::make_unique<JsonFormatter>(program));
  } else if (format == "text") {
    auto formatter = std::make_unique<spdlog::pattern_formatter>();
    formatter->add_flag<OneLine>('*').set_pattern("%Y-%m-%dT%H:%M:%S.%e %^%-5l%$ " + program + "[%P] %*");
    logger->set_formatter(std::move(formatter));
  } else {
    return invalid_argument("log.format is '" + format + "'; it must be text or json", "log.format");
  }
  logger->set_level(parsed);
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  return {};
}

}  // namespace ditfleet::telemetry
