#include "shared/config/settings.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <utility>

#include "shared/config/lists.h"
#include "shared/config/model_path.h"
#include "shared/config/options.h"
#include "shared/config/sources.h"
#include "shared/core/bytes.h"
#include "shared/core/certificate.h"
#include "shared/core/ids.h"
#include "shared/core/listen_address.h"
#include "shared/core/nearest_name.h"
#include "shared/core/sha256.h"
#include "shared/core/text.h"
#include "shared/redis/endpoint.h"

namespace ditfleet::config {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kKeyFields = {"tenant", "sha256", "admin"};

// Expands "~/x", and makes a relative path relative to `base`: the configuration file's folder or, for other sources,
// the working directory. An empty base keeps relative paths.
std::string resolve_path(const std::string& path, const std::string& base) {
  if (path.empty()) return path;
  if (path == "~" || path.starts_with("~/")) {
    const char* home = std::getenv("HOME");
    return home ? home + path.substr(1) : path;
  }
  if (base.empty() || fs::path(path).is_absolute()) return path;
  return (fs::path(base) / path).lexically_normal().string();
}

std::string resolve(const Option& option, const std::string& value, const std::string& base) {
  // The name of a compiler is searched in PATH.
  const bool program = option.key == "compile.cxx" && value.find('/') != std::string::npos;
  if (option.form == Form::kPath || program) return resolve_path(value, base);
  if (option.form != Form::kPaths) return value;
  std::string out;
  for (const auto path : split(value, ':')) out += (out.empty() ? "" : ":") + resolve_path(std::string(path), base);
  return out;
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys;
  for (const Option& option : options()) keys.emplace_back(option.key);
  for (const char* key : {"models", "tenants", "keys", "compile.rules", "worker.warmup_classes"})
    keys.emplace_back(key);
  return keys;
}

Error wrong(const Assignment& a, const std::string& message) { return invalid_argument(a.where + ": " + message); }

// Suggests the nearest key: in another section, of the whole table, in the same section, or the nearest section.
Error unknown_key(const Assignment& a) {
  std::vector<std::string> candidates;
  std::set<std::string> sections;
  for (const std::string& key : known_keys()) {
    const auto dot = key.find('.');
    sections.insert(key.substr(0, dot));
    if (dot != std::string::npos && key.substr(0, dot) == a.path.front()) candidates.push_back(key);
  }
  if (!candidates.empty() && a.path.size() == 1) {
    return wrong(a,
                 "'" + a.key() + "' is a section, not a value; it contains " + candidates.front() + " and other keys");
  }
  std::string hint;
  for (const std::string& key : known_keys()) {  // the right key in the wrong section
    const auto dot = key.find('.');
    if (dot != std::string::npos && key.substr(dot + 1) == a.path.back()) hint = "; did you mean '" + key + "'?";
  }
  if (const std::string near = nearest_name(a.key(), known_keys()); hint.empty() && !near.empty()) {
    const bool variable = a.where.starts_with("DITFLEET_");
    hint = "; did you mean '" + (variable ? environment_name(near) : near) + "'?";
  }
  if (hint.empty() && !candidates.empty()) hint = suggestion(a.key(), candidates);
  if (hint.empty()) hint = suggestion(a.path.front(), {sections.begin(), sections.end()});
  return wrong(a, "unknown key '" + a.key() + "'" + hint);
}

Result<void> apply_model(const Assignment& a, const std::string& base, Settings& settings) {
  if (a.path.size() < 2)
    return wrong(a, "'models' is '" + a.value +
                        "'; it must be a map, such as \"models:\" and below it \"  NAME: {path: FOLDER}\"");
  const std::string leaf = a.path.size() > 2 ? a.path[2] : "path";
  std::vector<std::string> leaves{"path", "quantize", "vae_dtype", "attention", "objective_s"};
  leaves.insert(leaves.end(), std::begin(kFileComponents), std::end(kFileComponents));
  if (std::find(leaves.begin(), leaves.end(), leaf) == leaves.end() || (a.path.size() > 3 && leaf != "quantize"))
    return wrong(a, "unknown key '" + a.key() + "'" + suggestion(leaf, leaves));
  if (const auto named = check_model_name(a.path[1]); !named) return wrong(a, named.error().message);
  ModelSetting& model = settings.models[a.path[1]];
  if (a.path.size() == 4) {
    if (a.value.empty()) return wrong(a, "'" + a.key() + "' is empty; it must be a format, such as fp8 or nf4");
    model.quantize[a.path[3]] = a.value;
  } else if (leaf == "quantize") {
    auto formats = parse_quantize(a.value);
    if (!formats) return wrong(a, a.key() + ": " + formats.error().message);
    model.quantize = std::move(*formats);
  } else if (leaf == "vae_dtype") {
    if (a.value != "fp32" && a.value != "bf16")
      return wrong(a, "'" + a.key() + "' is '" + a.value + "'; it must be fp32 or bf16");
    model.vae_dtype = a.value;
  } else if (leaf == "attention") {
    if (a.value != "fp8") return wrong(a, "'" + a.key() + "' is '" + a.value + "'; it must be fp8, or be left out");
    model.attention = a.value;
  } else if (leaf == "objective_s") {
    const auto seconds = number_of(a.value, 0.0, 1e6);
    if (!seconds) return wrong(a, "'" + a.key() + "' is '" + a.value + "'; it must be a number from 0 to 1000000");
    model.objective_s = *seconds;
  } else if (a.value.empty()) {
    return wrong(a, "'" + a.key() + "' is empty; it must be a " +
                        (leaf == "path" ? "model folder in diffusers' layout" : "safetensors or GGUF file"));
  } else {
    const auto path = model_path(a.value);
    if (!path) return wrong(a, path.error().message);
    (leaf == "path" ? model.path : model.files[leaf]) = resolve_path(*path, base);
  }
  return {};
}

// "queued_units", "webhook_url" or "s3_inputs"
const Option* tenant_option(const std::string& name) {
  if (name == "s3_inputs") return find_option("results.s3.inputs");
  if (name == "webhook_url" || name == "webhook_hosts") return find_option("webhooks." + name.substr(8));
  return find_option("quotas." + name);
}

// With the tenant's own values.
Settings settings_of(const Settings& settings, const std::string& tenant) {
  Settings out;
  out.quotas = settings.quotas;
  out.webhooks = settings.webhooks;
  out.results.s3.inputs = settings.results.s3.inputs;
  if (const auto found = settings.tenants.find(tenant); found != settings.tenants.end())
    for (const auto& [name, value] : found->second.own) (void)assign(*tenant_option(name), value, out);
  return out;
}

bool has_own(const Settings& settings, const std::string& tenant) {
  const auto found = settings.tenants.find(tenant);
  return found != settings.tenants.end() && !found->second.own.empty();
}

Result<void> apply_tenant(const Assignment& a, Settings& settings) {
  const Option* quota = a.path.size() == 3 ? tenant_option(a.path[2]) : nullptr;
  if (!quota && (a.path.size() != 3 || a.path[2] != "weight"))
    return wrong(a, "unknown key '" + a.key() + "'; did you mean tenants.NAME.weight?");
  if (!is_valid_id(a.path[1]))
    return wrong(a, "tenant name '" + a.path[1] + "' must be 1 to 64 characters of A-Z a-z 0-9 . _ -");
  if (quota) {
    Settings checked;
    if (auto r = assign(*quota, a.value, checked); !r) return wrong(a, a.key() + " " + r.error().message);
    settings.tenants[a.path[1]].own[a.path[2]] = value_text(*quota, checked);
    return {};
  }
  const auto weight = number_of(a.value, 0.001, 1000.0);
  if (!weight) return wrong(a, "'" + a.key() + "' is '" + a.value + "'; it must be a number from 0.001 to 1000");
  settings.tenants[a.path[1]].weight = *weight;
  return {};
}

Result<void> apply_key(const Assignment& a, Settings& settings) {
  if (a.path.size() != 3) return wrong(a, "'keys' can only be set in the file, as a list of {tenant, sha256}");
  const auto index = number_of<std::size_t>(a.path[1], 0, settings.keys.size());
  if (!index) return wrong(a, "'" + a.key() + "' has no such index");
  if (*index == settings.keys.size()) settings.keys.emplace_back();
  ApiKey& key = settings.keys[*index];
  if (a.path[2] == "tenant") {
    if (!is_valid_id(a.value))
      return wrong(a, "tenant '" + a.value + "' must be 1 to 64 characters of A-Z a-z 0-9 . _ -");
    key.tenant = a.value;
  } else if (a.path[2] == "sha256") {
    if (!is_sha256_hex(a.value)) {
      return wrong(a, "'" + a.key() +
                          "' must be the key's SHA-256, 64 lower-case hexadecimal digits (printf %s \"$KEY\" "
                          "| sha256sum)");
    }
    key.sha256 = a.value;
  } else if (a.path[2] == "admin") {
    if (a.value != "true" && a.value != "false")
      return wrong(a, "'" + a.key() + "' is '" + a.value + "'; it must be true or false");
    key.admin = a.value == "true";
  } else {
    return wrong(a, "unknown key '" + a.key() + "'" + suggestion(a.path[2], kKeyFields));
  }
  return {};
}

Result<void> apply(const Assignment& a, const std::string& base, Settings& settings) {
  if (!a.problem.empty()) return wrong(a, a.problem);
  const std::string& section = a.path.front();
  if (section == "models") return apply_model(a, base, settings);
  if (section == "tenants") return apply_tenant(a, settings);
  if (section == "keys") return apply_key(a, settings);
  if (is_list_path(a.path)) return apply_list(a, settings);
  // An option of earlier versions. Files that `ditfleet config show` has written contain it.
  if (a.key() == "compile.components.text_encoders")
    return a.value == "false" ? Result<void>() : wrong(a, a.key() + " was removed: text encoders are not compiled");
  const Option* option = find_option(a.key());
  if (!option) return unknown_key(a);
  if (auto r = assign(*option, resolve(*option, a.value, base), settings); !r)
    return wrong(a, std::string(option->key) + " " + r.error().message);
  return {};
}

// Rules across options.
Result<void> check_whole(const Settings& s) {
  if (s.queue.renew_ms * 2 > s.queue.lease_ms) {
    return invalid_argument("queue.renew_ms is " + std::to_string(s.queue.renew_ms) + " and queue.lease_ms " +
                            std::to_string(s.queue.lease_ms) +
                            "; the lease must be at least twice as long, to survive one lost renewal");
  }
  if (s.queue.retry_backoff_ms > s.queue.retry_backoff_max_ms) {
    return invalid_argument("queue.retry_backoff_ms is " + std::to_string(s.queue.retry_backoff_ms) +
                            ", more than queue.retry_backoff_max_ms (" + std::to_string(s.queue.retry_backoff_max_ms) +
                            ")");
  }
  if (const auto metrics = ListenAddress::parse(s.worker.metrics_listen);
      metrics && metrics->port != 0 && s.worker.count > 1 && metrics->port + s.worker.count - 1 > 65535) {
    return invalid_argument("worker.metrics_listen is '" + s.worker.metrics_listen + "' and worker.count " +
                            std::to_string(s.worker.count) +
                            "; ports are assigned consecutively and end at 65535, so start at " +
                            std::to_string(65536 - s.worker.count) + " or below");
  }
  if (!s.cache.secret.empty() && !s.cache.secret_file.empty())
    return invalid_argument("cache.secret and cache.secret_file are both set; set only one");
  if (s.cache.wait_ms != 0 && s.cache.wait_ms < 2 * s.cache.lock_ms) {
    return invalid_argument(
        "cache.wait_ms is " + std::to_string(s.cache.wait_ms) + " and cache.lock_ms " +
        std::to_string(s.cache.lock_ms) +
        "; the wait must be 0 (off) or at least twice as long as the lock, to outlive the lock of a dead process");
  }
  if (!s.default_model.empty() && !s.models.contains(s.default_model)) {
    std::vector<std::string> names;
    for (const auto& [name, model] : s.models) names.push_back(name);
    return invalid_argument("default_model is '" + s.default_model + "', which is not in models" +
                            suggestion(s.default_model, names));
  }
  for (const auto& [name, model] : s.models) {
    if (model.path.empty())
      return invalid_argument("models." + name + ".path is missing; it must be a model folder in diffusers' layout");
  }
  if (auto r = check_lists(s); !r) return r;
  std::set<std::string> hashes;
  for (std::size_t i = 0; i < s.keys.size(); ++i) {
    const std::string at = "keys." + std::to_string(i);
    if (s.keys[i].tenant.empty()) return invalid_argument(at + " has no tenant");
    if (s.keys[i].sha256.empty()) return invalid_argument(at + " has no sha256");
    if (!hashes.insert(s.keys[i].sha256).second)
      return invalid_argument(at + " has the same sha256 as an earlier key; each key must belong to one tenant");
  }
  return {};
}

// Appends every error, so that all can be corrected at once.
void apply_all(const Result<std::vector<Assignment>>& list, const std::string& base, Settings& settings,
               std::vector<Error>& errors) {
  if (!list) errors.push_back(list.error());
  for (const Assignment& a : list ? *list : std::vector<Assignment>())
    if (auto r = apply(a, base, settings); !r) errors.push_back(r.error());
}

Result<Settings> checked(Settings settings, const std::vector<Error>& errors) {
  if (errors.empty()) {
    if (auto r = check_whole(settings); !r) return r.error();
    return settings;
  }
  Error all = errors.front();
  for (std::size_t i = 1; i < errors.size(); ++i) all.message += "\n" + errors[i].message;
  return all;
}

}  // namespace

