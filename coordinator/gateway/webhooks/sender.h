// Sends requests of webhooks: many at a time, on a thread of its own, through libcurl.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace ditfleet::gateway {

class WebhookSender {
 public:
  struct Request {
    std::string url;
    std::vector<std::string> headers;  // "Name: value"
    std::string body;
  };
  struct Outcome {
    long status = 0;    // of the answer; 0: none
    std::string error;  // why there is none
  };

  // `allow_private`: receivers may have addresses that are not public (is_public_address).
  WebhookSender(bool allow_private, std::chrono::milliseconds timeout);
  ~WebhookSender();  // ends the requests that run
  WebhookSender(const WebhookSender&) = delete;
  WebhookSender& operator=(const WebhookSender&) = delete;

  // POSTs the body. A name is resolved once, for the connection that it is checked for. Follows no redirect, uses no
  // proxy and reads at most 64 KiB of an answer. `done` is called on the sender's thread, exactly once. Thread-safe.
  void post(Request request, std::function<void(Outcome)> done);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet::gateway
