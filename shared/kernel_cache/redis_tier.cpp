#include "shared/kernel_cache/redis_tier.h"

#include <pthread.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/use_future.hpp>
#include <charconv>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/ids.h"
#include "shared/kernel_cache/codec.h"
#include "shared/kernel_cache/counters.h"
#include "shared/kernel_cache/secret.h"

namespace ditfleet::kernel_cache {
namespace {

namespace asio = boost::asio;
using redis::Command;
using redis::Reply;
using Replies = std::vector<Result<Reply>>;

constexpr std::string_view kPrefix = "df:{0}:kernel:1:";
constexpr std::string_view kIndex = "df:{0}:kernels";
// What stands under a key whose value is in chunks: "DFCHUNKS <id> <bytes>".
constexpr std::string_view kChunked = "DFCHUNKS ";

// Only of the holder's: the lock may have expired and be another's by now.
constexpr std::string_view kRenew =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0";
constexpr std::string_view kRelease =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

struct Chunks {
  std::string id;
  std::uint64_t bytes = 0;
  std::size_t count() const {
    return static_cast<std::size_t>((bytes + RedisTier::kChunkBytes - 1) / RedisTier::kChunkBytes);
  }
};

std::optional<Chunks> parse_chunks(std::string_view head) {
  if (!head.starts_with(kChunked) || head.size() > 64) return std::nullopt;
  head.remove_prefix(kChunked.size());
  const auto space = head.find(' ');
  if (space != 16) return std::nullopt;
  Chunks chunks{std::string(head.substr(0, space)), 0};
  const std::string_view digits = head.substr(space + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), chunks.bytes);
  if (error != std::errc() || end != digits.data() + digits.size() || chunks.bytes > kMaxValueBytes)
    return std::nullopt;
  return chunks;
}

// Errors that say something of the server or the way to it, not of one key or command: an ACL may forbid EVAL, ZADD or
// PEXPIRE, and what is left still shares programs.
bool is_failure(const Error& error) {
  if (error.code == Code::kPermissionDenied) return error.message.find("NOPERM") == std::string::npos;
  return error.code == Code::kUnavailable || error.code == Code::kDeadlineExceeded;
}

bool is_wrong_type(const Error& error) { return error.message.find("WRONGTYPE") != std::string::npos; }

Error left_out() { return unavailable("[kernel_cache] Redis has failed repeatedly and is left out for now"); }

std::int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// At most a chunk and a byte: what is longer is no value of ours, and is not fetched whole.
Command head_of(const std::string& name) {
  return std::move(Command("GETRANGE") << name << 0 << static_cast<std::int64_t>(RedisTier::kChunkBytes));
}

}  // namespace

class RedisTier::Impl {
 public:
  explicit Impl(RedisTierOptions options)
      : options_(std::move(options)),
        work_(asio::make_work_guard(io_)),
        connection_(redis::Connection::create(io_.get_executor(), {.endpoint = options_.endpoint,
                                                                   .connect_timeout = options_.timeout,
                                                                   .max_pending_bytes = std::size_t{256} << 20})),
        patience_(Deadline::after(options_.timeout)),
        breaker_({.slow = options_.timeout / 2, .probe_limit = options_.timeout * 4}) {
    asio::post(io_, [connection = connection_] { connection->start(); });
    thread_ = std::thread([this] {
      ::pthread_setname_np(::pthread_self(), "kernels-redis");
      io_.run();
    });
  }

  ~Impl() {
    asio::post(io_, [this] { connection_->stop(); });
    work_.reset();
    // What still waits (renewals of locks nobody released) is dropped: the locks expire.
    asio::post(io_, [this] { io_.stop(); });
    thread_.join();
  }

  std::string name_of(const Key& key, Name name) const {
    std::string text = std::string(kPrefix) + key.hex();
    return name == Name::kShared ? text : text + ":" + options_.secret_id;
  }
  std::string lock_of(const Key& key) const { return name_of(key, Name::kOwn) + ":lock"; }
  std::string chunk_of(const Key& key, const Chunks& chunks, std::size_t i) const {
    return name_of(key, Name::kShared) + ":chunk:" + chunks.id + ":" + std::to_string(i);
  }

