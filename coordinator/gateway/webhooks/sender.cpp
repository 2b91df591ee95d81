#include "coordinator/gateway/webhooks/sender.h"

#include <curl/curl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "coordinator/gateway/webhooks/address.h"
#include "shared/core/named_thread.h"

namespace ditfleet::gateway {
namespace {

constexpr std::size_t kMostAnswerBytes = 64 << 10;
constexpr long kMostConnectMs = 5000;
constexpr int kLongestPollMs = 1000;

}  // namespace

class WebhookSender::Impl {
 public:
  Impl(bool allow_private, std::chrono::milliseconds timeout)
      : allow_private_(allow_private), timeout_(timeout), multi_(curl_multi_init()) {
    curl_multi_setopt(multi_, CURLMOPT_MAXCONNECTS, 64L);
    asio::post(thread_.executor(), [this] { run(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    curl_multi_wakeup(multi_);
    thread_.join();
    curl_multi_cleanup(multi_);
  }

  void post(Request request, std::function<void(Outcome)> done) {
    auto transfer = std::make_unique<Transfer>();
    transfer->request = std::move(request);
    transfer->done = std::move(done);
    transfer->allow_private = allow_private_;
    {
      const std::lock_guard lock(mutex_);
      if (!stopping_) {
        waiting_.push_back(std::move(transfer));
        curl_multi_wakeup(multi_);
        return;
      }
    }
    transfer->done({0, "this coordinator stops"});
  }

 private:
  struct Transfer {
    Request request;
    std::function<void(Outcome)> done;
    curl_slist* headers = nullptr;
    std::size_t read = 0;
    bool allow_private = false, refused = false;
    char problem[CURL_ERROR_SIZE] = "";
  };

  static curl_socket_t open_socket(void* user, curlsocktype, curl_sockaddr* address) {
    auto& transfer = *static_cast<Transfer*>(user);
    if (!transfer.allow_private && !is_public_address(address->addr)) {
      transfer.refused = true;
      return CURL_SOCKET_BAD;
    }
    return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
  }

  static std::size_t on_answer(char*, std::size_t size, std::size_t count, void* user) {
    auto& transfer = *static_cast<Transfer*>(user);
    transfer.read += size * count;
    return transfer.read > kMostAnswerBytes ? 0 : size * count;  // 0 ends the transfer
  }

  void begin(std::unique_ptr<Transfer> transfer) {
    CURL* easy = curl_easy_init();
    for (const std::string& header : transfer->request.headers)
      transfer->headers = curl_slist_append(transfer->headers, header.c_str());
    const auto set = [&](CURLoption option, auto value) { curl_easy_setopt(easy, option, value); };
    set(CURLOPT_URL, transfer->request.url.c_str());
    set(CURLOPT_HTTPHEADER, transfer->headers);
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(transfer->request.body.size()));
    set(CURLOPT_POSTFIELDS, transfer->request.body.data());
    set(CURLOPT_WRITEFUNCTION, &on_answer);
    set(CURLOPT_WRITEDATA, transfer.get());
    set(CURLOPT_OPENSOCKETFUNCTION, &open_socket);
    set(CURLOPT_OPENSOCKETDATA, transfer.get());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_FOLLOWLOCATION, 0L);
    set(CURLOPT_PROXY, "");
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_CONNECTTIMEOUT_MS, std::min<long>(kMostConnectMs, timeout_.count()));
    set(CURLOPT_TIMEOUT_MS, static_cast<long>(timeout_.count()));
    set(CURLOPT_ERRORBUFFER, transfer->problem);
    set(CURLOPT_USERAGENT, "DiTFleet/" DITFLEET_VERSION);
    curl_multi_add_handle(multi_, easy);
    running_.emplace(easy, std::move(transfer));
  }

  void end(CURL* easy, const Outcome& outcome) {
    curl_multi_remove_handle(multi_, easy);
    auto transfer = std::move(running_.extract(easy).mapped());
    curl_easy_cleanup(easy);
    curl_slist_free_all(transfer->headers);
    transfer->done(outcome);
  }

  Outcome outcome_of(CURL* easy, CURLcode result) {
    const Transfer& transfer = *running_.at(easy);
    Outcome out;
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &out.status);
    if (result == CURLE_OK || transfer.read > kMostAnswerBytes) return out;  // what else it says does not matter
    out.status = 0;
    out.error = transfer.refused
                    ? "'" + host_of(transfer.request.url) +
                          "' has an address that is not public; use a public one, or set webhooks.allow_private"
                    : (transfer.problem[0] != '\0' ? transfer.problem : curl_easy_strerror(result));
    return out;
  }

  void run() {
    for (;;) {
      std::vector<std::unique_ptr<Transfer>> fresh;
      {
        const std::lock_guard lock(mutex_);
        if (stopping_) break;
        fresh.swap(waiting_);
      }
      for (auto& transfer : fresh) begin(std::move(transfer));
      int active = 0, left = 0;
      curl_multi_perform(multi_, &active);
      while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
        if (message->msg != CURLMSG_DONE) continue;
        CURL* easy = message->easy_handle;
        end(easy, outcome_of(easy, message->data.result));
      }
      curl_multi_poll(multi_, nullptr, 0, kLongestPollMs, nullptr);
    }
    while (!running_.empty()) end(running_.begin()->first, {0, "this coordinator stops"});
    for (auto& transfer : waiting_) transfer->done({0, "this coordinator stops"});
  }

  const bool allow_private_;
  const std::chrono::milliseconds timeout_;
  CURLM* multi_;
  std::mutex mutex_;
  bool stopping_ = false;                           // guarded by mutex_
  std::vector<std::unique_ptr<Transfer>> waiting_;  // guarded by mutex_ until stopping_
  std::map<CURL*, std::unique_ptr<Transfer>> running_;
  NamedThread thread_{"webhooks"};
};

WebhookSender::WebhookSender(bool allow_private, std::chrono::milliseconds timeout)
    : impl_(std::make_unique<Impl>(allow_private, timeout)) {}
WebhookSender::~WebhookSender() = default;
void WebhookSender::post(Request request, std::function<void(Outcome)> done) {
  impl_->post(std::move(request), std::move(done));
}

}  // namespace ditfleet::gateway
