#include "shared/telemetry/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <ctime>

#include "shared/core/json.h"

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
    const std::string line =
        json::serialize(json::object{{"time", utc(message.time)},
                                     {"level", std::string(level.data(), level.size())},
                                     {"program", program_},
                                     {"pid", static_cast<std::int64_t>(::getpid())},
                                     {"message", std::string(message.payload.data(), message.payload.size())}});
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
    const std::string_view text(message.payload.data(), message.payload.size());
    for (std::size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      // U+0080 to U+009F are controls as well: C2 80 to C2 9F in UTF-8.
      const bool c1 = c == 0xC2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
                      static_cast<unsigned char>(text[i + 1]) < 0xA0;
      if (c == '\n') {
        append("\\n", out);
      } else if ((c < 0x20 && c != '\t') || c == 0x7F) {
        append(fmt::format("\\x{:02x}", c), out);
      } else if (c1) {
        append(fmt::format("\\u00{:02x}", static_cast<unsigned char>(text[++i])), out);
      } else {
        out.push_back(text[i]);
      }
    }
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<OneLine>(); }

 private:
  static void append(std::string_view text, spdlog::memory_buf_t& out) {
    out.append(text.data(), text.data() + text.size());
  }
};

}  // namespace

Result<void> configure_log(const std::string& program, const std::string& level, const std::string& format) {
  const auto parsed = spdlog::level::from_str(level);
  if (parsed == spdlog::level::off && level != "off") {
    return invalid_argument("log.level is '" + level + "'; it takes trace, debug, info, warn, error or off",
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
    return invalid_argument("log.format is '" + format + "'; it takes text or json", "log.format");
  }
  logger->set_level(parsed);
  logger->flush_on(spdlog::level::trace);
  spdlog::set_default_logger(std::move(logger));
  return {};
}

}  // namespace ditfleet::telemetry
