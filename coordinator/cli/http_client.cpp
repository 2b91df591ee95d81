#include "coordinator/cli/http_client.h"

#include <curl/curl.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

#include "coordinator/cli/json_fields.h"
#include "shared/core/unique_fd.h"

namespace ditfleet::cli {
namespace {

volatile std::sig_atomic_t interrupt_flag = 0;
struct sigaction previous_action {};
void on_interrupt(int) { interrupt_flag = 1; }

constexpr std::size_t kMaxBodyBytes = std::size_t{1} << 30;

std::size_t append_body(char* bytes, std::size_t, std::size_t count, void* into) {
  auto& body = *static_cast<std::string*>(into);
  if (body.size() + count > kMaxBodyBytes) return 0;
  body.append(bytes, count);
  return count;
}

struct Sent {
  std::string_view head;
  int file;
};

// Reads the head, then the file, of the Sent that `from` points to.
std::size_t read_file_bytes(char* bytes, std::size_t size, std::size_t count, void* from) {
  Sent& sent = *static_cast<Sent*>(from);
  if (!sent.head.empty()) {
    const std::size_t n = sent.head.copy(bytes, size * count);
    sent.head.remove_prefix(n);
    return n;
  }
  const ssize_t n = ::read(sent.file, bytes, size * count);
  return n < 0 ? CURL_READFUNC_ABORT : static_cast<std::size_t>(n);
}

int stop_if_interrupted(void*, curl_off_t, curl_off_t, curl_off_t, curl_off_t) { return interrupt_flag != 0 ? 1 : 0; }

// The URL without user and password, for messages.
std::string shown(const std::string& url) {
  const auto scheme = url.find("://");
  const auto host = scheme == std::string::npos ? 0 : scheme + 3;
  const auto at = url.substr(0, url.find_first_of("/?#", host)).rfind('@');
  return at == std::string::npos || at < host ? url : url.substr(0, host) + "…@" + url.substr(at + 1);
}

}  // namespace

InterruptGuard::InterruptGuard() {
  interrupt_flag = 0;
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  ::sigaction(SIGINT, &action, &previous_action);
}
InterruptGuard::~InterruptGuard() { ::sigaction(SIGINT, &previous_action, nullptr); }
bool InterruptGuard::interrupted() { return interrupt_flag != 0; }
void InterruptGuard::clear() { interrupt_flag = 0; }

struct HttpClient::Handle {
  CURL* curl = curl_easy_init();
  curl_slist* headers = nullptr;
  ~Handle() {
    curl_slist_free_all(headers);
    curl_easy_cleanup(curl);
  }
  void add_header(const std::string& header) { headers = curl_slist_append(headers, header.c_str()); }

  // Resets the handle but keeps its connection.
  void prepare(const Target& target, const std::string& path) {
    curl_easy_reset(curl);
    curl_slist_free_all(headers);
    headers = nullptr;
    const bool whole = path.starts_with("http://") || path.starts_with("https://");
    const std::string base = target.url.ends_with('/') ? target.url.substr(0, target.url.size() - 1) : target.url;
    curl_easy_setopt(curl, CURLOPT_URL, (whole ? path : base + path).c_str());
    curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, "http,https");
    if (!target.ca_file.empty()) curl_easy_setopt(curl, CURLOPT_CAINFO, target.ca_file.c_str());
    curl_easy_setopt(curl, CURLOPT_SSL_VERIFYPEER, target.verify ? 1L : 0L);
    curl_easy_setopt(curl, CURLOPT_SSL_VERIFYHOST, target.verify ? 2L : 0L);
    curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, 10'000L);
    curl_easy_setopt(curl, CURLOPT_USERAGENT, "ditfleet");
    curl_easy_setopt(curl, CURLOPT_NOPROGRESS, 0L);
    curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, stop_if_interrupted);
    // The key must not reach another host that a result's URL may name.
    if (!target.key.empty() && (!whole || path.starts_with(base + "/")))
      add_header("Authorization: Bearer " + target.key);
    add_header("Expect:");
  }

  // Returns the status too if the transfer failed after it arrived.
  CURLcode perform(long& status) const {
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    const CURLcode code = curl_easy_perform(curl);
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    return code;
  }

  Error failure(CURLcode code, const Target& target) const {
    if (code == CURLE_ABORTED_BY_CALLBACK) return {Code::kCanceled, "interrupted", {}};
    if (code == CURLE_OPERATION_TIMEDOUT)
      return {Code::kDeadlineExceeded, shown(target.url) + " did not answer in time", {}};
    if (code == CURLE_URL_MALFORMAT || code == CURLE_UNSUPPORTED_PROTOCOL) {
      return invalid_argument("--url is '" + shown(target.url) + "'; it must be a URL such as http://127.0.0.1:8780");
    }
    const std::string hint =
        code == CURLE_COULDNT_CONNECT            ? "; is the service running (ditfleet up), and is --url right?"
        : code == CURLE_PEER_FAILED_VERIFICATION ? "; give the CA of its certificate with --ca-file"
                                                 : "";
    return unavailable("cannot reach " + shown(target.url) + ": " + curl_easy_strerror(code) + hint);
  }
};

