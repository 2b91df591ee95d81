#include "tests/history/network.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <charconv>
#include <cstring>

#include "shared/redis/transport.h"

namespace ditfleet::history {
namespace {

// RESP2. Arrays may contain errors.
void append(std::string& out, const Reply& reply) {
  switch (reply.type) {
    case Reply::Type::kNil: out += "$-1\r\n"; return;
    case Reply::Type::kString: out += "$" + std::to_string(reply.text.size()) + "\r\n" + reply.text + "\r\n"; return;
    case Reply::Type::kInteger: out += ":" + std::to_string(reply.integer) + "\r\n"; return;
    case Reply::Type::kStatus: out += "+" + reply.text + "\r\n"; return;
    case Reply::Type::kError: out += "-" + reply.text + "\r\n"; return;
    case Reply::Type::kArray:
      out += "*" + std::to_string(reply.elements.size()) + "\r\n";
      for (const auto& element : reply.elements) append(out, element);
      return;
  }
}

// Takes one command from the front of `bytes` at `at`. False: more bytes are needed.
bool parse(const std::string& bytes, std::size_t& at, Arguments& command) {
  std::size_t here = at;
  const auto number = [&](char kind, std::size_t& out) {
    const auto end = bytes.find("\r\n", here);
    if (end == std::string::npos || bytes[here] != kind) return false;
    std::from_chars(bytes.data() + here + 1, bytes.data() + end, out);
    here = end + 2;
    return true;
  };
  std::size_t count = 0;
  if (here >= bytes.size() || !number('*', count)) return false;
  command.clear();
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t size = 0;
    if (here >= bytes.size() || !number('$', size) || here + size + 2 > bytes.size()) return false;
    command.emplace_back(bytes.data() + here, size);
    here += size + 2;
  }
  at = here;
  return true;
}

Reply words(std::initializer_list<std::string_view> texts) {
  Reply out{.type = Reply::Type::kArray};
  for (const auto one : texts) out.elements.push_back({.type = Reply::Type::kString, .text = std::string(one)});
  return out;
}

}  // namespace

RedisServer*& the_server() {
  static RedisServer* server = nullptr;
  return server;
}

RedisServer::RedisServer(World& world)
    : world_(world), model_(std::make_unique<RedisModel>([this] { return clock_us(); })) {
  the_server() = this;
  model_->on_publish = [this](std::string_view channel, std::string_view message) {
    std::int64_t receivers = 0;
    for (const auto& link : links_) {
      if (!link->open || !link->channels.contains(std::string(channel))) continue;
      ++receivers;
      reply(link, words({"message", channel, message}));
    }
    return receivers;
  };
}

std::int64_t RedisServer::delay(const Process& process) {
  Network& network = networks_[&process];
  const std::int64_t way = world_.random().between(network.least_us, network.most_us);
  return std::max<std::int64_t>(way, network.held_until - world_.now());
}

std::shared_ptr<Link> RedisServer::connect(Process& process) {
  auto link = std::make_shared<Link>();
  link->process = &process;
  std::erase_if(links_, [](const auto& one) { return !one->open; });
  links_.push_back(link);
  return link;
}

void RedisServer::send(const std::shared_ptr<Link>& link, std::string bytes) {
  link->server_at = std::max(link->server_at, world_.now() + delay(*link->process));
  world_.at(link->server_at, [this, link, bytes = std::move(bytes)] {
    if (!link->open || link->silent) return;
    link->to_parse += bytes;
    receive(link);
  });
}

void RedisServer::receive(const std::shared_ptr<Link>& link) {
  if (stopped_until_ > world_.now()) {
    world_.at(stopped_until_, [this, link] { receive(link); });
    return;
  }
  std::size_t at = 0;
  Arguments command;
  // The command refers to the bytes, which execute() leaves alone.
  while (up_ && link->open && link->blocked.empty() && parse(link->to_parse, at, command)) execute(link, command);
  link->to_parse.erase(0, at);
}

