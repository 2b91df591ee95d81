// `ditfleet loras {add,list,show,remove,pin,unpin}`: a tenant's LoRA adapters.
#include <cstdio>
#include <memory>
#include <vector>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"

namespace ditfleet::cli {
namespace {

struct LoraFlags {
  Target target;
  std::string name, file, tenant;
  std::vector<std::string> models;
  bool by_path = false, pin = false, keep = false;
};

void print(const json::value& value) { std::printf("%s\n", json::serialize(value).c_str()); }

// "/v1/loras/NAME?tenant=T&model=M"
std::string route(const LoraFlags& flags, bool with_name, const std::vector<std::string>& parameters = {}) {
  std::string out = "/v1/loras" + (with_name ? "/" + percent_encoded(flags.name) : std::string());
  char mark = '?';
  const auto add = [&](const std::string& parameter) {
    out += mark + parameter;
    mark = '&';
  };
  if (!flags.tenant.empty()) add("tenant=" + percent_encoded(flags.tenant));
  for (const std::string& parameter : parameters) add(parameter);
  return out;
}

std::string size_text(std::int64_t bytes) {
  char text[32];
  if (bytes < 1'000'000)
    std::snprintf(text, sizeof text, "%.1f kB", static_cast<double>(bytes) / 1e3);
  else
    std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

std::string names_of(const json::value& list, const char* none) {
  std::string out;
  for (const json::value& one : list.is_array() ? list.get_array() : json::array()) {
    if (one.is_string()) out += (out.empty() ? "" : ",") + std::string(one.get_string());
  }
  return out.empty() ? none : out;
}

bool is_pinned(const json::value& lora) { return field(lora, "pinned").is_bool() && field(lora, "pinned").get_bool(); }

Result<void> done(const LoraFlags& flags, const Result<json::value>& answer, const char* what) {
  if (!answer) return answer.error();
  if (flags.target.json)
    print(*answer);
  else
    std::printf("%s %s  %s  %s\n", what, text(*answer, "name").c_str(), size_text(integer(*answer, "bytes")).c_str(),
                text(*answer, "sha256").c_str());
  return {};
}

Result<void> add(const LoraFlags& flags) {
  HttpClient client(flags.target);
  const std::vector<std::string> headers =
      flags.keep ? std::vector<std::string>{"If-None-Match: *"} : std::vector<std::string>();
  if (flags.by_path) {
    json::array models;
    for (const std::string& model : flags.models) models.emplace_back(model);
    const json::object body{{"path", flags.file}, {"models", std::move(models)}, {"pinned", flags.pin}};
    return done(flags, client.json("PUT", route(flags, true), json::serialize(body), headers), "added");
  }
  const InterruptGuard guard;
  std::vector<std::string> parameters;
  for (const std::string& model : flags.models) parameters.push_back("model=" + percent_encoded(model));
  if (flags.pin) parameters.push_back("pinned=true");
  return done(flags, client.send_file("PUT", route(flags, true, parameters), flags.file, headers), "added");
}

Result<void> list(const LoraFlags& flags) {
  HttpClient client(flags.target);
  const auto answer = client.json("GET", route(flags, false));
  if (!answer) return answer.error();
  if (flags.target.json) {
    print(*answer);
    return {};
  }
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "SIZE", "RANK", "DTYPE", "MODELS", "PINNED", "CREATED", "SHA256"}};
  for (const json::value& lora : items(*answer, "loras")) {
    rows.push_back({text(lora, "name"), size_text(integer(lora, "bytes")), text(lora, "rank"), text(lora, "dtype"),
                    names_of(field(lora, "models"), "any"), is_pinned(lora) ? "yes" : "",
                    ago(integer(lora, "created_ms")), text(lora, "sha256").substr(0, 12)});
  }
  std::fputs(table(rows).c_str(), stdout);
  return {};
}

Result<void> show(const LoraFlags& flags) {
  HttpClient client(flags.target);
  const auto lora = client.json("GET", route(flags, true));
  if (!lora) return lora.error();
  if (flags.target.json) {
    print(*lora);
    return {};
  }
  const std::string path = text(*lora, "path"), rank = text(*lora, "rank");
  std::printf(
      "%s%s\nsha256   %s\nsize     %s, %s tensors, %s parameters in %s\nrank     %s\nmodels   %s\nsource   %s\ncreated "
      " %s\n",
      text(*lora, "name").c_str(), is_pinned(*lora) ? "  pinned" : "", text(*lora, "sha256").c_str(),
      size_text(integer(*lora, "bytes")).c_str(), text(*lora, "tensors").c_str(), text(*lora, "parameters").c_str(),
      text(*lora, "dtype").c_str(), rank.empty() ? "unknown" : rank.c_str(),
      names_of(field(*lora, "models"), "any").c_str(), path.empty() ? "an upload" : path.c_str(),
      ago(integer(*lora, "created_ms")).c_str());
  return {};
}

Result<void> remove(const LoraFlags& flags) {
  HttpClient client(flags.target);
  return done(flags, client.json("DELETE", route(flags, true)), "removed");
}

Result<void> set_pinned(const LoraFlags& flags, bool pinned) {
  HttpClient client(flags.target);
  return done(flags, client.json("PATCH", route(flags, true), json::serialize(json::object{{"pinned", pinned}})),
              pinned ? "pinned" : "unpinned");
}
Result<void> pin(const LoraFlags& flags) { return set_pinned(flags, true); }
Result<void> unpin(const LoraFlags& flags) { return set_pinned(flags, false); }

}  // namespace

void add_loras(CLI::App& app, Invocation& run) {
  auto* loras = app.add_subcommand("loras", "LoRA adapters: add, list, show, remove, pin");
  loras->require_subcommand(1);
  const auto command = [&](const char* name, const char* what, Result<void> (*action)(const LoraFlags&)) {
    auto flags = std::make_shared<LoraFlags>();
    auto* sub = loras->add_subcommand(name, what);
    add_target_flags(*sub, flags->target);
    sub->add_option("--tenant", flags->tenant, "Tenant that owns the adapters; needs an administrator's key");
    if (action != list) sub->add_option("name", flags->name, "The adapter's name")->required();
    if (action == add) {
      sub->add_option("file", flags->file, "The safetensors file")->required();
      sub->add_flag("--by-path", flags->by_path,
                    "Register FILE instead of uploading it; it must be in loras.folders, where the service and its "
                    "workers read it");
      sub->add_option("--model", flags->models, "A model that the adapter fits; repeatable; default: any")
          ->allow_extra_args(false);
      sub->add_flag("--pin", flags->pin, "Workers never evict it from memory");
      sub->add_flag("--keep", flags->keep, "Fail if the name is taken instead of replacing the adapter");
    }
    sub->callback([flags, action, name, &run] {
      run = [flags, action, name] {
        auto settled = settle(flags->target);
        if (settled) settled = action(*flags);
        return settled ? kExitOk : report("loras " + std::string(name), settled.error());
      };
    });
  };
  command("add", "Upload an adapter, or register a file by its path", add);
  command("list", "List adapters", list);
  command("show", "Show one adapter", show);
  command("remove", "Remove an adapter; waiting jobs that use it fail", remove);
  command("pin", "Pin an adapter: workers that hold it never evict it", pin);
  command("unpin", "Unpin an adapter: workers may evict it again", unpin);
}

}  // namespace ditfleet::cli
