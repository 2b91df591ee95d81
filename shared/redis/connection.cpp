// Performs the steps of a Session.
#include "shared/redis/connection.h"

#include <spdlog/spdlog.h>

#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <unordered_map>

#include "shared/core/ids.h"
#include "shared/core/task_group.h"
#include "shared/redis/sentinel.h"
#include "shared/redis/session.h"
#include "shared/redis/transport.h"

namespace ditfleet::redis {
namespace {

using boost::system::error_code;

constexpr std::chrono::seconds kAskSentinels{2};

// One execute(): its timer is its deadline, and is canceled when the replies are there.
struct Waiter {
  Waiter(const asio::any_io_executor& executor, Deadline deadline) : timer(executor, deadline.time_point()) {}
  asio::steady_timer timer;
  bool done = false;
  std::vector<Result<Reply>> replies;
};

}  // namespace

// Shared with its handlers, which may outlive the Connection.
class Connection::Impl : public std::enable_shared_from_this<Connection::Impl> {
 public:
  Impl(asio::any_io_executor executor, ConnectionOptions options)
      : executor_(executor),
        options_(std::move(options)),
        session_(options_, random_fraction),
        alarm_(executor_),
        greeting_limit_(executor_),
        next_question_(executor_) {}

  void start() {
    if (started_) return;
    started_ = true;
    asio::co_spawn(executor_, run(shared_from_this()), end_process_on_exception("Redis connection"));
    if (!options_.endpoint.sentinels.empty())
      asio::co_spawn(executor_, watch(shared_from_this()), end_process_on_exception("Redis sentinels"));
  }

  void stop() {
    if (session_.stopped()) return;
    session_.stop();
    if (transport_) transport_->close();
    alarm_.cancel();
    greeting_limit_.cancel();
    next_question_.cancel();
    deliver();
  }

  asio::awaitable<std::vector<Result<Reply>>> execute_all(std::vector<Command> commands, Deadline deadline) {
    const std::size_t count = commands.size();
    if (count == 0) co_return std::vector<Result<Reply>>();
    auto submitted = session_.submit(commands);
    if (!submitted) co_return std::vector<Result<Reply>>(count, submitted.error());
    auto waiter = std::make_shared<Waiter>(executor_, deadline);
    waiters_.emplace(*submitted, waiter);
    flush();
    auto self = shared_from_this();
    error_code ignored;
    if (!waiter->done) co_await waiter->timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    if (waiter->done) co_return std::move(waiter->replies);
    waiters_.erase(*submitted);
    Error error = session_.abandon(*submitted);
    const auto cancellation = co_await asio::this_coro::cancellation_state;
    if (cancellation.cancelled() != asio::cancellation_type::none) {
      error = {
          .code = Code::kCanceled, .message = "[redis] the caller was canceled", .source = Source::kRedisConnection};
    } else if (session_.looks_dead()) {
      drop("it does not reply");
    }
    co_return std::vector<Result<Reply>>(count, error);
  }

  void drop(std::string why) {
    if (!session_.ready()) return;
    drop_reason_ = std::move(why);
    transport_->close();  // its read ends, and run() reconnects
  }

  asio::any_io_executor executor_;
  ConnectionOptions options_;
  Session session_;
  std::function<void(Reply)> push_handler_;

 private:
  static asio::awaitable<void> run(std::shared_ptr<Impl> self) { co_await self->loop(); }

  // Leaves a server that is no longer the master. Such a server may still reply, or hang and keep the connection.
  static asio::awaitable<void> watch(std::shared_ptr<Impl> self) {
    while (!self->session_.stopped()) {
      self->next_question_.expires_after(kAskSentinels);
      error_code ignored;
      co_await self->next_question_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
      if (!self->session_.ready()) continue;
      const auto epoch = self->epoch_;
      const auto master = co_await find_master(self->executor_, self->options_.endpoint, self->sentinel_);
      if (!master || epoch != self->epoch_) continue;
      if (master->host == self->server_.host && master->port == self->server_.port) continue;
      self->drop("its sentinels name " + master->display() + " as the new master");
    }
  }

  asio::awaitable<void> loop() {
    Step step = session_.start();
    while (step.what != Step::Do::kEnd) {
      switch (step.what) {
        case Step::Do::kConnect: step = co_await connect(); break;
        case Step::Do::kRead: {
          flush();
          const auto [error, size] = co_await transport_->read_some(asio::buffer(*buffer_));
          step = error ? lost(error) : session_.received({buffer_->data(), size});
          if (greeting_ && session_.ready()) {
            greeting_ = false;
            greeting_limit_.cancel();
          }
          break;
        }
        case Step::Do::kClose: step = lost(); break;
        case Step::Do::kWait: {
          alarm_.expires_after(step.wait);
          error_code ignored;
          co_await alarm_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
          step = session_.waited();
          break;
        }
        case Step::Do::kEnd: break;
      }
      deliver();
    }
    if (transport_) transport_->close();
    greeting_limit_.cancel();
  }