HttpClient::HttpClient(const Target& target) : handle_(std::make_unique<Handle>()), target_(target) {}
HttpClient::~HttpClient() = default;

Error error_of(const HttpResponse& response, const std::string& what) {
  std::string message = what + ": HTTP status " + std::to_string(response.status), param;
  if (const auto body = parse_json(response.body)) {
    const json::value& error = field(*body, "error");
    if (field(error, "message").is_string()) message = text(error, "message");
    param = text(error, "param");
  }
  return {code_from_http_status(static_cast<int>(response.status)), message, param};
}

std::string percent_encoded(const std::string& text) {
  const std::unique_ptr<char, decltype(&curl_free)> encoded(
      curl_easy_escape(nullptr, text.c_str(), static_cast<int>(text.size())), curl_free);
  return encoded ? encoded.get() : "";
}

Result<HttpResponse> HttpClient::request(const std::string& method, const std::string& path, const std::string& body,
                                         std::chrono::milliseconds timeout, const std::vector<std::string>& headers) {
  HttpResponse response;
  CURL* curl = handle_->curl;
  handle_->prepare(target_, path);
  curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, method.c_str());
  curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, static_cast<long>(timeout.count()));
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, append_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &response.body);
  if (!body.empty()) {
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
    curl_easy_setopt(curl, CURLOPT_COPYPOSTFIELDS, body.c_str());
    handle_->add_header("Content-Type: application/json");
  }
  for (const std::string& header : headers) handle_->add_header(header);
  if (const CURLcode code = handle_->perform(response.status); code != CURLE_OK) return handle_->failure(code, target_);
  const char* type = nullptr;
  curl_easy_getinfo(curl, CURLINFO_CONTENT_TYPE, &type);
  if (type) response.content_type = type;
  return response;
}

Result<json::value> HttpClient::json(const std::string& method, const std::string& path, const std::string& body,
                                     const std::vector<std::string>& headers) {
  auto response = request(method, path, body, std::chrono::seconds(30), headers);
  if (!response) return response.error();
  return json_of(*response, method, path);
}

Result<json::value> HttpClient::json_of(const HttpResponse& response, const std::string& method,
                                        const std::string& path) const {
  if (response.status >= 400) return error_of(response, method + " " + path);
  auto value = parse_json(response.body);
  if (!value)
    return Error{Code::kDataCorrupt, target_.url + path + " did not return JSON; is --url a DiTFleet gateway?", {}};
  return std::move(*value);
}

