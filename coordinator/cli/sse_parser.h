// Incremental parser of server-sent events (WHATWG HTML §9.2).
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace ditfleet::cli {

struct ServerEvent {
  std::string id, type, data;  // the type defaults to "message"
};

// Not thread-safe.
class SseParser {
 public:
  // Calls `on_event` for each event that `bytes` completes.
  void feed(std::string_view bytes, const std::function<void(const ServerEvent&)>& on_event);

 private:
  void line(std::string_view text, const std::function<void(const ServerEvent&)>& on_event);
  std::string buffer_, last_id_, pending_id_, type_, data_;
  bool has_data_ = false;
  bool after_cr_ = false;
};

}  // namespace ditfleet::cli
