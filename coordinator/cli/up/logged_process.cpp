#include "coordinator/cli/up/logged_process.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

namespace ditfleet::cli {
namespace {

constexpr std::size_t kMaxLogBytes = 16u << 20;
constexpr std::size_t kMaxLineBytes = 64u << 10;  // a longer line is cut into several
constexpr int kReadsAtOnce = 64;  // more than a pipe holds: a child that never pauses must not starve the others

}  // namespace

LoggedProcess::~LoggedProcess() {
  if (log_) std::fclose(log_);
}

Result<void> LoggedProcess::start() {
  if (!log_) {
    log_ = std::fopen(spec_.log_file.c_str(), "ae");
    if (!log_) return unavailable("cannot write '" + spec_.log_file + "': " + std::strerror(errno));
    std::error_code ec;
    const auto size = std::filesystem::file_size(spec_.log_file, ec);
    log_bytes_ = ec ? 0 : size;
    rotate_log();
  }
  auto started = ChildProcess::start(spec_.program);
  if (started) {
    process_ = std::move(*started);
    return {};
  }
  if (started.error().code != Code::kNotFound) return started.error();
  take_line(started.error().message);
  not_executed_ = true;
  return {};
}

std::optional<ProcessEnd> LoggedProcess::reap() {
  if (std::exchange(not_executed_, false)) return ProcessEnd{127, 0};
  const auto end = process_.reap();
  if (end) drain_output();
  return end;
}

void LoggedProcess::rotate_log() {
  if (log_bytes_ <= kMaxLogBytes) return;
  log_bytes_ = 0;  // a rotation that fails is tried again after as many bytes
  std::error_code ec;
  std::filesystem::rename(spec_.log_file, spec_.log_file + ".1", ec);
  std::FILE* next = ec ? nullptr : std::fopen(spec_.log_file.c_str(), "ae");
  if (!next) return;
  std::fclose(log_);
  log_ = next;
}

void LoggedProcess::drain_output() {
  std::array<char, 8192> buffer{};
  for (int reads = 0; output_fd() >= 0 && reads < kReadsAtOnce; ++reads) {
    const ssize_t n = ::read(output_fd(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      process_.close_output();
      break;
    }
    partial_.append(buffer.data(), static_cast<std::size_t>(n));
    for (auto end = partial_.find('\n'); end != std::string::npos; end = partial_.find('\n')) {
      take_line(partial_.substr(0, end));
      partial_.erase(0, end + 1);
    }
    if (partial_.size() > kMaxLineBytes) take_line(std::exchange(partial_, {}));
  }
  if (output_fd() < 0 && !partial_.empty()) take_line(std::exchange(partial_, {}));
  if (log_) std::fflush(log_);
}

void LoggedProcess::take_line(std::string line) {
  if (log_) {
    std::fprintf(log_, "%s\n", line.c_str());
    log_bytes_ += line.size() + 1;
    rotate_log();
  }
  if (spec_.echo) std::fprintf(stderr, "%s | %s\n", spec_.label.c_str(), line.c_str());
  if (!line.empty()) last_line_ = std::move(line);
}

}  // namespace ditfleet::cli