Result<json::value> HttpClient::send_file(const std::string& method, const std::string& path, const std::string& file,
                                          const std::vector<std::string>& headers, const Head& head) {
  const auto failed = [&](int e) {
    return Error{
        e == ENOENT ? Code::kNotFound : Code::kUnavailable, "cannot read '" + file + "': " + std::strerror(e), {}};
  };
  const UniqueFd in(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // opening a FIFO must not block
  if (!in.valid()) return failed(errno);
  struct stat info {};
  if (::fstat(in.get(), &info) != 0) return failed(errno);
  if (S_ISDIR(info.st_mode)) return failed(EISDIR);
  if (!S_ISREG(info.st_mode))
    return invalid_argument("'" + file + "' is not a regular file; its size must be known before the upload");
  HttpResponse response;
  CURL* curl = handle_->curl;
  handle_->prepare(target_, path);
  curl_easy_setopt(curl, CURLOPT_UPLOAD, 1L);
  curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, method.c_str());
  if (::lseek(in.get(), static_cast<off_t>(head.skip), SEEK_SET) < 0) return failed(errno);
  Sent sent{head.bytes, in.get()};
  curl_easy_setopt(curl, CURLOPT_READFUNCTION, read_file_bytes);
  curl_easy_setopt(curl, CURLOPT_READDATA, &sent);
  curl_easy_setopt(curl, CURLOPT_INFILESIZE_LARGE,
                   static_cast<curl_off_t>(head.bytes.size()) + info.st_size - static_cast<curl_off_t>(head.skip));
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_LIMIT, 1L);
  curl_easy_setopt(curl, CURLOPT_LOW_SPEED_TIME, 60L);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, append_body);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &response.body);
  handle_->add_header("Content-Type: application/octet-stream");
  for (const std::string& header : headers) handle_->add_header(header);
  const CURLcode code = handle_->perform(response.status);
  // A service may refuse the request before all of the file is sent.
  if (code != CURLE_OK && response.status < 400) return handle_->failure(code, target_);
  return json_of(response, method, path);
}

namespace {

struct Stream {
  CURL* curl;
  const std::function<HttpClient::Next(const ServerEvent&)>& on_event;
  std::string& last_id;
  std::chrono::milliseconds silence;
  std::chrono::steady_clock::time_point last = std::chrono::steady_clock::now();
  SseParser parser = {};
  std::string error_body = {};
  bool stopped = false, silent = false;
};

std::size_t on_stream_bytes(char* bytes, std::size_t, std::size_t count, void* into) {
  auto& stream = *static_cast<Stream*>(into);
  long status = 0;
  curl_easy_getinfo(stream.curl, CURLINFO_RESPONSE_CODE, &status);
  if (status >= 400) {
    stream.error_body.append(bytes, count);
    return count;
  }
  stream.parser.feed({bytes, count}, [&](const ServerEvent& event) {
    if (stream.stopped) return;
    stream.last = std::chrono::steady_clock::now();
    stream.last_id = event.id;
    stream.stopped = stream.on_event(event) == HttpClient::Next::kStop;
  });
  return stream.stopped ? 0 : count;
}

int on_stream_tick(void* from, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  auto& stream = *static_cast<Stream*>(from);
  if (stream.silence.count() > 0 && std::chrono::steady_clock::now() - stream.last > stream.silence)
    stream.silent = true;
  return stream.silent || interrupt_flag != 0 ? 1 : 0;
}

}  // namespace

Result<void> HttpClient::events(const std::string& path, std::string& last_event_id, std::chrono::milliseconds silence,
                                const std::function<Next(const ServerEvent&)>& on_event) {
  CURL* curl = handle_->curl;
  Stream stream{.curl = curl, .on_event = on_event, .last_id = last_event_id, .silence = silence};
  handle_->prepare(target_, path);
  handle_->add_header("Accept: text/event-stream");
  if (!last_event_id.empty()) handle_->add_header("Last-Event-ID: " + last_event_id);
  curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_stream_bytes);
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &stream);
  curl_easy_setopt(curl, CURLOPT_XFERINFOFUNCTION, on_stream_tick);
  curl_easy_setopt(curl, CURLOPT_XFERINFODATA, &stream);
  long status = 0;
  const CURLcode code = handle_->perform(status);
  if (stream.stopped || stream.silent) return {};
  if (code != CURLE_OK) return handle_->failure(code, target_);
  if (status >= 400) return error_of({status, {}, stream.error_body}, "GET " + path);
  return {};
}

}  // namespace ditfleet::cli
