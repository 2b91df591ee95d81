#include "shared/redis/session.h"

#include <algorithm>
#include <utility>

#include "shared/core/text.h"
#include "shared/redis/info.h"

namespace ditfleet::redis {
namespace {

Error no_answer(Code code, std::string message) {
  return {.code = code, .message = std::move(message), .source = Source::kRedisConnection};
}

}  // namespace

Session::Session(const ConnectionOptions& options, std::function<double()> jitter)
    : options_(options),
      jitter_(std::move(jitter)),
      last_error_(no_answer(Code::kUnavailable, "[redis] not connected to " + options.endpoint.display() + " yet")) {}

Step Session::start() {
  if (phase_ == Phase::kStopped) return {Step::Do::kEnd};
  phase_ = Phase::kConnecting;
  return {Step::Do::kConnect};
}

// AUTH and SELECT as configured, PING, which a Redis that is still loading its file answers with LOADING, and HELLO,
// whose reply contains the role.
std::string Session::greeting() {
  std::string out;
  greetings_left_ = 0;
  const auto add = [&](const Command& command) {
    command.append_to(out);
    ++greetings_left_;
  };
  const Endpoint& endpoint = options_.endpoint;
  if (!endpoint.password.empty()) {
    Command auth("AUTH");
    if (!endpoint.user.empty()) auth << endpoint.user;
    auth << endpoint.password;
    add(auth);
  }
  if (endpoint.db != 0) add(Command("SELECT") << endpoint.db);
  add(Command("PING"));
  add(Command("HELLO") << 2);
  return out;
}

Step Session::connected() {
  if (phase_ == Phase::kStopped) return {Step::Do::kEnd};
  reader_ = std::make_unique<ReplyReader>();
  phase_ = Phase::kGreeting;
  out_ = greeting();
  return {Step::Do::kRead};
}

Step Session::connect_failed(const std::string& why) {
  if (phase_ == Phase::kStopped) return {Step::Do::kEnd};
  last_error_ = no_answer(Code::kUnavailable, "[redis] cannot connect to " + options_.endpoint.display() + ": " + why);
  return retry_later();
}

Step Session::retry_later() {
  // Before the first connection callers wait: Redis may still be starting. Later, or if Redis refuses the log-in, their
  // requests fail.
  if (generation_ > 0 || last_error_.code == Code::kPermissionDenied) fail(waiting_, last_error_);
  phase_ = Phase::kWaiting;
  out_.clear();
  auto delay = options_.backoff_first * (1u << std::min(failures_, 16));
  delay = std::min<std::chrono::milliseconds>(delay, options_.backoff_max);
  ++failures_;
  // Between half and all of it, so that many clients do not reconnect at the same time.
  const auto jittered =
      std::chrono::milliseconds(static_cast<long>(static_cast<double>(delay.count()) * (0.5 + 0.5 * jitter_())));
  return {Step::Do::kWait, jittered};
}

Step Session::waited() { return start(); }

void Session::become_ready() {
  phase_ = Phase::kReady;
  ++generation_;
  failures_ = 0;
  silent_timeouts_ = 0;
  for (Request& request : waiting_) {
    out_ += request.wire;
    request.wire.clear();
    in_flight_.push_back(std::move(request));
  }
  waiting_.clear();
  waiting_bytes_ = 0;
}

Error Session::read_only() const {
  return no_answer(Code::kUnavailable, "[redis] " + options_.endpoint.display() +
                                           (options_.endpoint.sentinels.empty()
                                                ? " is a read-only replica; redis.url must name the primary"
                                                : " leads to a read-only replica; a failover may not be over yet"));
}

Error Session::clustered() const {
  return no_answer(
      Code::kUnavailable,
      "[redis] " + options_.endpoint.display() +
          " is a node of a Redis Cluster with several shards, but DiTFleet needs one server with all keys; "
          "use a single Redis, with replicas and Sentinel (redis+sentinel://) if it must be available");
}

Step Session::greeted(const Reply& reply) {
  const bool hello = greetings_left_ == 1;  // a proxy may not know it
  if (reply.type == Reply::Type::kError && !hello) {
    last_error_ = error_of_reply(reply.text);
    if (last_error_.code == Code::kInternal) last_error_.code = Code::kUnavailable;
    last_error_.message += " (from " + options_.endpoint.display() + ")";
    return {Step::Do::kClose};
  }
  for (std::size_t i = 0; hello && i + 1 < reply.elements.size(); i += 2) {
    const std::string &name = reply.elements[i].text, &value = reply.elements[i + 1].text;
    if (name == "role" && value != "master") {
      last_error_ = read_only();
      return {Step::Do::kClose};
    }
    if (name == "mode" && value == "cluster") {  // a cluster of one shard has all keys
      (Command("CLUSTER") << "INFO").append_to(out_);
      ++greetings_left_;
    }
  }
  if (number_of(info_value(reply.text, "cluster_size"), 2, 1'000'000)) {
    last_error_ = clustered();
    return {Step::Do::kClose};
  }
  if (--greetings_left_ == 0) become_ready();
  return {Step::Do::kRead};
}

Step Session::received(std::string_view bytes) {
  if (phase_ == Phase::kStopped) return {Step::Do::kEnd};
  silent_timeouts_ = 0;
  reader_->feed(bytes);
  for (;;) {
    auto next = reader_->next();
    if (!next) {
      last_error_ = no_answer(Code::kUnavailable, next.error().message);
      return {Step::Do::kClose};
    }
    if (!next->has_value()) return {Step::Do::kRead};
    if (phase_ == Phase::kGreeting) {
      const Step step = greeted(**next);
      if (step.what == Step::Do::kClose) return step;
    } else {
      const bool refused = (*next)->type == Reply::Type::kError;
      const bool demoted = refused && (*next)->text.starts_with("READONLY");
      const bool moved = refused && (*next)->text.starts_with("MOVED ");
      take_reply(std::move(**next));
      if (demoted || moved) {
        last_error_ = demoted ? read_only() : clustered();
        return {Step::Do::kClose};
      }
    }
  }
}

void Session::take_reply(Reply reply) {
  const bool message = pushes_wanted_ && reply.is_array() && reply.elements.size() >= 3 &&
                       (reply.elements[0].text == "message" || reply.elements[0].text == "pmessage");
  if (message || in_flight_.empty()) {
    if (pushes_wanted_) pushes_.push_back(std::move(reply));
    return;
  }
  Request& request = in_flight_.front();
  if (reply.type == Reply::Type::kError) {
    Error error = error_of_reply(reply.text);
    if (error.kind == "NOPERM") {
      const std::string& user = options_.endpoint.user;
      error.message += "; `ditfleet redis acl` prints the permissions that the user '" +
                       (user.empty() ? "default" : user) + "' of " + options_.endpoint.display() + " needs";
    }
    request.replies.emplace_back(std::move(error));
  } else {
    request.replies.emplace_back(std::move(reply));
  }
  if (request.replies.size() == request.commands) {
    if (!request.abandoned) done_.push_back({request.id, std::move(request.replies)});
    in_flight_.pop_front();
  }
}

Step Session::disconnected(const std::string& why) {
  if (phase_ == Phase::kStopped) return {Step::Do::kEnd};
  last_error_ =
      no_answer(Code::kUnavailable, "[redis] lost the connection to " + options_.endpoint.display() + ": " + why);
  return closed();
}

Step Session::closed() {
  if (phase_ == Phase::kStopped) return {Step::Do::kEnd};
  // Sent requests are not sent again: they may have run.
  fail(in_flight_, last_error_);
  const bool was_ready = phase_ == Phase::kReady;
  if (was_ready) {  // reconnects at once; only failures back off
    out_.clear();
    phase_ = Phase::kWaiting;
    return {Step::Do::kWait, std::chrono::milliseconds(0)};
  }
  return retry_later();
}

Step Session::stop() {
  phase_ = Phase::kStopped;
  last_error_ = no_answer(Code::kUnavailable, "[redis] the connection was stopped");
  fail(in_flight_, last_error_);
  fail(waiting_, last_error_);
  out_.clear();
  return {Step::Do::kEnd};
}

void Session::fail(std::deque<Request>& requests, const Error& error) {
  for (Request& request : requests) {
    if (request.abandoned) continue;
    while (request.replies.size() < request.commands) request.replies.emplace_back(error);
    done_.push_back({request.id, std::move(request.replies)});
  }
  if (&requests == &waiting_) waiting_bytes_ = 0;
  requests.clear();
}

Result<Session::Id> Session::submit(const std::vector<Command>& commands) {
  if (phase_ == Phase::kStopped) return last_error_;
  if (out_.size() + waiting_bytes_ > options_.max_pending_bytes) {
    return no_answer(Code::kUnavailable, "[redis] " + std::to_string(out_.size() + waiting_bytes_) +
                                             " bytes wait to be sent to " + options_.endpoint.display() +
                                             "; Redis is too slow or unavailable");
  }
  Request request;
  request.id = next_id_++;
  request.commands = commands.size();
  request.replies.reserve(commands.size());
  std::string& wire = ready() ? out_ : request.wire;
  for (const Command& command : commands) command.append_to(wire);
  const Id id = request.id;
  if (ready()) {
    in_flight_.push_back(std::move(request));
  } else {
    waiting_bytes_ += request.wire.size();
    waiting_.push_back(std::move(request));
  }
  return id;
}

Error Session::abandon(Id id) {
  const auto same = [id](const Request& request) { return request.id == id; };
  if (const auto it = std::find_if(waiting_.begin(), waiting_.end(), same); it != waiting_.end()) {
    waiting_bytes_ -= it->wire.size();
    waiting_.erase(it);
    Error error = last_error_;
    error.code = Code::kUnavailable;
    return error;
  }
  if (const auto it = std::find_if(in_flight_.begin(), in_flight_.end(), same); it != in_flight_.end()) {
    it->abandoned = true;
    ++silent_timeouts_;
  }
  return no_answer(Code::kDeadlineExceeded, "[redis] no reply from " + options_.endpoint.display() + " in time");
}

std::string Session::take_output(std::string spare) {
  constexpr std::size_t kWorthKeeping = 1 << 20;
  if (spare.capacity() > kWorthKeeping) spare = {};
  spare.clear();
  return std::exchange(out_, std::move(spare));
}
std::vector<Session::Done> Session::take_done() { return std::exchange(done_, {}); }
std::vector<Reply> Session::take_pushes() { return std::exchange(pushes_, {}); }

}  // namespace ditfleet::redis