void RedisServer::execute(const std::shared_ptr<Link>& link, const Arguments& command) {
  const std::string_view name = command[0];
  if (name == "HELLO" || name == "PING" || name == "AUTH" || name == "SELECT") {
    reply(link, {.type = Reply::Type::kStatus, .text = name == "PING" ? "PONG" : "OK"});
    return;
  }
  if (name == "SUBSCRIBE") {
    for (std::size_t i = 1; i < command.size(); ++i) {
      link->channels.emplace(command[i]);
      Reply confirmed = words({"subscribe", command[i]});
      confirmed.elements.push_back(
          {.type = Reply::Type::kInteger, .integer = static_cast<std::int64_t>(link->channels.size())});
      reply(link, confirmed);
    }
    return;
  }
  if (name == "WAIT") {
    keep();
    reply(link, {.type = Reply::Type::kInteger, .integer = 1});
    return;
  }
  if (name == "XREAD") {
    const auto block = std::find(command.begin(), command.end(), "BLOCK");
    auto pinned = model_->from_now(command);
    Reply found = model_->read_streams(Arguments(pinned.begin(), pinned.end()));
    if (!found.is_nil() || block == command.end()) {
      Arguments at_once(pinned.begin(), pinned.end());
      if (block != command.end()) {
        const auto first = at_once.begin() + (block - command.begin());
        at_once.erase(first, first + 2);
      }
      note(at_once, found);
      reply(link, found);
      return;
    }
    std::int64_t ms = 0;
    std::from_chars((block + 1)->data(), (block + 1)->data() + (block + 1)->size(), ms);
    link->blocked = std::move(pinned);
    link->block = ++blocks_;
    if (ms > 0) {
      world_.after(ms * kMs, [this, link, number = link->block] {
        if (!up_ || !link->open || link->block != number || link->blocked.empty()) return;
        link->blocked.clear();
        reply(link, {});
        receive(link);
      });
    }
    return;
  }
  const bool lose = networks_[link->process].replies_lost_until > world_.now() && world_.random().chance(30);
  const Reply answer = model_->run(command);
  note(command, answer);
  if (lose) {
    close(link);
  } else {
    reply(link, answer);
  }
  wake_blocked();
  if (after_command && name != "TIME" && name != "INFO") after_command();
}

void RedisServer::note(const Arguments& command, const Reply& answer) {
  if (!record || command[0] == "PUBLISH" || command[0] == "INFO") return;  // what they return is the server's own
  Reply words{.type = Reply::Type::kArray};
  for (const auto word : command) words.elements.push_back({.type = Reply::Type::kString, .text = std::string(word)});
  std::string out = std::to_string(clock_us()) + "\n";
  append(out, words);
  append(out, answer);
  std::fwrite(out.data(), 1, out.size(), record);
}

void RedisServer::wake_blocked() {
  for (std::size_t i = 0; i < links_.size(); ++i) {
    const auto link = links_[i];
    if (!link->open || link->blocked.empty()) continue;
    Reply found = model_->read_streams(Arguments(link->blocked.begin(), link->blocked.end()));
    if (found.is_nil()) continue;
    link->blocked.clear();
    reply(link, found);
    world_.after(0, [this, link] { receive(link); });
  }
}

void RedisServer::reply(const std::shared_ptr<Link>& link, const Reply& answer) {
  std::string bytes;
  append(bytes, answer);
  link->client_at = std::max(link->client_at, world_.now() + delay(*link->process));
  world_.at(link->client_at, [link, bytes = std::move(bytes)] {
    if (!link->open || link->silent) return;
    link->to_read += bytes;
    if (link->arrived) link->arrived();
  });
}

void RedisServer::leave(const std::shared_ptr<Link>& link) {
  link->arrived = nullptr;
  world_.at(link->server_at, [this, link] { close(link); });
}

void RedisServer::close(const std::shared_ptr<Link>& link) {
  if (!link->open) return;
  link->open = false;
  if (!link->silent && link->arrived) link->arrived();
}

