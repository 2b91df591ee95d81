// `ditfleet redis acl`: the permissions that each kind of process needs in Redis.
#include <cstdio>

#include "coordinator/cli/command.h"
#include "shared/core/text.h"
#include "shared/queue/library.h"

namespace ditfleet::cli {
namespace {

// Redis checks the commands of a Function and of a script against the user who calls it, too. Names are separated by
// spaces.
struct Role {
  std::string_view name;
  std::string_view keys;      // patterns; %R~ permits only reading
  std::string_view channels;  // patterns
  std::string_view commands;  // names; "a|b" is the subcommand b
  std::string_view writing;   // Functions for FCALL
  std::string_view reading;   // Functions for FCALL_RO
};

constexpr Role kRoles[] = {
    {"coordinator", "~df:{0}:* ~df:{lora}:* ~df:{keys}", "&df:{0}:feed &df:{0}:steps",
     "cluster|info del eval exists function|load get getex getrange hdel hexists hget hgetall hincrby hkeys hlen "
     "hmget hscan hset hsetnx incr info persist pexpire ping pttl publish sadd select set sismember smembers "
     "smismember srem strlen subscribe time unlink wait xadd xdel xlen xrange xread xrevrange xsetid xtrim zadd "
     "zcard zmscore zrange zrangebyscore zrem zremrangebyrank zrevrangebyscore zscore",
     "admit admit_raw assign cancel expire_inputs keep_input lead mend pause reap reject remove_input resign resume "
     "revoke submit sweep sweep_led virtual_times",
     "due events job list open version workers"},
    {"worker",
     "~df:{0}:batch:* ~df:{0}:blob:* ~df:{0}:checkpoint:* ~df:{0}:dead ~df:{0}:deadline ~df:{0}:delayed "
     "~df:{0}:desired:* ~df:{0}:events ~df:{0}:format ~df:{0}:gone:* ~df:{0}:hooked ~df:{0}:input_of "
     "~df:{0}:input_refs ~df:{0}:job:* ~df:{0}:kernel:* ~df:{0}:kernels ~df:{0}:last ~df:{0}:lease ~df:{0}:mbox:* "
     "~df:{0}:open ~df:{0}:outbox ~df:{0}:paused ~df:{0}:preview:* ~df:{0}:ready ~df:{0}:specs ~df:{0}:units "
     "~df:{0}:usage:* ~df:{0}:use ~df:{0}:watched ~df:{0}:worker:* ~df:{0}:workers %R~df:{0}:input:* %R~df:{lora}:*",
     "&df:{0}:feed &df:{0}:steps",
     "cluster|info del eval exists get getex getrange hdel hexists hget hgetall hincrby hmget hset pexpire ping "
     "publish sadd select set sismember srem time unlink xadd xdel xrange xread zadd zrem zremrangebyscore",
     "canceled complete deregister emit fail hand_back heartbeat hold renew start store_checkpoint", "version"},
    {"producer",
     "~df:{0}:in %R~df:{0}:blob:* %R~df:{0}:events %R~df:{0}:format %R~df:{0}:job:* %R~df:{0}:last %R~df:{0}:open "
     "%R~df:{0}:paused %R~df:{0}:specs %R~df:{0}:units",
     "&df:{0}:feed &df:{0}:steps",
     "get hget hgetall hmget ping select sismember strlen subscribe unsubscribe wait xadd xrange xread", "",
     "events job"},
    {"observer",
     "%R~df:{0}:dead %R~df:{0}:deadline %R~df:{0}:delayed %R~df:{0}:desired:* %R~df:{0}:events %R~df:{0}:format "
     "%R~df:{0}:history %R~df:{0}:in %R~df:{0}:job:* %R~df:{0}:jobs %R~df:{0}:last %R~df:{0}:leader %R~df:{0}:lease "
     "%R~df:{0}:open %R~df:{0}:paused %R~df:{0}:ready %R~df:{0}:specs %R~df:{0}:units %R~df:{0}:worker:* "
     "%R~df:{0}:workers",
     "&df:{0}:feed &df:{0}:steps",
     "exists get hget hgetall hlen hmget hscan info ping select sismember subscribe time ttl type unsubscribe xlen "
     "xrange xread xrevrange zcard zrange zrangebyscore zscore",
     "", "events job list version workers"},
};

std::string role_names(std::string_view separator) {
  std::string names;
  for (const Role& role : kRoles) names.append(names.empty() ? "" : separator).append(role.name);
  return names;
}

std::string rule_of(const Role& role, const std::string& user) {
  std::string rule = "ACL SETUSER " + user + " on resetkeys resetchannels -@all";
  rule.append(" ").append(role.keys).append(" ").append(role.channels);
  const auto permit = [&rule](std::string_view names, const std::string& before) {
    for (const std::string_view name : split(names, ' ')) rule.append(" +" + before).append(name);
  };
  const std::string library(queue::kLibraryName);
  permit(role.commands, "");
  permit(role.writing, "fcall|" + library + "_");
  permit(role.reading, "fcall_ro|" + library + "_");
  return rule;
}

}  // namespace

void add_redis(CLI::App& app, Invocation& run) {
  auto* group = app.add_subcommand("redis", "Permissions in Redis");
  group->require_subcommand(1);
  struct Flags {
    std::string role, user;
  };
  auto flags = std::make_shared<Flags>();
  auto* command = group->add_subcommand(
      "acl", "Print the command ACL SETUSER that gives a user the permissions of a role, for redis-cli");
  command->add_option("--role", flags->role, "What the user's processes are: " + role_names(", "))->required();
  command->add_option("--user", flags->user, "Name of the user; default: ditfleet-ROLE");
  command->callback([flags, &run] {
    run = [flags] {
      for (const Role& role : kRoles) {
        if (role.name != flags->role) continue;
        const std::string user = flags->user.empty() ? "ditfleet-" + flags->role : flags->user;
        if (user.find_first_of(" \t\r\n\"'") != std::string::npos)
          return report("redis acl", invalid_argument("--user must be a name without spaces and quotes"));
        std::printf("%s\n", rule_of(role, user).c_str());
        return kExitOk;
      }
      return report("redis acl",
                    invalid_argument("--role is '" + flags->role + "'; it must be one of " + role_names(", ")));
    };
  });
}

}  // namespace ditfleet::cli
