#include "coordinator/cli/up/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <deque>
#include <future>
#include <optional>

#include "coordinator/cli/http_client.h"
#include "coordinator/cli/up/restart_policy.h"
#include "shared/core/bytes.h"
#include "shared/core/output_file.h"
#include "shared/core/stop_signals.h"
#include "shared/core/text.h"
#include "shared/core/unique_fd.h"
#include "shared/redis/endpoint.h"

namespace ditfleet::cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kTick{50}, kReadyPoll{100};
constexpr seconds kStopTimeout{10};  // of the coordinator and of Redis, before SIGKILL
constexpr seconds kStillWaiting{15};
constexpr seconds kStillFailing{60};
constexpr seconds kProbe{5};  // the time limit of a probe, and the pause after an answered one
constexpr int kMostUnanswered = 3;

void note(const std::string& message) { std::fprintf(stderr, "up | %s\n", message.c_str()); }

bool accepts(const std::string& socket_path) {
  const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket_path.c_str(), sizeof address.sun_path - 1);
  return socket.valid() && ::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
}

struct Member {
  explicit Member(LoggedProcessSpec spec) : process(std::move(spec)) {}
  LoggedProcess process;
  RestartPolicy policy;
  Clock::time_point started, start_again;
  bool waiting = false;           // for its restart
  bool leaving = false;           // it was sent away, and returns its units
  Clock::time_point next_report;  // of a worker that keeps failing
};

class Supervisor {
 public:
  explicit Supervisor(UpPlan plan)
      : plan_(std::move(plan)), target_{.url = plan_.gateway_url, .verify = false}, client_(target_) {
    if (!plan_.redis.program.argv.empty()) redis_.emplace_back(plan_.redis);
    coordinator_.emplace_back(plan_.coordinator);
    for (const LoggedProcessSpec& spec : plan_.workers) workers_.emplace_back(spec);
  }

  int run() {
    listen_for_signals();
    if (!plan_.ready_file.empty()) ::unlink(plan_.ready_file.c_str());
    asked_at_ = Clock::now();
    if (!redis_.empty()) {
      note("redis may use " + plan_.settings.redis.maxmemory + " of memory (redis.maxmemory)");
      start(redis_.front());
    }
    while (!stopping_) turn();
    stop_all();
    if (!plan_.ready_file.empty()) ::unlink(plan_.ready_file.c_str());
    if (!plan_.redis_socket.empty()) ::unlink(plan_.redis_socket.c_str());
    return exit_code_;
  }