void RedisServer::cut(const Process& process) {
  const auto links = links_;
  for (const auto& link : links)
    if (link->process == &process) close(link);
}
void RedisServer::end(const Process& process) {
  const bool sent = world_.random().chance(50);
  const auto links = links_;
  for (const auto& link : links) {
    if (link->process != &process) continue;
    if (sent) {
      leave(link);
    } else {
      close(link);
    }
  }
}
void RedisServer::silence(const Process& process) {
  for (const auto& link : links_)
    if (link->process == &process) link->silent = true;
}
void RedisServer::cut_all() {
  const auto links = links_;
  for (const auto& link : links) close(link);
}

void RedisServer::crash() {
  up_ = false;
  cut_all();
}
void RedisServer::start() {
  up_ = true;
  std::string& id = model_->run_id;  // of this start
  for (char& digit : id) digit = "0123456789abcdef"[world_.random().below(16)];
}
void RedisServer::keep() {
  kept_ = *model_;
  kept_->on_publish = nullptr;
  kept_at = world_.now();
}
void RedisServer::fail_over() {
  if (!kept_) return;
  const auto publish = model_->on_publish;
  const bool full = model_->out_of_memory;
  *model_ = *kept_;
  model_->on_publish = publish;
  model_->out_of_memory = full;
  cut_all();
  start();
  if (rolled_back) rolled_back();
}

// ---- what redis::Connection uses

namespace {

using boost::system::error_code;

class VirtualTransport final : public redis::Transport {
 public:
  explicit VirtualTransport(asio::any_io_executor executor) : executor_(std::move(executor)), wake_(executor_) {
    wake_.expires_at(asio::steady_timer::time_point::max());
  }
  ~VirtualTransport() override { close(); }

  asio::awaitable<error_code> open() override {
    RedisServer& server = *the_server();
    Process& process = *current_process();
    asio::steady_timer timer(executor_, std::chrono::microseconds(2 * server.delay(process)));
    error_code ignored;
    opening_ = &timer;
    co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (!closed_ && !server.network(process).reachable) {
      timer.expires_at(asio::steady_timer::time_point::max());
      co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
    opening_ = nullptr;
    if (closed_) co_return asio::error::operation_aborted;
    if (!server.up()) co_return asio::error::connection_refused;
    link_ = server.connect(process);
    link_->arrived = [this, &process] {
      wake_.cancel();
      process.wake();
    };
    co_return error_code();
  }

  asio::awaitable<std::pair<error_code, std::size_t>> read_some(asio::mutable_buffer buffer) override {
    error_code ignored;
    while (!closed_ && link_->to_read.empty() && link_->open)
      co_await wake_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (closed_) co_return std::pair(error_code(asio::error::operation_aborted), std::size_t(0));
    if (!link_->open) co_return std::pair(error_code(asio::error::eof), std::size_t(0));
    const std::size_t size = std::min(buffer.size(), link_->to_read.size());
    std::memcpy(buffer.data(), link_->to_read.data(), size);
    link_->to_read.erase(0, size);
    co_return std::pair(error_code(), size);
  }

  void write(asio::const_buffer buffer, std::function<void(error_code)> done) override {
    const bool open = link_ && link_->open;
    if (open) the_server()->send(link_, std::string(static_cast<const char*>(buffer.data()), buffer.size()));
    asio::post(executor_,
               [done = std::move(done), open] { done(open ? error_code() : error_code(asio::error::broken_pipe)); });
  }

  void close() override {
    if (std::exchange(closed_, true)) return;
    wake_.cancel();
    if (opening_ != nullptr) opening_->cancel();
    if (!link_) return;
    the_server()->leave(link_);
  }

 private:
  asio::any_io_executor executor_;
  asio::steady_timer wake_;
  asio::steady_timer* opening_ = nullptr;
  std::shared_ptr<Link> link_;
  bool closed_ = false;
};

}  // namespace
}  // namespace ditfleet::history

namespace ditfleet::redis {

std::unique_ptr<Transport> Transport::create(asio::any_io_executor executor, const Endpoint&) {
  return std::make_unique<history::VirtualTransport>(std::move(executor));
}

}  // namespace ditfleet::redis