Result<void> check_model_name(const std::string& name) {
  if (!name.empty() && name.size() <= 64 && is_valid_utf8(name) &&
      name.find_first_of(" \t\r\n:/|{}\"'\\") == std::string::npos)
    return {};
  return invalid_argument("model name '" + name +
                          "' must have 1 to 64 characters, without spaces, colons, slashes, bars, quotes or braces");
}

Result<std::map<std::string, std::string>> parse_quantize(std::string_view text) {
  if (text == "auto") return std::map<std::string, std::string>{{"*", "auto"}};
  std::map<std::string, std::string> formats;
  while (!text.empty()) {
    const auto comma = std::min(text.find(','), text.size());
    const std::string_view one = text.substr(0, comma);
    const auto equals = one.find('=');
    if (equals == 0 || equals == std::string_view::npos || equals + 1 == one.size() ||
        !formats.emplace(one.substr(0, equals), one.substr(equals + 1)).second)
      return invalid_argument("quantize has '" + std::string(one) +
                              "'; it must be COMPONENT=FORMAT,… with each component once, such as "
                              "transformer=fp8,text_encoder_2=nf4, or auto");
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return formats;
}

Result<Settings> load(const Sources& sources) {
  Settings settings;
  std::vector<Error> errors;
  std::error_code ec;
  const fs::path here = fs::current_path(ec);
  if (!sources.file.empty()) {
    const auto text = sources.text ? Result<std::string>(*sources.text) : read_file(sources.file);
    if (!text) return Error{text.error().code, "cannot read the configuration: " + text.error().message};
    apply_all(from_yaml(*text, sources.file), (here / sources.file).parent_path().string(), settings, errors);
  }
  if (sources.environment) apply_all(from_environment(), here.string(), settings, errors);
  apply_all(from_sets(sources.sets), here.string(), settings, errors);
  return checked(std::move(settings), errors);
}

Quotas quotas_of(const Settings& settings, const std::string& tenant) {
  return has_own(settings, tenant) ? settings_of(settings, tenant).quotas : settings.quotas;
}

Webhooks webhooks_of(const Settings& settings, const std::string& tenant) {
  return has_own(settings, tenant) ? settings_of(settings, tenant).webhooks : settings.webhooks;
}

std::string s3_inputs_of(const Settings& settings, const std::string& tenant) {
  return settings_of(settings, tenant).results.s3.inputs;
}

Result<void> check_gateway(const Settings& s) {
  const auto address = ListenAddress::parse(s.gateway.listen, "gateway.listen");
  if (!address) return address.error();
  if (s.keys.empty() && !s.gateway.open && !s.gateway.require_keys && !is_loopback(address->host)) {
    return invalid_argument("gateway.listen is '" + s.gateway.listen +
                            "', which other hosts can reach, but no keys are configured; configure keys, set "
                            "gateway.require_keys to true if Redis has keys, or set gateway.open to true to let "
                            "everybody who reaches the gateway act as administrator");
  }
  if (s.gateway.tls_cert_file.empty() != s.gateway.tls_key_file.empty())
    return invalid_argument("only one of gateway.tls_cert_file and gateway.tls_key_file is set; set both or neither");
  if (s.redis.tls_cert_file.empty() != s.redis.tls_key_file.empty())
    return invalid_argument("only one of redis.tls_cert_file and redis.tls_key_file is set; set both or neither");
  return {};
}

std::int64_t silent_after_ms(const Settings& settings) { return 3 * settings.worker.heartbeat_ms + 500; }

Result<redis::Endpoint> redis_endpoint(const Settings& settings) {
  auto endpoint = redis::Endpoint::parse(settings.redis.url);
  if (!endpoint) return endpoint.error();
  endpoint->tls_ca_file = settings.redis.tls_ca_file;
  endpoint->tls_verify = settings.redis.tls_verify;
  endpoint->sentinel_user = settings.redis.sentinel_user;
  endpoint->sentinel_password = settings.redis.sentinel_password;
  if (!endpoint->tls || settings.redis.tls_cert_file.empty()) return endpoint;
  endpoint->tls_cert_file = settings.redis.tls_cert_file;
  endpoint->tls_key_file = settings.redis.tls_key_file;
  if (auto good = check_certificate("redis", endpoint->tls_cert_file, endpoint->tls_key_file); !good)
    return good.error();
  return endpoint;
}

std::string data_folder(const Settings& settings) {
  if (!settings.data.dir.empty()) return settings.data.dir;
  if (const char* state = std::getenv("XDG_STATE_HOME"); state && *state) return std::string(state) + "/ditfleet";
  if (const char* home = std::getenv("HOME"); home && *home) return std::string(home) + "/.local/state/ditfleet";
  return {};
}

Result<Settings> load_text(std::string_view yaml, const std::string& name) {
  Settings settings;
  std::vector<Error> errors;
  apply_all(from_yaml(yaml, name), {}, settings, errors);
  return checked(std::move(settings), errors);
}

}  // namespace ditfleet::config
