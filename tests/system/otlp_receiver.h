// A small OTLP/HTTP receiver on a port of the loopback.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shared/core/json.h"

namespace ditfleet::testing {

class OtlpReceiver {
 public:
  OtlpReceiver() {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
      std::abort();
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~OtlpReceiver() {
    ending_ = true;
    thread_.join();
    ::close(listener_);
  }
  OtlpReceiver(const OtlpReceiver&) = delete;

  std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }
  // What the next requests are answered with, the last one for all after it.
  void answer_with(std::vector<int> statuses, std::string body = "{}") {
    const std::lock_guard lock(mutex_);
    statuses_ = std::move(statuses);
    body_ = std::move(body);
  }
  // While it is held nothing is answered.
  void hold(bool held) { held_ = held; }

  struct Request {
    std::string head;  // the request line and headers
    json::value body;
  };
  std::vector<Request> requests() const {
    const std::lock_guard lock(mutex_);
    return requests_;
  }
  // Of all requests that were answered with 200.
  std::vector<json::object> spans() const {
    const std::lock_guard lock(mutex_);
    return spans_;
  }

 private:
  void serve() {
    while (!ending_) {
      pollfd ready{listener_, POLLIN, 0};
      if (::poll(&ready, 1, 20) <= 0) continue;
      const int peer = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (peer < 0) continue;
      answer(peer);
      ::close(peer);
    }
  }
  void answer(int peer) {
    std::string text;
    std::size_t head = std::string::npos, length = 0;
    for (char buffer[16384]; head == std::string::npos || text.size() < head + 4 + length;) {
      pollfd ready{peer, POLLIN, 0};
      if (ending_ || ::poll(&ready, 1, 5000) <= 0) return;
      const ssize_t n = ::read(peer, buffer, sizeof buffer);
      if (n <= 0) return;
      text.append(buffer, static_cast<std::size_t>(n));
      head = text.find("\r\n\r\n");
      if (const auto at = text.find("Content-Length: "); head != std::string::npos && at < head)
        length = std::stoul(text.substr(at + 16));
    }
    while (held_ && !ending_) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::string reply;
    {
      const std::lock_guard lock(mutex_);
      const int status = statuses_.empty() ? 200 : statuses_.front();
      if (statuses_.size() > 1) statuses_.erase(statuses_.begin());
      requests_.push_back({text.substr(0, head), json::parse(text.substr(head + 4))});
      if (status == 200)
        for (const auto& resource : requests_.back().body.at("resourceSpans").as_array())
          for (const auto& scope : resource.at("scopeSpans").as_array())
            for (const auto& span : scope.at("spans").as_array()) spans_.push_back(span.as_object());
      reply = "HTTP/1.1 " + std::to_string(status) +
              " X\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: " +
              std::to_string(body_.size()) + "\r\n\r\n" + body_;
    }
    (void)!::write(peer, reply.data(), reply.size());
  }

  int listener_ = -1, port_ = 0;
  std::atomic<bool> ending_{false}, held_{false};
  mutable std::mutex mutex_;
  std::vector<int> statuses_;
  std::string body_ = "{}";
  std::vector<Request> requests_;
  std::vector<json::object> spans_;
  std::thread thread_;
};

// The value of a span's attribute as text; "" if it has none of this name.
inline std::string attribute(const json::object& holder, std::string_view key) {
  for (const auto& one : holder.at("attributes").as_array()) {
    if (one.at("key").as_string() != key) continue;
    const auto& value = *one.at("value").as_object().begin();
    return value.value().is_string() ? std::string(value.value().as_string()) : json::serialize(value.value());
  }
  return {};
}

}  // namespace ditfleet::testing
