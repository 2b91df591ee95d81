// `ditfleet cache {stats,list,verify,purge}`: the kernel cache on this host's disk and in the fleet's
// Redis. Needs no running service; workers may run at the same time.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "coordinator/cli/command.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/json.h"
#include "shared/kernel_cache/inventory.h"
#include "shared/kernel_cache/open.h"
#include "shared/kernel_cache/secret.h"
#include "shared/telemetry/log.h"

namespace ditfleet::cli {
namespace {

using kernel_cache::Inventory;
using kernel_cache::Stored;

struct CacheFlags {
  config::Sources sources;
  bool json = false;
  std::string data, tier = "all", arch, key;
  bool bad = false;
  bool disk() const { return tier != "redis"; }
  bool redis() const { return tier != "disk"; }
};

struct Opened {
  kernel_cache::CacheOptions options;
  std::unique_ptr<Inventory> inventory;
};

Result<Opened> open(const CacheFlags& flags) {
  if (flags.bad && !flags.arch.empty())
    return invalid_argument(
        "--bad and --arch cannot be combined: the architecture of an invalid entry is unknown; use --bad alone "
        "or with --key");
  if (!flags.key.empty()) {
    if (auto key = kernel_cache::Key::from_hex(flags.key); !key)
      return invalid_argument("--key: " + key.error().message);
  }
  config::Sources sources = flags.sources;
  if (!flags.data.empty()) {
    // The configuration that `ditfleet up` wrote for its processes, with the URL of its Redis and the secret.
    std::error_code ec;
    const std::string effective = flags.data + "/effective.yaml";
    if (sources.file.empty() && std::filesystem::exists(effective, ec)) sources.file = effective;
    sources.sets.push_back("data.dir=" + flags.data);
  }
  const auto settings = config::load(sources);
  if (!settings) return settings.error();
  // The log goes to stderr: stdout has only the answer.
  if (auto log = telemetry::configure_log("ditfleet", settings->log.level, settings->log.format); !log)
    return log.error();
  auto options = kernel_cache::cache_options(*settings, kernel_cache::FolderSecret::kLeave);
  if (!options) return options.error();
  std::error_code ec;
  if (!options->secret && !options->dir.empty() && std::filesystem::exists(options->dir + "/1", ec))
    return Error{Code::kNotFound,
                 "'" + options->dir + "' has programs but no secret to verify them ('" + options->dir +
                     "/secret'); set cache.secret or cache.secret_file to the secret that signed them",
                 {}};
  if (flags.tier == "redis" && !options->redis)
    return invalid_argument(
        "--tier is redis, but the cache has no Redis: set redis.url and cache.secret or cache.secret_file, or give "
        "--data of a `ditfleet up`");
  if (flags.tier == "disk" && options->dir.empty())
    return invalid_argument("--tier is disk, but no cache folder is configured: set cache.dir and cache.disk_bytes");
  Opened opened{*options, std::make_unique<Inventory>(*options)};
  return opened;
}

bool wanted(const CacheFlags& flags, const Stored& stored) {
  if (!flags.key.empty() && stored.key != *kernel_cache::Key::from_hex(flags.key))
    return false;  // open() has checked that it is a key
  if (!flags.arch.empty() && !(stored.decoded && stored.decoded->arch == flags.arch)) return false;
  return !flags.bad || !stored.decoded;
}

std::string short_bytes(std::uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 10'000) return fmt::format("{} B", bytes);
  return bytes < 10'000'000 ? fmt::format("{:.1f} KB", value / 1e3) : fmt::format("{:.1f} MB", value / 1e6);
}

json::object to_json(const Stored& stored) {
  json::object out{{"key", stored.key.hex()},
                   {"tier", kernel_cache::tier_name(stored.tier)},
                   {"bytes", stored.bytes.size()},
                   {"used_ms", stored.used_ms}};
  if (!stored.decoded) {
    out["problem"] = kernel_cache::refusal_name(stored.decoded.error().why);
    out["message"] = stored.decoded.error().message;
    return out;
  }
  const kernel_cache::Entry& entry = *stored.decoded;
  json::array kernels;
  for (const auto& kernel : entry.kernels) {
    kernels.push_back(json::object{{"name", kernel.name},
                                   {"parameters", kernel.parameter_bytes.size()},
                                   {"shared_bytes", kernel.shared_bytes},
                                   {"registers", kernel.registers},
                                   {"spill_bytes", kernel.spill_bytes}});
  }
  out["region"] = entry.region;
  out["arch"] = entry.arch;
  out["kind"] = kernel_cache::kind_name(entry.kind);
  out["kernels"] = std::move(kernels);
  out["code_bytes"] = entry.code.size();
  out["source_bytes"] = entry.source_bytes;
  return out;
}

Result<int> stats(const CacheFlags& flags, Opened& opened) {
  const auto& options = opened.options;
  std::size_t disk_entries = 0, redis_entries = 0;
  std::uint64_t disk_bytes = 0, redis_bytes = 0;
  const auto count = [](std::size_t& entries, std::uint64_t& bytes) {
    return [&](const Stored& stored) {
      ++entries;
      bytes += stored.bytes.size();
    };
  };
  if (auto done = opened.inventory->each(true, false, count(disk_entries, disk_bytes)); !done) return done.error();
  const auto reached = opened.inventory->each(false, true, count(redis_entries, redis_bytes));
  const std::size_t quarantined = opened.inventory->disk() ? opened.inventory->disk()->quarantined().size() : 0;
  if (flags.json) {
    json::object disk{{"dir", options.dir},
                      {"entries", disk_entries},
                      {"bytes", disk_bytes},
                      {"max_bytes", options.disk_bytes},
                      {"quarantined", quarantined}};
    json::object redis{{"entries", redis_entries}, {"bytes", redis_bytes}, {"reachable", reached.ok()}};
    if (options.redis) redis["endpoint"] = options.redis->display();
    print(json::object{{"secret_id", options.secret ? json::value(options.secret->id_text()) : json::value(nullptr)},
                       {"disk", options.dir.empty() ? json::value(nullptr) : json::value(std::move(disk))},
                       {"redis", options.redis ? json::value(std::move(redis)) : json::value(nullptr)}});
    return kExitOk;
  }
  std::printf("secret  %s\n", options.secret        ? ("id " + options.secret->id_text()).c_str()
                              : options.dir.empty() ? "none: programs are kept in memory only"
                                                    : "none yet: the first process that stores a program creates one");
  if (!options.dir.empty()) {
    std::printf("disk    %zu program(s), %s of %s, %zu in quarantine, %s\n", disk_entries,
                short_bytes(disk_bytes).c_str(), short_bytes(options.disk_bytes).c_str(), quarantined,
                options.dir.c_str());
  } else {
    std::printf("disk    off\n");
  }
  if (!options.redis) {
    std::printf("redis   off\n");
  } else if (reached) {
    std::printf("redis   %zu program(s), %s, %s\n", redis_entries, short_bytes(redis_bytes).c_str(),
                options.redis->display().c_str());
  } else {
    std::printf("redis   %s\n", reached.error().message.c_str());
  }
  return kExitOk;
}

Result<int> list(const CacheFlags& flags, Opened& opened) {
  json::array entries;
  std::vector<std::vector<std::string>> rows = {{"KEY", "TIER", "REGION", "ARCH", "KERNELS", "SIZE", "USED"}};
  auto done = opened.inventory->each(flags.disk(), flags.redis(), [&](const Stored& stored) {
    if (!wanted(flags, stored)) return;
    if (flags.json) {
      entries.push_back(to_json(stored));
      return;
    }
    const bool good = stored.decoded.ok();
    rows.push_back({stored.key.hex().substr(0, 16), std::string(kernel_cache::tier_name(stored.tier)),
                    good ? one_line(stored.decoded->region, 40)
                         : "! " + std::string(kernel_cache::refusal_name(stored.decoded.error().why)),
                    good ? one_line(stored.decoded->arch, 20) : "-",
                    good ? std::to_string(stored.decoded->kernels.size()) : "-", short_bytes(stored.bytes.size()),
                    ago(stored.used_ms)});
  });
  if (flags.json)
    print(json::object{{"entries", std::move(entries)}});
  else if (rows.size() > 1)
    std::fputs(table(rows).c_str(), stdout);
  if (!done) return done.error();
  return kExitOk;
}

// Succeeds if every value of both tiers verifies. Changes nothing.
Result<int> verify(const CacheFlags& flags, Opened& opened) {
  json::array bad, of_others;
  std::size_t checked = 0;
  auto done = opened.inventory->each(flags.disk(), flags.redis(), [&](const Stored& stored) {
    ++checked;
    if (stored.decoded) return;
    (stored.foreign() ? of_others : bad).push_back(to_json(stored));
    if (!flags.json) {
      std::printf("%s  %s  %s: %s\n", stored.key.hex().c_str(),
                  std::string(kernel_cache::tier_name(stored.tier)).c_str(),
                  std::string(kernel_cache::refusal_name(stored.decoded.error().why)).c_str(),
                  stored.decoded.error().message.c_str());
    }
  });
  const std::size_t wrong = bad.size(), foreign = of_others.size();
  if (flags.json) {
    print(json::object{{"ok", wrong + foreign == 0 && done.ok()},
                       {"checked", checked},
                       {"bad", std::move(bad)},
                       {"of_another_secret", std::move(of_others)}});
  } else {
    std::printf("%zu checked, %zu bad%s\n", checked, wrong, wrong ? "; `ditfleet cache purge --bad` removes them" : "");
    if (foreign)
      std::printf(
          "%zu signed with another secret, which other nodes may have. Is cache.secret here (id %s) the fleet's?\n",
          foreign, opened.options.secret->id_text().c_str());
  }
  if (!done) return done.error();
  return wrong + foreign == 0 ? kExitOk : kExitFailure;
}

// Counts what was removed. A value that cannot be removed does not stop the others.
Result<int> purge(const CacheFlags& flags, Opened& opened) {
  std::size_t disk = 0, redis = 0, of_others = 0, stayed = 0;
  Error why;
  auto done = opened.inventory->each(flags.disk(), flags.redis(), [&](const Stored& stored) {
    if (!wanted(flags, stored)) return;
    // Other nodes may have its secret. A purge without --bad removes it, too.
    if (flags.bad && stored.foreign()) {
      ++of_others;
      return;
    }
    const auto removed = opened.inventory->remove(stored);
    if (!removed) {
      ++stayed;
      why = removed.error();
    } else if (*removed) {
      ++(stored.tier == kernel_cache::Tier::kDisk ? disk : redis);
    }
  });
  const bool all = flags.arch.empty() && flags.key.empty() && flags.disk();
  Result<void> emptied;
  const std::size_t quarantine = all ? opened.inventory->empty_quarantine(emptied) : 0;
  if (flags.json) {
    print(json::object{{"removed", json::object{{"disk", disk}, {"redis", redis}, {"quarantine", quarantine}}},
                       {"of_another_secret", of_others},
                       {"stayed", stayed}});
  } else {
    std::printf("removed %zu on disk, %zu in Redis, %zu in quarantine\n", disk, redis, quarantine);
    if (of_others) std::printf("kept %zu signed with another secret, which other nodes may have\n", of_others);
  }
  if (stayed > 0)
    return Error{why.code, std::to_string(stayed) + " program(s) could not be removed: " + why.message, {}};
  if (!emptied) return emptied.error();
  if (!done) return done.error();
  return kExitOk;
}

}  // namespace

void add_cache(CLI::App& app, Invocation& run) {
  auto* command =
      app.add_subcommand("cache", "Inspect and manage the kernel cache: compiled programs on disk and in Redis");
  command->require_subcommand(1);
  command->footer(
      "Uses the folder and the Redis of the configuration (--config, --set), or those of a `ditfleet up` (--data).");
  const auto add = [&](const char* name, const char* what, Result<int> (*action)(const CacheFlags&, Opened&),
                       bool filters) {
    auto flags = std::make_shared<CacheFlags>();
    auto* sub = command->add_subcommand(name, what);
    add_configuration_flags(*sub, flags->sources);
    sub->add_option("--data", flags->data, "Data folder of a `ditfleet up`; uses its configuration")->type_name("DIR");
    sub->add_flag("--json", flags->json, "Print JSON");
    if (std::string_view(name) != "stats")
      sub->add_option("--tier", flags->tier, "disk, redis or all")
          ->check(CLI::IsMember({"disk", "redis", "all"}))
          ->capture_default_str();
    if (filters) {
      sub->add_option("--arch", flags->arch, "Only programs for this architecture, for example sm_90a");
      sub->add_option("--key", flags->key, "Only the program with this key")->type_name("HEX");
    }
    if (std::string_view(name) == "list") sub->add_flag("--bad", flags->bad, "Only invalid entries");
    if (std::string_view(name) == "purge")
      sub->add_flag("--bad", flags->bad, "Only invalid entries, except those that another secret signed");
    sub->callback([flags, action, name, &run] {
      run = [flags, action, name] {
        const std::string full = "cache " + std::string(name);
        auto opened = open(*flags);
        if (!opened) return report(full, opened.error());
        auto done = action(*flags, *opened);
        return done ? *done : report(full, done.error());
      };
    });
  };
  add("stats", "Show the size of the cache on disk and in Redis", stats, false);
  add("list", "List the programs with their region, architecture, kernels and size", list, true);
  add("verify", "Check every program on disk and in Redis' index; exit 1 if one is invalid", verify, false);
  add("purge", "Remove programs; running workers keep what they have loaded", purge, true);
}

}  // namespace ditfleet::cli