 private:
  void listen_for_signals() {
    sigset_t set;
    sigemptyset(&set);
    for (int signal : {SIGINT, SIGTERM, SIGCHLD}) sigaddset(&set, signal);
    if (hangup_ends()) sigaddset(&set, SIGHUP);  // under nohup it stays ignored, here and in the children
    ::sigprocmask(SIG_BLOCK, &set, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
    // A shell starts background jobs with SIGINT ignored, and signalfd does not receive ignored signals.
    for (int signal : {SIGINT, SIGTERM}) std::signal(signal, SIG_DFL);
    signals_.reset(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  }

  // One round: output, signals, ended processes, restarts, readiness.
  void turn() {
    wait_for_something();
    for (auto* group : {&redis_, &coordinator_, &workers_}) {
      for (Member& member : *group) look_after(member);
    }
    if (stopping_) return;
    if (!all_started_ && (redis_.empty() || accepts(plan_.redis_socket))) {
      all_started_ = true;
      start(coordinator_.front());
      for (Member& member : workers_) start(member);
    }
    if (all_started_) scale();
    check_ready();
    probe_coordinator();
    if (ready_) write_ready_file();
  }

  void wait_for_something() {
    std::vector<pollfd> fds = {{signals_.get(), POLLIN, 0}};
    std::vector<LoggedProcess*> sources = {nullptr};
    for (auto* group : {&redis_, &coordinator_, &workers_}) {
      for (Member& member : *group) {
        if (member.process.output_fd() < 0) continue;
        fds.push_back({member.process.output_fd(), POLLIN, 0});
        sources.push_back(&member.process);
      }
    }
    ::poll(fds.data(), fds.size(), static_cast<int>(kTick.count()));
    for (std::size_t i = 1; i < fds.size(); ++i) {
      if (fds[i].revents != 0) sources[i]->drain_output();
    }
    signalfd_siginfo info{};
    while (::read(signals_.get(), &info, sizeof info) == static_cast<ssize_t>(sizeof info)) {
      if (info.ssi_signo == SIGCHLD) continue;
      // A second Ctrl-C kills. A SIGTERM after the first Ctrl-C does not: scripts send both.
      if (stopping_ && info.ssi_signo == SIGINT) in_a_hurry_ = true;
      stopping_ = true;
    }
  }

  void start(Member& member) {
    member.waiting = false;
    member.started = Clock::now();
    if (auto started = member.process.start(); !started) give_up(started.error().message, kExitFailure);
  }

  // As scale_running() asks.
  void scale() {
    const std::string file = scale_file(plan_.data_dir);
    if (::access(file.c_str(), F_OK) != 0) return;
    const auto text = read_file(file);
    ::unlink(file.c_str());
    std::string_view change = text ? std::string_view(*text).substr(0, text->find('\n')) : std::string_view();
    const bool more = change.starts_with('+');
    if (more) change.remove_prefix(1);
    const auto number = number_of(change, 0, kMostWorkers);
    if (!number) return;
    const auto is_meant_to_run = [](const Member& worker) {
      return !worker.leaving && (worker.waiting || worker.process.running());
    };
    int running = static_cast<int>(std::ranges::count_if(workers_, is_meant_to_run));
    const int wanted = std::min(kMostWorkers, *number + (more ? running : 0));
    for (Member& worker : workers_) {  // those that were stopped
      if (running >= wanted || worker.waiting || worker.process.running()) continue;
      worker.policy = {};
      worker.leaving = false;
      start(worker);
      ++running;
    }
    for (; running < wanted; ++running) {
      auto spec = worker_spec(plan_, static_cast<int>(workers_.size()) + 1);
      if (!spec) return note(spec.error().message);
      start(workers_.emplace_back(std::move(*spec)));
    }
    for (auto worker = workers_.rbegin(); worker != workers_.rend() && running > wanted; ++worker) {
      if (!is_meant_to_run(*worker)) continue;
      worker->waiting = false;
      worker->leaving = true;
      worker->process.send(SIGTERM);
      --running;
    }
    note("scaled to " + std::to_string(wanted) + (wanted == 1 ? " worker" : " workers"));
  }

  void look_after(Member& member) {
    if (const auto end = member.process.reap(); end && !stopping_) on_end(member, *end);
    if (member.waiting && !stopping_ && Clock::now() >= member.start_again) start(member);
  }

  void on_end(Member& member, const ProcessEnd& end) {
    const LoggedProcessSpec& spec = member.process.spec();
    const bool by_itself = end.signal == 0 && end.status != 0;
    const bool first = !ready_ && by_itself;
    const std::string output = spec.echo || member.process.last_line().empty() ? "" : ": " + member.process.last_line();
    // A process that refuses to start would refuse again. The coordinator, Redis and a worker with a usage error end
    // `up` at once, another worker after a few tries.
    const bool is_worker = &member != &coordinator_.front() && (redis_.empty() || &member != &redis_.front());
    if (first && (!is_worker || end.status == kExitUsage)) {
      return give_up(spec.label + " " + end.text() + output + " (log: " + spec.log_file + ")",
                     is_worker || end.status == kExitUsage ? end.status : kExitFailure);
    }
    // Only `ditfleet workers stop` and a signal end a worker with status 0.
    if (is_worker && (member.leaving || (end.signal == 0 && end.status == 0))) return note(spec.label + " was stopped");
    const auto now = Clock::now();
    const auto wait = member.policy.ended(std::chrono::duration_cast<milliseconds>(now - member.started), by_itself);
    member.waiting = true;
    member.start_again = now + wait;
    const std::string then = "; restarting it in " + std::to_string(wait.count()) + " ms";
    if (!is_worker || !member.policy.hopeless()) {
      member.next_report = now;
      return note(spec.label + " " + end.text() + output + then);
    }
    const std::string fault = spec.label + " " + end.text() + " repeatedly" + output + " (log: " + spec.log_file + ")";
    if (!ready_ || !any_worker_works()) return give_up(fault, kExitFailure);
    if (now < member.next_report) return;
    member.next_report = now + kStillFailing;
    note(fault + "; the other workers continue" + then);
  }

  // A worker that keeps failing runs for a moment at every try.
  bool any_worker_works() const {
    return std::any_of(workers_.begin(), workers_.end(), [now = Clock::now()](const Member& worker) {
      return worker.process.running() &&
             worker.policy.works(std::chrono::duration_cast<milliseconds>(now - worker.started));
    });
  }

  void give_up(const std::string& why, int code) {
    std::fprintf(stderr, "ditfleet up: %s\n", why.c_str());
    exit_code_ = code;
    stopping_ = true;
  }

  void check_ready() {
    const auto now = Clock::now();
    if (ready_ || !all_started_ || now < next_ready_check_) return;
    next_ready_check_ = now + kReadyPoll;
    const auto answer = client_.request("GET", "/readyz", {}, milliseconds(500));
    if (answer && answer->status == 200) {
      ready_ = true;
      write_ready_file();
      announce();
    } else if (now - asked_at_ > kStillWaiting) {
      asked_at_ = now;
      note("still not ready: " + (answer ? answer->body.substr(0, 300) : answer.error().message));
    }
  }

  // A coordinator that runs but does not answer is killed, and then restarted like one that crashed.
  void probe_coordinator() {
    const auto now = Clock::now();
    LoggedProcess& coordinator = coordinator_.front().process;
    if (probe_.valid()) {
      if (probe_.wait_for(seconds(0)) != std::future_status::ready) return;
      unanswered_ = probe_.get() ? unanswered_ + 1 : 0;
      next_probe_ = now + (unanswered_ > 0 ? seconds(0) : kProbe);
      if (unanswered_ < kMostUnanswered) return;
      note("coordinator has not answered /healthz for " + std::to_string(kMostUnanswered * kProbe.count()) +
           " s and is killed");
      coordinator.send(SIGKILL);
      unanswered_ = 0;
    } else if (coordinator.running() && now >= next_probe_) {
      // A refused connection is no sign of a coordinator that hangs: it may be starting.
      probe_ = std::async(std::launch::async, [target = target_] {
        const auto answer = HttpClient(target).request("GET", "/healthz", {}, kProbe);
        return !answer && answer.error().code == Code::kDeadlineExceeded;
      });
    }
  }

  json::object ready_object() const {
    const auto pid_of = [](const Member& member) {
      return member.process.running() ? json::value(member.process.pid()) : json::value(nullptr);
    };
    json::array workers;
    for (const Member& member : workers_) {
      if (member.process.running()) workers.push_back(member.process.pid());
    }
    auto redis = redis::Endpoint::parse(plan_.settings.redis.url);
    if (redis) redis->user = redis->password = "";  // whoever reads the file needs the URL, not the password
    return {{"gateway", plan_.gateway_url},
            {"redis", redis ? redis->url() : std::string()},
            {"pids", json::object{{"redis", redis_.empty() ? json::value(nullptr) : pid_of(redis_.front())},
                                  {"coordinator", pid_of(coordinator_.front())},
                                  {"workers", std::move(workers)}}}};
  }

  // Only if its content has changed.
  void write_ready_file() {
    if (plan_.ready_file.empty()) return;
    const std::string text = json::serialize(ready_object()) + "\n";
    if (text == ready_text_) return;
    if (auto written = write_output_file(plan_.ready_file, text); !written)
      return give_up("--ready-file: " + written.error().message, kExitFailure);
    ready_text_ = text;
  }

  void announce() const {
    if (plan_.json) {
      print(ready_object());
    } else {
      std::string models;
      for (const auto& [name, model] : plan_.settings.models) models += (models.empty() ? "" : ", ") + name;
      std::printf(
          "DiTFleet is up: %s (console page and API), models: %s, workers: %zu\nlogs and data: %s; Ctrl-C "
          "stops it\n",
          plan_.gateway_url.c_str(), models.c_str(), workers_.size(), plan_.data_dir.c_str());
    }
    std::fflush(stdout);
  }

  // Workers first, so that they can return their units to the queue; Redis last.
  void stop_all() {
    note("stopping: workers finish or return their units");
    stop(workers_, milliseconds(plan_.settings.worker.drain_ms) + kStopTimeout);
    stop(coordinator_, kStopTimeout);
    stop(redis_, kStopTimeout);
  }

  void stop(std::deque<Member>& group, milliseconds timeout) {
    const auto running = [&] {
      bool any = false;
      for (Member& member : group) {
        (void)member.process.reap();
        any |= member.process.running();
      }
      return any;
    };
    for (Member& member : group) {
      member.process.send(SIGCONT);  // a stopped process would not handle SIGTERM
      member.process.send(SIGTERM);
    }
    const auto until = Clock::now() + timeout;
    while (running() && Clock::now() < until && !in_a_hurry_) wait_for_something();
    for (Member& member : group) {
      if (!member.process.running()) continue;
      note(member.process.spec().label + (in_a_hurry_ ? " is killed" : " did not stop in time and is killed"));
      member.process.send(SIGKILL);
    }
    while (running()) wait_for_something();
  }

  UpPlan plan_;
  Target target_;  // this host's gateway, with whatever certificate
  HttpClient client_;
  std::deque<Member> redis_, coordinator_, workers_;  // the first two have at most one member
  UniqueFd signals_;
  bool all_started_ = false, ready_ = false, stopping_ = false, in_a_hurry_ = false;
  std::future<bool> probe_;  // whether the coordinator left a probe unanswered
  Clock::time_point next_probe_;
  int unanswered_ = 0;  // probes in a row
  int exit_code_ = kExitOk;
  Clock::time_point next_ready_check_, asked_at_;
  std::string ready_text_;
};

}  // namespace

int supervise(UpPlan plan) { return Supervisor(std::move(plan)).run(); }

}  // namespace ditfleet::cli
