#include "shared/core/http_client.h"

#include <curl/curl.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cctype>
#include <functional>
#include <mutex>
#include <string_view>
#include <utility>

#include "shared/core/named_thread.h"
#include "shared/core/text.h"

namespace ditfleet {
namespace {

constexpr long kMostConnectMs = 5000;
constexpr int kLongestPollMs = 1000;

}  // namespace

std::string HttpClient::Answer::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string() : found->second;
}

class HttpClient::Impl {
 public:
  explicit Impl(Options options) : options_(std::move(options)), multi_(curl_multi_init()), thread_(options_.thread) {
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

  // `done` is called on this client's thread, exactly once.
  void post(Request request, std::function<void(Answer)> done) {
    auto transfer = std::make_unique<Transfer>();
    transfer->request = std::move(request);
    transfer->done = std::move(done);
    transfer->may_connect = options_.may_connect;
    {
      const std::lock_guard lock(mutex_);
      if (!stopping_) {
        waiting_.push_back(std::move(transfer));
        curl_multi_wakeup(multi_);
        return;
      }
    }
    transfer->done(stopped());
  }

 private:
  struct Transfer {
    Request request;
    std::function<void(Answer)> done;
    Answer answer;
    bool (*may_connect)(const sockaddr&) = nullptr;
    curl_slist* headers = nullptr;
    bool full = false;
    char problem[CURL_ERROR_SIZE] = "";
  };

  static Answer stopped() {
    Answer answer;
    answer.error = "this process stops";
    return answer;
  }

  static curl_socket_t open_socket(void* user, curlsocktype, curl_sockaddr* address) {
    auto& transfer = *static_cast<Transfer*>(user);
    if (transfer.may_connect != nullptr && !transfer.may_connect(address->addr)) {
      transfer.answer.refused = true;
      return CURL_SOCKET_BAD;
    }
    return ::socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
  }

  static std::size_t on_body(char* bytes, std::size_t, std::size_t count, void* user) {
    auto& [request, done, answer, may_connect, headers, full, problem] = *static_cast<Transfer*>(user);
    const std::size_t room = request.most_bytes - answer.body.size();
    answer.body.append(bytes, std::min(count, room));
    full = count > room;
    return full ? 0 : count;  // 0 ends the transfer
  }

  static std::size_t on_header(char* bytes, std::size_t, std::size_t count, void* user) {
    const std::string_view line(bytes, count);
    const auto colon = line.find(':');
    if (colon == line.npos) return count;
    std::string name(line.substr(0, colon));
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    static_cast<Transfer*>(user)->answer.headers[name] = trimmed(line.substr(colon + 1), " \t\r\n");
    return count;
  }

  void begin(std::unique_ptr<Transfer> transfer) {
    const Request& request = transfer->request;
    CURL* easy = curl_easy_init();
    for (const std::string& header : request.headers)
      transfer->headers = curl_slist_append(transfer->headers, header.c_str());
    transfer->headers = curl_slist_append(transfer->headers, "Expect:");  // sends the body without a pause
    const auto set = [&](CURLoption option, auto value) { curl_easy_setopt(easy, option, value); };
    set(CURLOPT_URL, request.url.c_str());
    set(CURLOPT_PATH_AS_IS, 1L);
    if (request.body) {
      set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request.body->size()));
      set(CURLOPT_POSTFIELDS, request.body->data());
    }
    if (request.method == "HEAD") {
      set(CURLOPT_NOBODY, 1L);
    } else if (request.method != (request.body ? "POST" : "GET")) {
      set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
    }
    set(CURLOPT_HTTPHEADER, transfer->headers);
    set(CURLOPT_WRITEFUNCTION, &on_body);
    set(CURLOPT_WRITEDATA, transfer.get());
    set(CURLOPT_HEADERFUNCTION, &on_header);
    set(CURLOPT_HEADERDATA, transfer.get());
    set(CURLOPT_OPENSOCKETFUNCTION, &open_socket);
    set(CURLOPT_OPENSOCKETDATA, transfer.get());
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_FOLLOWLOCATION, 0L);
    if (!request.proxy) set(CURLOPT_PROXY, "");
    if (!options_.ca_file.empty()) set(CURLOPT_CAINFO, options_.ca_file.c_str());
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_CONNECTTIMEOUT_MS, std::min<long>(kMostConnectMs, request.timeout.count()));
    set(CURLOPT_TIMEOUT_MS, std::max<long>(1, request.timeout.count()));
    if (request.idle.count() > 0) {
      set(CURLOPT_LOW_SPEED_LIMIT, 1L);
      set(CURLOPT_LOW_SPEED_TIME, std::max<long>(1, request.idle.count() / 1000));
    }
    set(CURLOPT_ERRORBUFFER, transfer->problem);
    set(CURLOPT_USERAGENT, "DiTFleet/" DITFLEET_VERSION);
    curl_multi_add_handle(multi_, easy);
    running_.emplace(easy, std::move(transfer));
  }

  void end(CURL* easy) {
    curl_multi_remove_handle(multi_, easy);
    auto transfer = std::move(running_.extract(easy).mapped());
    curl_easy_cleanup(easy);
    curl_slist_free_all(transfer->headers);
    transfer->done(std::move(transfer->answer));
  }

  void ended(CURL* easy, CURLcode result) {
    Transfer& transfer = *running_.at(easy);
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &transfer.answer.status);
    if (result != CURLE_OK && !transfer.full) {
      transfer.answer.status = 0;
      transfer.answer.error = transfer.problem[0] != '\0' ? transfer.problem : curl_easy_strerror(result);
    }
    end(easy);
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
      while (const CURLMsg* message = curl_multi_info_read(multi_, &left))
        if (message->msg == CURLMSG_DONE) ended(message->easy_handle, message->data.result);
      curl_multi_poll(multi_, nullptr, 0, kLongestPollMs, nullptr);
    }
    while (!running_.empty()) {
      running_.begin()->second->answer = stopped();
      end(running_.begin()->first);
    }
    for (auto& transfer : waiting_) transfer->done(stopped());
  }

  const Options options_;
  CURLM* multi_;
  std::mutex mutex_;
  bool stopping_ = false;                           // guarded by mutex_
  std::vector<std::unique_ptr<Transfer>> waiting_;  // guarded by mutex_ until stopping_
  std::map<CURL*, std::unique_ptr<Transfer>> running_;
  NamedThread thread_;
};

HttpClient::HttpClient(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {}
HttpClient::~HttpClient() = default;

asio::awaitable<HttpClient::Answer> HttpClient::send(Request request) {
  struct State {
    explicit State(const asio::any_io_executor& executor) : done(executor, asio::steady_timer::time_point::max()) {}
    asio::steady_timer done;  // touched on the caller's executor only
    Answer answer;
  };
  const asio::any_io_executor executor = co_await asio::this_coro::executor;
  auto state = std::make_shared<State>(executor);
  state->answer.error = "canceled";
  impl_->post(std::move(request), [state, executor](Answer answer) {
    asio::post(executor, [state, answer = std::move(answer)]() mutable {
      state->answer = std::move(answer);
      state->done.expires_at(asio::steady_timer::time_point::min());
    });
  });
  boost::system::error_code ignored;
  co_await state->done.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
  co_return std::move(state->answer);
}

}  // namespace ditfleet
