// `ditfleet loras {add,list,show,remove,pin,unpin}`: a tenant's LoRA adapters.
#include <fmt/format.h>

#include <memory>
#include <vector>

#include "coordinator/cli/command.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"
#include "shared/safetensors/peft_folder.h"

namespace ditfleet::cli {
namespace {

struct LoraFlags {
  Target target;
  std::string name, file, tenant;
  std::vector<std::string> models;
  bool by_path = false, pin = false, keep = false;
};

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
  const auto value = static_cast<double>(bytes);
  return bytes < 1'000'000 ? fmt::format("{:.1f} kB", value / 1e3) : fmt::format("{:.1f} MB", value / 1e6);
}

bool is_pinned(const json::value& lora) { return field(lora, "pinned").is_bool() && field(lora, "pinned").get_bool(); }

// "304 layers, for dev,schnell\n"
std::string fits_text(const json::value& lora) {
  const std::string layers = text(lora, "layers");
  if (layers.empty()) return {};
  const std::string fits =
      field(lora, "fits").is_array() ? names(lora, "fits", "no configured model") : "models unknown";
  return layers + (layers == "1" ? " layer, for " : " layers, for ") + fits + "\n";
}

Result<void> done(const LoraFlags& flags, const Result<json::value>& answer, const char* what) {
  return print_answer(flags.target, answer, [what](const json::value& lora) {
    std::string out = fmt::format("{} {}  {}  {}\n", what, text(lora, "name"), size_text(integer(lora, "bytes")),
                                  text(lora, "sha256"));
    return std::string_view(what) == "added" ? out + fits_text(lora) : out;
  });
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
  const auto file = safetensors::open_adapter(flags.file);
  if (!file) return file.error();
  return done(flags,
              client.send_file("PUT", route(flags, true, parameters), file->file, headers, {file->head, file->begins}),
              "added");
}

std::string loras_table(const json::value& answer) {
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "SIZE", "RANK", "DTYPE", "MODELS", "PINNED", "CREATED", "SHA256"}};
  for (const json::value& lora : items(answer, "loras")) {
    rows.push_back({text(lora, "name"), size_text(integer(lora, "bytes")), text(lora, "rank"), text(lora, "dtype"),
                    names(lora, "models", "any"), is_pinned(lora) ? "yes" : "", ago(integer(lora, "created_ms")),
                    text(lora, "sha256").substr(0, 12)});
  }
  return table(rows);
}

Result<void> list(const LoraFlags& flags) {
  return print_answer(flags.target, HttpClient(flags.target).json("GET", route(flags, false)), loras_table);
}

std::string lora_text(const json::value& lora) {
  const std::string path = text(lora, "path"), rank = text(lora, "rank");
  return fmt::format(
      "{}{}\nsha256   {}\nsize     {}, {} tensors, {} parameters in {}\nrank     {}\nmodels   {}\nsource   {}\n"
      "created  {}\n{}",
      text(lora, "name"), is_pinned(lora) ? "  pinned" : "", text(lora, "sha256"), size_text(integer(lora, "bytes")),
      text(lora, "tensors"), text(lora, "parameters"), text(lora, "dtype"), rank.empty() ? "unknown" : rank,
      names(lora, "models", "any"), path.empty() ? "an upload" : path, ago(integer(lora, "created_ms")),
      fits_text(lora));
}

Result<void> show(const LoraFlags& flags) {
  return print_answer(flags.target, HttpClient(flags.target).json("GET", route(flags, true)), lora_text);
}

Result<void> remove(const LoraFlags& flags) {
  return done(flags, HttpClient(flags.target).json("DELETE", route(flags, true)), "removed");
}

Result<void> set_pinned(const LoraFlags& flags, bool pinned) {
  const auto body = json::serialize(json::object{{"pinned", pinned}});
  return done(flags, HttpClient(flags.target).json("PATCH", route(flags, true), body), pinned ? "pinned" : "unpinned");
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
      sub->add_option("file", flags->file, "A safetensors file, or a folder of PEFT")->required();
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
        return run_on("loras " + std::string(name), flags->target, [&] { return action(*flags); });
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