  asio::awaitable<Step> connect() {
    server_ = options_.endpoint;
    if (!server_.sentinels.empty()) {
      // Another one after a failure: the last one may name an earlier master.
      const std::size_t first = sentinel_++;
      auto master = co_await find_master(executor_, server_, first);
      if (!master) co_return session_.connect_failed(master.error().message);
      if (session_.stopped()) co_return Step{Step::Do::kEnd};
      server_ = std::move(*master);
    }
    transport_ = Transport::create(executor_, server_);
    ++epoch_;
    writing_ = false;
    // Covers the greeting too: the peer may accept and then send nothing.
    greeting_ = true;
    greeting_limit_.expires_after(options_.connect_timeout);
    greeting_limit_.async_wait([self = shared_from_this(), epoch = epoch_](error_code error) {
      if (!error && epoch == self->epoch_ && !self->session_.ready()) self->transport_->close();
    });
    const error_code error = co_await transport_->open();
    if (!error) co_return session_.connected();
    greeting_limit_.cancel();
    transport_->close();
    const bool timed_out = error == asio::error::operation_aborted;
    const std::string why =
        timed_out ? "no reply within " + std::to_string(options_.connect_timeout.count()) + " ms" : error.message();
    const bool found = !options_.endpoint.sentinels.empty();
    co_return session_.connect_failed(found ? "the master " + server_.display() + ": " + why : why);
  }

  // `error` is the socket's; none if the session asked to close it.
  Step lost(const error_code& error = {}) {
    transport_->close();
    greeting_limit_.cancel();
    const bool was_ready = session_.ready();
    const std::string dropped = std::exchange(drop_reason_, {});
    const Step step = error ? session_.disconnected(dropped.empty() ? error.message() : dropped) : session_.closed();
    if (was_ready && step.what != Step::Do::kEnd) spdlog::warn("{}", session_.close_reason().message);
    return step;
  }

  // One write at a time; requests submitted in the meantime go out together with the next.
  void flush() {
    if (writing_ || !transport_ || !session_.has_output()) return;
    writing_ = true;
    writing_bytes_ = session_.take_output(std::move(writing_bytes_));
    transport_->write(asio::buffer(writing_bytes_), [self = shared_from_this(), epoch = epoch_](error_code error) {
      if (epoch != self->epoch_) return;  // of an earlier connection
      self->writing_ = false;
      if (error) {
        self->transport_->close();  // the pending read ends and reports it
      } else {
        self->flush();
      }
    });
  }

  void deliver() {
    for (Session::Done& done : session_.take_done()) {
      const auto it = waiters_.find(done.id);
      if (it == waiters_.end()) continue;
      it->second->replies = std::move(done.replies);
      it->second->done = true;
      it->second->timer.cancel();
      waiters_.erase(it);
    }
    if (push_handler_) {
      for (Reply& push : session_.take_pushes()) push_handler_(std::move(push));
    }
  }

  bool started_ = false;
  Endpoint server_;           // options_.endpoint, or the master that its sentinels named
  std::size_t sentinel_ = 0;  // which one is asked first
  std::unique_ptr<Transport> transport_;
  std::uint64_t epoch_ = 0;  // counts transports: identifies late handlers of an earlier one
  bool greeting_ = false;
  bool writing_ = false;
  std::string writing_bytes_, drop_reason_;
  std::unique_ptr<std::array<char, 65536>> buffer_ = std::make_unique<std::array<char, 65536>>();
  asio::steady_timer alarm_, greeting_limit_, next_question_;
  std::unordered_map<Session::Id, std::shared_ptr<Waiter>> waiters_;
};

std::shared_ptr<Connection> Connection::create(asio::any_io_executor executor, ConnectionOptions options) {
  return std::shared_ptr<Connection>(new Connection(std::make_shared<Impl>(std::move(executor), std::move(options))));
}

Connection::Connection(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Connection::~Connection() { impl_->stop(); }

void Connection::start() { impl_->start(); }
void Connection::stop() { impl_->stop(); }
void Connection::drop(std::string why) { impl_->drop(std::move(why)); }
bool Connection::connected() const { return impl_->session_.ready(); }
std::uint64_t Connection::generation() const { return impl_->session_.generation(); }
asio::any_io_executor Connection::executor() const { return impl_->executor_; }
const ConnectionOptions& Connection::options() const { return impl_->options_; }

asio::awaitable<Result<Reply>> Connection::execute(Command command, Deadline deadline) {
  std::vector<Command> one;
  one.push_back(std::move(command));
  auto replies = co_await impl_->execute_all(std::move(one), deadline);
  co_return std::move(replies.front());
}

asio::awaitable<std::vector<Result<Reply>>> Connection::execute_all(std::vector<Command> commands, Deadline deadline) {
  return impl_->execute_all(std::move(commands), deadline);
}

void Connection::on_push(std::function<void(Reply)> handler) {
  impl_->push_handler_ = std::move(handler);
  impl_->session_.accept_pushes();
}

}  // namespace ditfleet::redis