  // One round trip. An Error is one of the server or the way to it; errors of single commands are in the replies.
  Result<Replies> exchange(std::vector<Command> commands) {
    std::optional<Breaker::Ticket> ticket;
    {
      const std::lock_guard lock(mutex_);
      ticket = breaker_.enter(Breaker::Clock::now());
      if (ticket && breaker_.state() == Breaker::State::kHalfOpen) show_breaker(0.5);
    }
    if (!ticket) return left_out();
    Replies replies = perform(std::move(commands), Deadline::after(options_.timeout));
    const auto failed = std::find_if(replies.begin(), replies.end(),
                                     [](const auto& reply) { return !reply && is_failure(reply.error()); });
    report(*ticket, failed == replies.end(), failed == replies.end() ? std::string() : failed->error().message);
    if (failed != replies.end()) return failed->error();
    return replies;
  }

  // The value whose head is `head`. Ends with the first chunk that is not what the head says: a head costs whoever
  // writes it 33 bytes, and must not cost every reader a command for each MiB that it claims.
  Result<std::optional<Value>> whole(const Key& key, std::string head) {
    if (head.empty()) return std::optional<Value>();
    const auto chunks = parse_chunks(head);
    if (!chunks) return std::optional<Value>(Value{std::move(head), {}});
    std::string bytes;
    while (bytes.size() < chunks->bytes) {
      std::vector<Command> one;
      one.push_back(head_of(chunk_of(key, *chunks, bytes.size() / kChunkBytes)));
      auto replies = exchange(std::move(one));
      if (!replies) return replies.error();
      const std::size_t wanted = std::min<std::uint64_t>(kChunkBytes, chunks->bytes - bytes.size());
      if (!replies->front() || replies->front()->text.size() != wanted)
        return std::optional<Value>(Value{{}, std::move(head)});
      bytes += replies->front()->text;
    }
    return std::optional<Value>(Value{std::move(bytes), std::move(head)});
  }

  // Of a reply to head_of().
  Result<std::optional<Value>> value_of(const Key& key, Result<Reply> reply) {
    if (!reply) {
      if (is_wrong_type(reply.error())) return std::optional<Value>(Value());
      return reply.error();
    }
    return whole(key, std::move(reply->text));
  }

  asio::awaitable<void> renew(std::shared_ptr<Lock> lock) {
    asio::steady_timer timer(io_);
    const auto pause = options_.lock / 4;
    std::weak_ptr<Lock> held = lock;
    lock.reset();  // who compiles may go away; so shall the lock then
    for (;;) {
      timer.expires_after(pause);
      co_await timer.async_wait(asio::use_awaitable);
      const auto still = held.lock();
      if (!still || still->over_) co_return;
      Command command("EVAL");
      command << kRenew << 1 << still->name_ << still->token_ << static_cast<std::int64_t>(options_.lock.count());
      (void)co_await connection_->execute(std::move(command), Deadline::after(pause * 2));
    }
  }

  const RedisTierOptions options_;
  asio::io_context io_;
  asio::executor_work_guard<asio::io_context::executor_type> work_;
  const std::shared_ptr<redis::Connection> connection_;
  const Deadline patience_;  // until then calls wait for the first connection
  mutable std::mutex mutex_;
  Breaker breaker_;  // under mutex_
  std::thread thread_;

 private:
  Replies perform(std::vector<Command> commands, Deadline deadline) {
    const std::size_t count = commands.size();
    auto running = asio::co_spawn(
        io_,
        [this, commands = std::move(commands), deadline]() mutable -> asio::awaitable<Replies> {
          if (!connection_->connected() && connection_->generation() == 0 && patience_.passed()) {
            co_return Replies(commands.size(),
                              unavailable("[kernel_cache] there is no connection to " + options_.endpoint.display()));
          }
          co_return co_await connection_->execute_all(std::move(commands), deadline);
        },
        asio::use_future);
    try {
      return running.get();
    } catch (const std::exception& e) {
      return Replies(count, unavailable(std::string("[kernel_cache] Redis: ") + e.what()));
    }
  }

  void report(const Breaker::Ticket& ticket, bool good, const std::string& why) {
    const std::lock_guard lock(mutex_);
    const auto before = breaker_.state();
    breaker_.leave(ticket, good, Breaker::Clock::now());
    const auto after = breaker_.state();
    if (before == after) return;
    if (after == Breaker::State::kOpen) count_breaker_opened();
    show_breaker(after == Breaker::State::kOpen ? 1 : 0);
    if (after == Breaker::State::kOpen && before == Breaker::State::kClosed) {
      spdlog::warn("kernel cache: Redis is left out for now, programs that it would have had are compiled here: {}",
                   why.empty() ? "it answers too slowly" : why);
    }
    if (after == Breaker::State::kClosed) spdlog::info("kernel cache: Redis answers again");
  }
};

