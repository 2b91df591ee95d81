// Sends HTTP requests: many at a time, on a thread of its own, through libcurl.
#pragma once

#include <sys/socket.h>

#include <boost/asio/awaitable.hpp>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ditfleet {

namespace asio = boost::asio;

class HttpClient {
 public:
  struct Request {
    std::string method = "GET", url;
    std::vector<std::string> headers = {};               // "Name: value"
    std::shared_ptr<const std::string> body = {};        // null: none
    std::size_t most_bytes = 64 << 10;                   // of the answer that are read; more end it without an error
    std::chrono::milliseconds timeout{10'000}, idle{0};  // of all; without a byte, 0: as long as all
    bool proxy = true;                                   // uses that of the environment
  };
  struct Answer {
    long status = 0;                             // 0: none
    std::string body, error;                     // error: why there is none, or why it is not whole
    bool refused = false;                        // may_connect() refused the address
    std::map<std::string, std::string> headers;  // by name in lower case

    // Of a header; empty without it.
    std::string header(const std::string& name) const;
  };
  struct Options {
    const char* thread = "http";                             // its name
    bool (*may_connect)(const sockaddr& address) = nullptr;  // null: to every address
    std::string ca_file = {};                                // empty: the system's certificates
  };

  explicit HttpClient(Options options);
  ~HttpClient();  // ends the requests that run
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // Follows no redirect. A name is resolved once, for the connection whose address may_connect() sees. Returns on the
  // caller's executor, which must be single-threaded or a strand. Thread-safe.
  asio::awaitable<Answer> send(Request request);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ditfleet
