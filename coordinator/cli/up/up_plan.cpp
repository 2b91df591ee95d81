#include "coordinator/cli/up/up_plan.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>
#include <utility>

#include "coordinator/cli/command.h"
#include "coordinator/cli/up/try_to_listen.h"
#include "shared/core/bytes.h"
#include "shared/core/deadline.h"
#include "shared/families/served.h"
#include "shared/kernel_cache/secret.h"
#include "shared/redis/connection.h"
#include "shared/redis/server_config.h"

namespace ditfleet::cli {
namespace {

namespace fs = std::filesystem;

Result<config::Settings> settings_of(const UpFlags& flags) {
  config::Sources sources = flags.sources;
  if (!flags.listen.empty()) sources.sets.push_back("gateway.listen=" + flags.listen);
  if (!flags.redis.empty()) sources.sets.push_back("redis.url=" + flags.redis);
  if (!flags.data.empty()) sources.sets.push_back("data.dir=" + flags.data);
  if (!flags.device.empty()) sources.sets.push_back("worker.device=" + flags.device);
  if (!flags.dtype.empty()) sources.sets.push_back("worker.dtype=" + flags.dtype);
  if (!flags.offload.empty()) sources.sets.push_back("memory.offload=" + flags.offload);
  if (!flags.memory_limit.empty()) sources.sets.push_back("memory.limit=" + flags.memory_limit);
  if (!flags.reserve_vram.empty()) sources.sets.push_back("memory.reserve=" + flags.reserve_vram);
  if (flags.workers >= 0) sources.sets.push_back("worker.count=" + std::to_string(flags.workers));
  std::set<std::string> named;
  for (const std::string& model : flags.models) {
    const auto equals = model.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == model.size()) {
      return invalid_argument("--model is '" + model +
                              "'; it must be NAME=DIR, for example demo=deploy/demo-model/model");
    }
    const std::string name = model.substr(0, equals);
    if (!named.insert(name).second)
      return invalid_argument("--model has the name '" + name + "' twice; give each model a unique name");
    sources.sets.push_back("models." + name + ".path=" + model.substr(equals + 1));
    if (!flags.quantize.empty()) sources.sets.push_back("models." + name + ".quantize=" + flags.quantize);
  }
  return config::load(sources);
}

// If no model is configured, the demo model beside this build is served.
void add_demo_model(config::Settings& settings) {
  if (!settings.models.empty()) return;
  const fs::path demo = own_folder().parent_path().parent_path() / "deploy" / "demo-model" / "model";
  std::error_code ec;
  if (fs::exists(demo / "model_index.json", ec)) settings.models["demo"].path = demo.string();
}

Result<void> check_models(const config::Settings& settings) {
  if (settings.models.empty()) {
    return invalid_argument(
        "no model is configured; give one with --model NAME=DIR, a folder in the layout of diffusers");
  }
  for (const auto& [name, model] : settings.models) {
    const auto entry = families::read_model_entry(name, model.path, families::served());
    if (!entry) return entry.error();
  }
  return {};
}

Result<std::string> make_data_folder(const config::Settings& settings) {
  std::string dir = config::data_folder(settings);
  if (dir.empty())
    return invalid_argument(
        "neither --data nor HOME is set, so there is no folder for Redis' files and logs; give --data DIR");
  std::error_code ec;
  dir = fs::absolute(dir, ec).lexically_normal().string();
  if (!ec) fs::create_directories(fs::path(dir) / "logs", ec);
  if (!ec) fs::create_directories(fs::path(dir) / "redis", ec);
  if (ec)
    return unavailable("cannot create the data folder '" + dir + "': " + ec.message() + "; choose another with --data");
  return dir;
}

std::string holder_of(const std::string& path) {
  const auto text = read_file(path);
  return text && !text->empty() && text->size() < 16 ? " (pid " + text->substr(0, text->find('\n')) + ")" : "";
}

// A socket's path has at most 107 bytes. For a data folder with a longer path the socket is in a folder below /tmp.
Result<std::string> socket_path(const std::string& data_dir) {
  std::string path = data_dir + "/redis/redis.sock";
  if (path.size() < sizeof(sockaddr_un::sun_path)) return path;
  const std::string dir = "/tmp/ditfleet-" + std::to_string(::getuid()) + "-" + sha256_hex(data_dir).substr(0, 16);
  struct stat info {};
  if (::mkdir(dir.c_str(), 0700) != 0 && errno != EEXIST)
    return unavailable("cannot create '" + dir + "': " + std::strerror(errno));
  if (::lstat(dir.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::getuid() ||
      (info.st_mode & 077) != 0) {
    return unavailable("the path of --data is too long for a socket, and '" + dir +
                       "' belongs to another user; give --data a folder with a shorter path");
  }
  return dir + "/redis.sock";
}

// The environment without settings: the children read them from their configuration file.
std::vector<std::string> child_environment() {
  std::vector<std::string> out;
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text(*variable);
    const std::string_view name = text.substr(0, text.find('='));
    const bool setting =
        name.starts_with("DITFLEET_") &&
        (name.find("__") != std::string_view::npos || name == "DITFLEET_CONFIG" || name == "DITFLEET_DEFAULT_MODEL");
    if (!setting) out.emplace_back(text);
  }
  return out;
}

// Without OMP_WAIT_POLICY a worker sets it and executes itself again (worker/main.cpp). Setting it here avoids that.
std::vector<std::string> worker_environment() {
  auto out = child_environment();
  if (!std::getenv("OMP_WAIT_POLICY")) out.emplace_back("OMP_WAIT_POLICY=passive");
  return out;
}

Result<void> plan_redis(UpPlan& plan) {
  const auto server = find_program("redis-server");
  if (!server)
    return Error{Code::kNotFound,
                 "redis-server is not on PATH; install it (apt-get install redis-server) or give a Redis with --redis",
                 {}};
  const std::string dir = plan.data_dir + "/redis";

  // Redis inherits the lock, so that two servers never write the same files, even if `up` crashes.
  const Deadline deadline = Deadline::after(std::chrono::seconds(15));
  auto lock = FileLock::try_take(dir + "/lock");
  while (!lock && lock.error().code == Code::kConflict && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    lock = FileLock::try_take(dir + "/lock");
  }
  if (!lock) {
    if (lock.error().code != Code::kConflict) return lock.error();
    return Error{
        Code::kConflict, "a redis-server of an earlier run still uses " + dir + "; stop it or give another --data", {}};
  }
  plan.redis_lock = std::move(*lock);

  auto socket = socket_path(plan.data_dir);
  if (!socket) return socket.error();
  plan.redis_socket = *socket;
  ::unlink(plan.redis_socket.c_str());  // left by a run that crashed: nobody listens on it while the lock is held
  redis::Endpoint endpoint;
  endpoint.unix_path = plan.redis_socket;
  plan.settings.redis.url = endpoint.url();

  redis::ServerConfig config;
  config.dir = dir;
  config.unix_socket = plan.redis_socket;
  config.appendfsync = plan.settings.redis.appendfsync;
  if (auto& most = plan.settings.redis.maxmemory; most.empty())  // half of the host's memory
    most = std::to_string((::sysconf(_SC_PHYS_PAGES) / 2 * ::sysconf(_SC_PAGESIZE)) >> 20) + "mb";
  config.maxmemory = plan.settings.redis.maxmemory;
  const std::string file = dir + "/redis.conf";
  if (auto written = write_file_atomically(file, redis::redis_server_config(config)); !written) return written;
  // SIGTERM lets Redis save its data.
  plan.redis = {.label = "redis",
                .program = {.argv = {*server, file},
                            .environment = child_environment(),
                            .death_signal = SIGTERM,
                            .inherited_fd = plan.redis_lock.fd()},
                .log_file = plan.data_dir + "/logs/redis.log",
                .echo = false};
  return {};
}

// Only processes of this `up` use its private Redis, so it creates their secret. For an external Redis the operator
// must say which nodes belong together.
Result<void> plan_kernel_cache(UpPlan& plan) {
  auto& cache = plan.settings.cache;
  if (cache.dir.empty()) cache.dir = plan.data_dir + "/kernels";
  if (plan.redis_socket.empty() || !cache.redis || !cache.secret.empty() || !cache.secret_file.empty()) return {};
  // The folder's default file, which `ditfleet cache` finds without configuration.
  const std::string file = cache.dir + "/secret";
  std::error_code ec;
  fs::create_directories(cache.dir, ec);
  if (auto made = kernel_cache::Secret::from_file_or_new(file); !made) return made.error();
  cache.secret_file = file;
  return {};
}

std::string effective_file(const UpPlan& plan) { return plan.data_dir + "/effective.yaml"; }

Result<void> plan_children(UpPlan& plan) {
  const std::string file = effective_file(plan);
  if (auto written = write_file_atomically(
          file, "# Written by `ditfleet up` for its processes.\n" + config::to_yaml(plan.settings, true));
      !written)
    return written;
  const std::string self = (own_folder() / "ditfleet").string();
  plan.coordinator = {.label = "coordinator",
                      .program = {.argv = {self, "coordinator", "--config", file}, .environment = child_environment()},
                      .log_file = plan.data_dir + "/logs/coordinator.log"};

  for (int i = 1; i <= plan.settings.worker.count; ++i) {
    auto worker = worker_spec(plan, i);
    if (!worker) return not_found(worker.error().message + ", or run with --workers 0");
    plan.workers.push_back(std::move(*worker));
  }
  return {};
}

std::string lock_path(const std::string& data_dir) { return data_dir + "/up.lock"; }

}  // namespace