RedisTier::RedisTier(RedisTierOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
RedisTier::~RedisTier() = default;

Result<std::optional<RedisTier::Value>> RedisTier::fetch(const Key& key, Name name) {
  std::vector<Command> commands;
  commands.push_back(head_of(impl_->name_of(key, name)));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  return impl_->value_of(key, std::move(replies->front()));
}

Result<std::optional<RedisTier::Value>> RedisTier::find(const Key& key, Name& name) {
  std::vector<Command> commands;
  commands.push_back(head_of(impl_->name_of(key, Name::kShared)));
  commands.push_back(std::move(Command("EXISTS") << impl_->name_of(key, Name::kOwn)));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  const bool beside = replies->at(0) && replies->at(0)->text.empty() && replies->at(1) && replies->at(1)->integer != 0;
  name = beside ? Name::kOwn : Name::kShared;
  return beside ? fetch(key, name) : impl_->value_of(key, std::move(replies->at(0)));
}

Result<RedisTier::Attempt> RedisTier::try_lock(const Key& key, Name name, std::string_view refused_head) {
  auto lock = std::make_shared<Lock>();
  lock->name_ = impl_->lock_of(key);
  lock->token_ = new_nonce();
  std::vector<Command> commands;
  commands.push_back(std::move(Command("SET") << lock->name_ << lock->token_ << "NX"
                                              << "PX" << static_cast<std::int64_t>(impl_->options_.lock.count())));
  commands.push_back(head_of(impl_->name_of(key, name)));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  if (!replies->at(0)) return replies->at(0).error();
  Attempt attempt;
  if (!replies->at(0)->is_nil()) {
    attempt.lock = lock;
    asio::co_spawn(impl_->io_, impl_->renew(lock), asio::detached);
  }
  if (!attempt.lock && !refused_head.empty() && replies->at(1) && replies->at(1)->text == refused_head) return attempt;
  auto value = impl_->value_of(key, std::move(replies->at(1)));
  if (!value) return value.error();
  attempt.value = std::move(*value);
  return attempt;
}

void RedisTier::release(const std::shared_ptr<Lock>& lock) {
  if (!lock || lock->over_.exchange(true)) return;
  std::vector<Command> commands;
  commands.push_back(std::move(Command("EVAL") << kRelease << 1 << lock->name_ << lock->token_));
  (void)impl_->exchange(std::move(commands));  // else it expires
}

Result<RedisTier::Stored> RedisTier::store(const Key& key, Name name, std::string_view bytes, bool replace) {
  const std::string place = impl_->name_of(key, name);
  const auto ttl = static_cast<std::int64_t>(impl_->options_.ttl.count());
  const auto run = [&](std::vector<Command> commands) -> Result<Reply> {
    auto replies = impl_->exchange(std::move(commands));
    if (!replies) return replies.error();
    return std::move(replies->front());  // what may follow, the index, is for listing alone
  };
  const auto one = [](Command command) {
    std::vector<Command> list;
    list.push_back(std::move(command));
    return list;
  };

  std::string head(bytes);
  if (bytes.size() > kChunkBytes) {
    if (!replace) {
      auto there = run(one(std::move(Command("EXISTS") << place)));
      if (!there) return there.error();
      if (there->integer != 0) return Stored::kAlready;
    }
    const Chunks chunks{sha256_hex(bytes).substr(0, 16), bytes.size()};
    for (std::size_t i = 0; i < chunks.count(); ++i) {
      auto set = run(one(std::move(Command("SET") << impl_->chunk_of(key, chunks, i)
                                                  << bytes.substr(i * kChunkBytes, kChunkBytes) << "PX" << ttl)));
      if (!set) return set.error();
    }
    head = std::string(kChunked) + chunks.id + " " + std::to_string(bytes.size());
  }
  Command set("SET");
  set << place << head << "PX" << ttl;
  if (!replace) set << "NX";
  std::vector<Command> commands;
  commands.push_back(std::move(set));
  commands.push_back(std::move(Command("ZADD") << kIndex << now_ms() << place.substr(kPrefix.size())));
  // What was stored and not used for longer than a value lives has expired.
  commands.push_back(std::move(Command("ZREMRANGEBYSCORE") << kIndex << "-inf" << now_ms() - ttl));
  auto stored = run(std::move(commands));
  if (!stored) return stored.error();
  return stored->is_nil() ? Stored::kAlready : Stored::kNow;
}

Result<RedisTier::There> RedisTier::refresh(const Key& key, Name name) {
  const std::string place = impl_->name_of(key, name);
  const auto ttl = static_cast<std::int64_t>(impl_->options_.ttl.count());
  const auto first_of = [&](const std::string& what) -> Result<std::string> {
    std::vector<Command> one;
    one.push_back(std::move(Command("GETRANGE") << what << 0 << 63));
    auto replies = impl_->exchange(std::move(one));
    if (!replies) return replies.error();
    if (!replies->front()) return replies->front().error();
    return std::move(replies->front()->text);
  };
  auto first = first_of(place);
  if (!first) return is_wrong_type(first.error()) ? Result<There>(There::kAValue) : Result<There>(first.error());
  if (first->empty()) return There::kNothing;
  const auto chunks = parse_chunks(*first);
  if (chunks) first = first_of(impl_->chunk_of(key, *chunks, 0));
  const auto signer = first ? claimed_signer(*first) : std::nullopt;
  if (signer && *signer != 0 && Secret::id_text(*signer) != impl_->options_.secret_id) return There::kOfAnotherSecret;
  std::vector<Command> commands;
  commands.push_back(std::move(Command("PEXPIRE") << place << ttl));
  commands.push_back(std::move(Command("ZADD") << kIndex << "XX" << now_ms() << place.substr(kPrefix.size())));
  for (std::size_t i = 0; chunks && i < chunks->count(); ++i)
    commands.push_back(std::move(Command("PEXPIRE") << impl_->chunk_of(key, *chunks, i) << ttl));
  (void)impl_->exchange(std::move(commands));  // else it expires sooner
  return There::kAValue;
}

Result<std::vector<RedisTier::Listed>> RedisTier::list() {
  std::vector<Command> commands;
  commands.push_back(std::move(Command("ZRANGE") << kIndex << 0 << -1 << "WITHSCORES"));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  if (!replies->front()) return replies->front().error();
  const auto& members = replies->front()->elements;
  std::vector<Listed> found;
  for (std::size_t i = 0; i + 1 < members.size(); i += 2) {
    const std::string& member = members[i].text;
    const auto key = Key::from_hex(std::string_view(member).substr(0, 64));
    const bool own = member.size() > 64 && std::string_view(member).substr(64) == ":" + impl_->options_.secret_id;
    if (!key || (member.size() > 64 && !own)) continue;
    Listed listed{*key, own ? Name::kOwn : Name::kShared, 0};
    (void)std::from_chars(members[i + 1].text.data(), members[i + 1].text.data() + members[i + 1].text.size(),
                          listed.used_ms);
    commands.clear();
    commands.push_back(std::move(Command("EXISTS") << impl_->name_of(*key, listed.name)));
    auto exists = impl_->exchange(std::move(commands));
    if (!exists) return exists.error();
    if (!exists->front()) return exists->front().error();
    if (exists->front()->integer != 0) {
      found.push_back(std::move(listed));
    } else {
      commands.clear();
      commands.push_back(std::move(Command("ZREM") << kIndex << member));
      (void)impl_->exchange(std::move(commands));
    }
  }
  return found;
}

Result<bool> RedisTier::remove(const Key& key, Name name) {
  const std::string place = impl_->name_of(key, name);
  std::vector<Command> commands;
  commands.push_back(std::move(Command("GETRANGE") << place << 0 << 63));
  auto head = impl_->exchange(std::move(commands));
  if (!head) return head.error();
  commands.clear();
  Command unlink("UNLINK");
  unlink << place;
  if (head->front()) {
    if (const auto chunks = parse_chunks(head->front()->text)) {
      for (std::size_t i = 0; i < chunks->count(); ++i) unlink << impl_->chunk_of(key, *chunks, i);
    }
  }
  commands.push_back(std::move(unlink));
  commands.push_back(std::move(Command("ZREM") << kIndex << place.substr(kPrefix.size())));
  auto replies = impl_->exchange(std::move(commands));
  if (!replies) return replies.error();
  if (!replies->front()) return replies->front().error();
  return replies->front()->integer > 0;
}

Breaker::State RedisTier::breaker_state() const {
  const std::lock_guard lock(impl_->mutex_);
  return impl_->breaker_.state();
}

}  // namespace ditfleet::kernel_cache
