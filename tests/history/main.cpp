// Runs histories of a fleet under virtual time. README.md describes them.
//
//   histories [--from SEED] [--count N | --seconds S] [--processes N] [--stop]   prints broken seeds, then a line of
//                                                                                figures; --stop: ends with the first
//   histories --seed SEED [--without-jobs 0,2] [--without-faults 1] [--log]   one, with its plan
//   histories --seed SEED --record FILE   writes the commands that Redis executed; status 3: it lost data or was full
//   histories --shrink SEED   removes jobs and faults while it stays broken
//
// The exit status is 0 if nothing was broken. One seed gives the same history each time.
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>

#include "shared/queue/keys.h"
#include "shared/queue/library.h"
#include "tests/history/judge.h"
#include "tests/history/redis_script.h"

namespace {

using namespace ditfleet;
using namespace ditfleet::history;

// How long everything may take after the last job and fault: long enough for leases, back-offs and timeouts of one
// after the other, less than the scheduler's audit in case that something went wrong (30 s).
constexpr std::int64_t kSettles = 20 * kSecond;
constexpr std::int64_t kMisfortune = 12 * kSecond;  // more for each unit that hangs or kills its worker
constexpr unsigned kRealLimitS = 60;

// What the processes of a run share.
struct Figures {
  std::atomic<std::uint64_t> next{0};
  std::atomic<std::int64_t> histories{0}, broken{0}, virtual_us{0}, calls{0}, jobs{0}, faults{0};
};

// The host's clock: that of the C library is virtual.
double real_s() {
  timespec time{};
  ::syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

std::string run(const Plan& plan, Figures* figures, const std::string& record = {}) {
  World& world = *new World(plan.seed);
  Fleet& fleet = *new Fleet(world, plan);
  if (!record.empty()) fleet.redis.record = std::fopen(record.c_str(), "w");
  int commands = 0;
  fleet.redis.after_command = [&] {
    if (++commands % 8 == 0) fleet.look();
  };
  fleet.begin();
  std::int64_t limit = fleet.last_fault_ends;
  for (const auto& job : plan.jobs) limit = std::max(limit, job.at);
  limit += kSettles;
  for (const auto& job : plan.jobs) {
    limit += 2 * job.units * job.steps * job.step + job.pause_after + job.resume_after;  // one worker, everything twice
    if (job.nature == PlannedJob::Nature::kHangs || job.nature == PlannedJob::Nature::kKillsWorkers)
      limit += job.units * kMisfortune;
  }
  // Quiet for a while, so that workers end what they do behind a job's end, and attempts that were cut off act late.
  const std::int64_t quiet = plan.losses() > 0 ? kLease : kLease / 3;
  std::int64_t quiet_since = kNever, asked = -kSecond;
  const bool ended = world.run_until(limit, [&] {
    if (!fleet.broken.empty()) return true;
    if (world.now() - asked < 100 * kMs) return false;
    asked = world.now();
    if (!fleet.quiet()) {
      quiet_since = kNever;
      return false;
    }
    quiet_since = std::min(quiet_since, world.now());
    return world.now() - quiet_since > quiet;
  });
  if (ended && fleet.broken.empty()) {
    fleet.read();
    world.run_until(limit + 10 * kSecond, [&] {
      return std::all_of(fleet.orders.begin(), fleet.orders.end(), [](const auto& order) { return order.read; });
    });
  }
  if (fleet.redis.record) std::fclose(fleet.redis.record);
  if (figures) {
    figures->virtual_us += world.now();
    figures->calls += fleet.redis.model().calls;
    figures->jobs += static_cast<std::int64_t>(plan.jobs.size());
    figures->faults += static_cast<std::int64_t>(plan.faults.size());
  }
  if (!figures) {
    std::size_t digest = static_cast<std::size_t>(world.runs);
    for (const auto& key : fleet.redis.model().keys()) {
      const auto* events = fleet.redis.model().peek_as<Stream>(key);
      digest = digest * 31 + std::hash<std::string>()(key);
      if (events)
        for (const auto& [id, fields] : events->entries) digest = digest * 31 + std::hash<std::string>()(fields.at(1));
    }
    std::printf("%lld ms, %lld calls, digest %016zx\n", static_cast<long long>(world.now() / kMs),
                static_cast<long long>(fleet.redis.model().calls), digest);
    std::fflush(stdout);
  }
  if (!fleet.broken.empty()) return fleet.broken;
  if (world.hangs) return "a process does not stop running";
  if (!ended) {
    std::string open;
    if (const auto* units = fleet.redis.model().peek_as<Hash>(queue::Keys(0).units()))
      for (const auto& [member, record] : *units) open += " " + member + " " + record;
    return "not all jobs had ended after " + std::to_string(limit / kSecond) + " s:" + open;
  }
  return verdict(fleet);
}

// In a process of its own: a history leaves everything as it is when it ends, and may crash. Returns what is broken.
std::string run_apart(const Plan& plan, Figures* figures, const std::string& record = {}) {
  int pipe[2];
  if (::pipe(pipe) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(pipe[0]);
    ::alarm(kRealLimitS);
    const std::string broken = run(plan, figures, record);
    if (::write(pipe[1], broken.data(), broken.size()) < 0) ::_exit(2);
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::string broken;
  char bytes[4096];
  for (ssize_t size = 0; (size = ::read(pipe[0], bytes, sizeof bytes)) > 0;)
    broken.append(bytes, static_cast<std::size_t>(size));
  ::close(pipe[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFSIGNALED(status))
    return WTERMSIG(status) == SIGALRM ? "it did not end within " + std::to_string(kRealLimitS) + " s of real time"
                                       : "it crashed with signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "a process ended with status " + std::to_string(WEXITSTATUS(status));
  return broken;
}

std::set<int> numbers(const std::string& list) {
  std::set<int> out;
  std::istringstream in(list);
  for (std::string one; std::getline(in, one, ',');) out.insert(std::stoi(one));
  return out;
}

std::string list(const std::set<int>& numbers) {
  std::string out;
  for (const int one : numbers) out += (out.empty() ? "" : ",") + std::to_string(one);
  return out;
}

void print(const Plan& plan) {
  std::printf("seed %llu: %d coordinators, %d workers of capacity %d, checkpoints every %lld ms\n",
              static_cast<unsigned long long>(plan.seed), plan.coordinators, plan.workers, plan.capacity,
              static_cast<long long>(plan.checkpoint_every / kMs));
  for (const auto& job : plan.jobs) std::printf("  job %s\n", job.text().c_str());
  for (const auto& fault : plan.faults) std::printf("  fault %s\n", fault.text().c_str());
}

int shrink(std::uint64_t seed) {
  std::set<int> jobs, faults;
  std::string broken = run_apart(Plan::of(seed), nullptr);
  if (broken.empty()) {
    std::printf("seed %llu is not broken\n", static_cast<unsigned long long>(seed));
    return 0;
  }
  const Plan whole = Plan::of(seed);
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (auto [out, count] : {std::pair(&faults, whole.all_faults), std::pair(&jobs, whole.all_jobs)}) {
      for (int i = 0; i < count; ++i) {
        if (!out->insert(i).second) continue;
        auto still = run_apart(Plan::of(seed, jobs, faults), nullptr);
        if (still.empty()) {
          out->erase(i);
        } else {
          broken = still;
          smaller = true;
        }
      }
    }
  }
  print(Plan::of(seed, jobs, faults));
  std::printf("%s\n--seed %llu --without-jobs '%s' --without-faults '%s'\n", broken.c_str(),
              static_cast<unsigned long long>(seed), list(jobs).c_str(), list(faults).c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::map<std::string, std::string> options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    options[name] = name == "--log" || name == "--stop" || i + 1 >= argc ? "" : argv[++i];
  }
  const auto option = [&](const char* name, std::uint64_t value) {
    const auto it = options.find(name);
    return it == options.end() ? value : std::stoull(it->second);
  };
  spdlog::set_level(options.contains("--log") ? spdlog::level::debug : spdlog::level::critical);
  // Compiled once, for all histories.
  (void)Script::load(queue::loadable_library());
  (void)Script::load(next_library());
  if (options.contains("--shrink")) return shrink(option("--shrink", 0));
  if (options.contains("--seed")) {
    const Plan plan =
        Plan::of(option("--seed", 0), numbers(options["--without-jobs"]), numbers(options["--without-faults"]));
    using Kind = PlannedFault::Kind;
    if (options.contains("--record") &&
        (plan.has(Kind::kFailOver) || plan.has(Kind::kCrashRedis) || plan.has(Kind::kFillMemory)))
      return 3;
    print(plan);
    std::fflush(stdout);
    const std::string broken = run_apart(plan, nullptr, options["--record"]);
    std::printf("%s\n", broken.empty() ? "not broken" : broken.c_str());
    return broken.empty() ? 0 : 1;
  }
  auto& figures =
      *new (::mmap(nullptr, sizeof(Figures), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Figures;
  const std::uint64_t from = option("--from", 1);
  const std::uint64_t count = option("--count", options.contains("--seconds") ? UINT64_MAX : 1000);
  const double began = real_s(), limit = static_cast<double>(option("--seconds", 1'000'000));
  const auto processes = option("--processes", static_cast<std::uint64_t>(::sysconf(_SC_NPROCESSORS_ONLN)));
  for (std::uint64_t i = 0; i < processes; ++i) {
    if (::fork() != 0) continue;
    for (;;) {
      const std::uint64_t number = figures.next++;
      if (number >= count || real_s() - began > limit || (figures.broken > 0 && options.contains("--stop"))) ::_exit(0);
      const std::string broken = run_apart(Plan::of(from + number), &figures);
      ++figures.histories;
      if (broken.empty()) continue;
      ++figures.broken;
      std::printf("seed %llu: %s\n", static_cast<unsigned long long>(from + number), broken.c_str());
      std::fflush(stdout);
    }
  }
  while (::wait(nullptr) > 0) {
  }
  const double took = real_s() - began;
  std::printf(
      "%lld histories, %lld broken, %.0f a second; in the mean %.1f virtual s, %.1f jobs, %.1f faults, %.0f calls\n",
      static_cast<long long>(figures.histories), static_cast<long long>(figures.broken),
      static_cast<double>(figures.histories) / took,
      static_cast<double>(figures.virtual_us) / 1e6 / static_cast<double>(figures.histories),
      static_cast<double>(figures.jobs) / static_cast<double>(figures.histories),
      static_cast<double>(figures.faults) / static_cast<double>(figures.histories),
      static_cast<double>(figures.calls) / static_cast<double>(figures.histories));
  return figures.broken == 0 ? 0 : 1;
}
