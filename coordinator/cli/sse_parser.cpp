#include "coordinator/cli/sse_parser.h"

namespace ditfleet::cli {

void SseParser::feed(std::string_view bytes, const std::function<void(const ServerEvent&)>& on_event) {
  for (char c : bytes) {
    if (c == '\n' && after_cr_) {  // the second half of CR LF
      after_cr_ = false;
      continue;
    }
    after_cr_ = c == '\r';
    if (c != '\n' && c != '\r') {
      buffer_ += c;
      continue;
    }
    line(buffer_, on_event);
    buffer_.clear();
  }
}

void SseParser::line(std::string_view text, const std::function<void(const ServerEvent&)>& on_event) {
  if (text.empty()) {
    if (!pending_id_.empty()) last_id_ = pending_id_;
    if (has_data_) on_event({last_id_, type_.empty() ? "message" : type_, data_});
    type_.clear();
    data_.clear();
    has_data_ = false;
    return;
  }
  if (text.front() == ':') return;  // a comment: keeps the connection open
  const auto colon = text.find(':');
  const std::string_view field = text.substr(0, colon);
  std::string_view value = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
  if (!value.empty() && value.front() == ' ') value.remove_prefix(1);
  if (field == "id") {
    pending_id_ = value;
  } else if (field == "event") {
    type_ = value;
  } else if (field == "data") {
    if (has_data_) data_ += '\n';
    data_ += value;
    has_data_ = true;
  }
}

}  // namespace ditfleet::cli