Result<LoggedProcessSpec> worker_spec(const UpPlan& plan, int number) {
  const auto worker = worker_program();
  if (!worker) return worker.error();
  const std::string label = "worker-" + std::to_string(number);
  std::vector<std::string> argv = {*worker, "run", "--config", effective_file(plan)};
  const bool several = number > 1 || plan.settings.worker.count > 1;
  if (several && !plan.settings.worker.name.empty())
    argv.insert(argv.end(), {"--set", "worker.name=" + plan.settings.worker.name + "-" + std::to_string(number)});
  if (const auto metrics = ListenAddress::parse(plan.settings.worker.metrics_listen, "worker.metrics_listen");
      several && metrics && metrics->port != 0) {
    const ListenAddress own{metrics->host, metrics->port + number - 1};
    argv.insert(argv.end(), {"--set", "worker.metrics_listen=" + own.text()});
  }
  return LoggedProcessSpec{.label = label,
                           .program = {.argv = std::move(argv), .environment = worker_environment()},
                           .log_file = plan.data_dir + "/logs/" + label + ".log"};
}

std::string scale_file(const std::string& data_dir) { return data_dir + "/scale"; }

Result<void> scale_running(const UpFlags& flags, const std::string& change) {
  config::Sources sources = flags.sources;
  if (!flags.data.empty()) sources.sets.push_back("data.dir=" + flags.data);
  const auto settings = config::load(sources);
  if (!settings) return settings.error();
  const std::string dir = config::data_folder(*settings);
  if (auto lock = FileLock::try_take(lock_path(dir)); lock || lock.error().code != Code::kConflict)
    return not_found("no `ditfleet up` runs with the data folder '" + dir + "'; start it, or give its --data");
  const std::string file = scale_file(dir);
  if (auto written = write_file_atomically(file, change + "\n"); !written) return written;
  const Deadline deadline = Deadline::after(std::chrono::seconds(10));
  while (::access(file.c_str(), F_OK) == 0) {
    if (deadline.passed()) {
      ::unlink(file.c_str());
      return unavailable("`ditfleet up`" + holder_of(lock_path(dir)) + " did not answer within 10 s");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return {};
}

Result<UpPlan> plan_up(const UpFlags& flags) {
  auto settings = settings_of(flags);
  if (!settings) return settings.error();
  UpPlan plan;
  plan.settings = std::move(*settings);
  plan.ready_file = flags.ready_file;
  plan.json = flags.json;
  add_demo_model(plan.settings);
  if (auto checked = check_models(plan.settings); !checked) return checked.error();
  if (auto checked = config::check_gateway(plan.settings); !checked) return checked.error();

  ::umask(077);  // the data folder holds prompts, images and perhaps Redis' password
  auto dir = make_data_folder(plan.settings);
  if (!dir) return dir.error();
  plan.data_dir = plan.settings.data.dir = *dir;
  auto lock = FileLock::try_take(lock_path(plan.data_dir));
  if (!lock) {
    if (lock.error().code != Code::kConflict) return lock.error();
    return Error{Code::kConflict,
                 "another `ditfleet up`" + holder_of(lock_path(plan.data_dir)) + " uses " + plan.data_dir +
                     "; stop it or give another --data",
                 {}};
  }
  plan.data_lock = std::move(*lock);
  ::unlink(scale_file(plan.data_dir).c_str());  // for an `up` that has ended
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(plan.data_lock.fd(), 0) == 0) (void)!::pwrite(plan.data_lock.fd(), pid.data(), pid.size(), 0);

  auto wanted = ListenAddress::parse(plan.settings.gateway.listen, "gateway.listen");
  if (!wanted) return wanted.error();
  auto address = try_to_listen(*wanted);
  if (!address) return address.error();
  plan.settings.gateway.listen = address->text();
  plan.gateway_url = address->local_url(!plan.settings.gateway.tls_cert_file.empty());

  if (plan.settings.results.backend == "file" && plan.settings.results.dir.empty())
    plan.settings.results.dir = plan.data_dir + "/results";
  if (plan.settings.redis.url.empty()) {
    if (auto planned = plan_redis(plan); !planned) return planned.error();
  }
  if (auto planned = plan_kernel_cache(plan); !planned) return planned.error();
  if (auto planned = plan_children(plan); !planned) return planned.error();
  return plan;
}

}  // namespace ditfleet::cli
