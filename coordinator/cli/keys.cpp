// For administrators: `ditfleet keys {add,list,rotate,revoke}`, the service's bearer keys, and `ditfleet tenants`.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"

namespace ditfleet::cli {
namespace {

struct KeyFlags {
  Target target;
  std::string word;  // the tenant or the key's id
  bool admin = false;
};

constexpr const char* kNoKeys =
    "no keys: everybody who reaches the service is an administrator; `ditfleet keys add NAME --admin` adds the first\n";

std::string tenants_table(const json::value& answer) {
  if (items(answer, "tenants").empty()) return kNoKeys;
  constexpr const char* kQuotas[] = {"queued_units", "queued_bytes", "adapters",   "adapter_bytes",
                                     "streams",      "inputs",       "input_bytes"};
  std::vector<std::vector<std::string>> rows = {{"TENANT", "QUEUED UNITS", "QUEUED BYTES", "ADAPTERS", "ADAPTER BYTES",
                                                 "STREAMS", "IMAGES", "IMAGE BYTES", "GPU TIME"}};
  for (const json::value& tenant : items(answer, "tenants")) {
    rows.push_back({text(tenant, "tenant")});
    for (const char* name : kQuotas) {
      const std::string quota = text(field(tenant, name), "quota");
      rows.back().push_back(text(field(tenant, name), "used") + (quota.empty() ? "" : " of " + quota));
    }
    const json::value& seconds = field(tenant, "gpu_seconds_this_month");
    rows.back().push_back(fmt::format("{:.1f} s", seconds.is_number() ? seconds.to_number<double>() : 0));
  }
  return table(rows);
}

std::string keys_table(const json::value& answer) {
  if (items(answer, "keys").empty()) return kNoKeys;
  std::vector<std::vector<std::string>> rows = {{"ID", "TENANT", "ADMIN", "SOURCE", "CREATED"}};
  for (const json::value& key : items(answer, "keys")) {
    rows.push_back({text(key, "id"), text(key, "tenant"), field(key, "admin") == json::value(true) ? "yes" : "",
                    text(key, "source"), ago(integer(key, "created_ms"))});
  }
  return table(rows);
}

std::string key_line(const json::value& key) {
  const std::string secret = text(key, "key");
  return "key " + text(key, "id") + " of tenant " + text(key, "tenant") +
         (secret.empty() ? " is revoked\n" : "; it is shown only now:\n" + secret + "\n");
}

Result<void> act(const std::string& action, const KeyFlags& flags) {
  const std::string key = "/v1/keys/" + percent_encoded(flags.word);
  HttpClient client(flags.target);
  const auto answer = action == "tenants"  ? client.json("GET", "/v1/tenants")
                      : action == "list"   ? client.json("GET", "/v1/keys")
                      : action == "rotate" ? client.json("POST", key + "/rotate")
                      : action == "revoke"
                          ? client.json("DELETE", key)
                          : client.json("POST", "/v1/keys",
                                        json::serialize(json::object{{"tenant", flags.word}, {"admin", flags.admin}}));
  if (!answer && answer.error().param == "admin")
    return invalid_argument("the first key must be an administrator's, who adds the others; add --admin");
  return print_answer(flags.target, answer,
                      action == "tenants" ? tenants_table
                      : action == "list"  ? keys_table
                                          : key_line);
}

void add_command(CLI::App& parent, Invocation& run, const std::string& name, const char* what, const char* word) {
  auto flags = std::make_shared<KeyFlags>();
  auto* command = parent.add_subcommand(name, what);
  add_target_flags(*command, flags->target);
  if (*word) command->add_option(word, flags->word)->required();
  if (name == "add") command->add_flag("--admin", flags->admin, "An administrator's key");
  command->callback([flags, name, &run] {
    run = [flags, name] {
      return run_on(name == "tenants" ? name : "keys " + name, flags->target, [&] { return act(name, *flags); });
    };
  });
}

}  // namespace

void add_keys(CLI::App& app, Invocation& run) {
  auto* keys = app.add_subcommand("keys", "The service's bearer keys: add, list, rotate, revoke");
  keys->require_subcommand(1);
  add_command(*keys, run, "add", "Add a key and print it; the first one must be an administrator's", "tenant");
  add_command(*keys, run, "list", "List keys, without the keys themselves", "");
  add_command(*keys, run, "rotate", "Replace a key by a new one; the old one stops working", "id");
  add_command(*keys, run, "revoke", "Revoke a key on every gateway, within seconds", "id");
  add_command(app, run, "tenants", "List what each tenant uses of its quotas", "");
}

}  // namespace ditfleet::cli
