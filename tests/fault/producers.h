// Producers that keep submitting during faults, by HTTP, a Function call or a plain XADD. Each chooses its job ids or
// idempotency keys, so that a retry submits the same job, and records the acknowledged jobs.
#pragma once

#include <curl/curl.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shared/core/ids.h"
#include "shared/core/json.h"
#include "shared/queue/client.h"
#include "shared/redis/connection.h"

namespace ditfleet::testing {

namespace asio = boost::asio;

inline std::string tiny_spec(int seed) {
  return R"({"model":"tiny","prompt":"a red circle","width":64,"height":64,"num_inference_steps":1,"seed":)" +
         std::to_string(seed) + "}";
}

// Submits by POST /v1/jobs with an Idempotency-Key, on its own thread.
class HttpProducer {
 public:
  HttpProducer(std::string gateway, std::chrono::milliseconds pause)
      : url_(std::move(gateway) + "/v1/jobs"), pause_(pause) {
    thread_ = std::thread([this] { run(); });
  }
  ~HttpProducer() { stop(); }
  // Waits for the submission in progress and returns the acknowledged jobs.
  const std::vector<std::string>& stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
    return ids_;
  }
  std::size_t refused() const { return refused_; }      // attempts without an acknowledgement
  std::string complaint() const { return complaint_; }  // an unexpected response

 private:
  void run() {
    CURL* curl = ::curl_easy_init();
    for (int n = 0; !stopping_; ++n) {
      const std::string key = new_nonce(), body = tiny_spec(n);
      while (!once(curl, key, body) && !stopping_) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::this_thread::sleep_for(pause_);
    }
    ::curl_easy_cleanup(curl);
  }
  bool once(CURL* curl, const std::string& key, const std::string& body) {
    ::curl_easy_reset(curl);
    std::string answer;
    curl_slist* headers = ::curl_slist_append(nullptr, ("Idempotency-Key: " + key).c_str());
    headers = ::curl_slist_append(headers, "Content-Type: application/json");
    ::curl_easy_setopt(curl, CURLOPT_URL, url_.c_str());
    ::curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    ::curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body.c_str());
    ::curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, 5000L);
    ::curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    ::curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    ::curl_easy_setopt(
        curl, CURLOPT_WRITEFUNCTION, +[](char* data, std::size_t one, std::size_t count, void* to) {
          static_cast<std::string*>(to)->append(data, one * count);
          return one * count;
        });
    const auto done = ::curl_easy_perform(curl);
    long status = 0;
    ::curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    ::curl_slist_free_all(headers);
    if (done == CURLE_OK && (status == 202 || status == 200)) {
      auto value = parse_json(answer);
      if (value && value->is_object() && value->as_object().contains("id")) {
        ids_.emplace_back(value->as_object().at("id").as_string());
        return true;
      }
      complaint_ = "acknowledged without an id: " + answer;
    } else if (done == CURLE_OK && status < 500 && status != 429) {
      complaint_ = std::to_string(status) + " " + answer;
    }
    ++refused_;
    return false;
  }

  std::string url_;
  std::chrono::milliseconds pause_;
  std::thread thread_;
  std::atomic<bool> stopping_ = false;
  // Written by the thread; read only after stop().
  std::vector<std::string> ids_;
  std::size_t refused_ = 0;
  std::string complaint_;
};

// Submits by a Function call (through the queue's client) or by a plain XADD until `stopping` is set.
class RedisProducer {
 public:
  enum class Route { kFunction, kStream };
  RedisProducer(asio::io_context& io, std::shared_ptr<redis::Connection> connection, Route route,
                std::chrono::milliseconds pause)
      : io_(io),
        connection_(std::move(connection)),
        client_(connection_, queue::QueueOptions{}),
        route_(route),
        pause_(pause) {}

  // Spawn once. The producer must outlive it; `ended` is set when it returns.
  asio::awaitable<void> run() {
    for (int n = 0; !stopping; ++n) {
      const std::string id = new_id(), spec = tiny_spec(1000 + n);
      for (;;) {
        if (co_await once(id, spec)) {
          ids.push_back(id);
          break;
        }
        ++refused;
        if (stopping) break;
        co_await nap(std::chrono::milliseconds(50));
      }
      co_await nap(pause_);
    }
    ended = true;
  }
  bool stopping = false, ended = false;
  std::vector<std::string> ids;
  std::size_t refused = 0;

 private:
  asio::awaitable<bool> once(const std::string& id, const std::string& spec) {
    if (route_ == Route::kFunction) {
      queue::Submission submission;
      submission.id = id;
      submission.spec = spec;
      const auto outcome = co_await client_.submit(submission, Deadline::after(std::chrono::seconds(2)));
      co_return outcome.ok();
    }
    redis::Command add("XADD");
    add << "df:{0}:in"
        << "*"
        << "id" << id << "spec" << spec;
    const auto reply = co_await connection_->execute(std::move(add), Deadline::after(std::chrono::seconds(2)));
    co_return reply.ok();
  }
  asio::awaitable<void> nap(std::chrono::milliseconds time) {
    asio::steady_timer timer(io_, time);
    co_await timer.async_wait(asio::use_awaitable);
  }

  asio::io_context& io_;
  std::shared_ptr<redis::Connection> connection_;
  queue::Client client_;
  Route route_;
  std::chrono::milliseconds pause_;
};

}  // namespace ditfleet::testing
