// One table, longer than a file usually is: an option is one row and nowhere else, REFERENCE.md, --help, the
// environment's names and the suggestions for a misspelt key are made from all rows at once, and who looks for an
// option finds it by its key in one place. Parted by section it would need as many files as it has sections, each with
// the same accessors, and an order among them.
#include "shared/config/options.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/http_url.h"
#include "shared/core/listen_address.h"
#include "shared/redis/endpoint.h"

namespace ditfleet::config {
namespace {

constexpr std::int64_t kDayMs = 86'400'000;
constexpr std::int64_t kManyMs = 365 * kDayMs;
constexpr std::int64_t kManyBytes = std::int64_t{1} << 50;

// Places in Settings, as plain function pointers.
#define DITFLEET_AT(member)    \
  +[](Settings & s) -> auto& { \
    return s.member;           \
  }

const Option kOptions[] = {
    {.key = "default_model",
     .at = DITFLEET_AT(default_model),
     .description = "The model of requests that name none; if empty, the only one of models.",
     .form = Form::kName},

    {.key = "gateway.listen",
     .at = DITFLEET_AT(gateway.listen),
     .description = "Address of the HTTP gateway; port 0 picks a free one.",
     .form = Form::kListen},
    {.key = "gateway.max_body_bytes",
     .at = DITFLEET_AT(gateway.max_body_bytes),
     .description = "Largest request body; larger ones get 413.",
     .low = 1024,
     .high = 1 << 30},
    {.key = "gateway.max_connections",
     .at = DITFLEET_AT(gateway.max_connections),
     .description = "Connections open at once; for one more the one that has asked nothing for longest is closed, or, "
                    "where all are at work, it is answered 503. Event streams may be three quarters of them.",
     .low = 1,
     .high = 1'000'000},
    {.key = "gateway.public_url",
     .at = DITFLEET_AT(gateway.public_url),
     .description = "Start of the url fields of results; if empty, from the request's Host.",
     .form = Form::kHttpUrl},
    {.key = "gateway.request_timeout_ms",
     .at = DITFLEET_AT(gateway.request_timeout_ms),
     .description = "How long a synchronous generation may take.",
     .low = 1000,
     .high = kDayMs},

    {.key = "redis.url",
     .at = DITFLEET_AT(redis.url),
     .description = "The queue's Redis; if empty, `ditfleet up` starts a private one.",
     .form = Form::kRedisUrl},
    {.key = "redis.tls_ca_file",
     .at = DITFLEET_AT(redis.tls_ca_file),
     .description = "Certificates that a rediss:// server's must chain to; if empty, the system's.",
     .form = Form::kPath},
    {.key = "redis.tls_verify",
     .at = DITFLEET_AT(redis.tls_verify),
     .description = "Check a rediss:// server's certificate and name."},
    {.key = "redis.appendfsync",
     .at = DITFLEET_AT(redis.appendfsync),
     .description = "When the private Redis syncs its append-only file; with always an acknowledged job "
                    "survives a power cut.",
     .choices = "always|everysec|no"},
    {.key = "redis.maxmemory",
     .at = DITFLEET_AT(redis.maxmemory),
     .description = "Memory limit of the private Redis, as in redis.conf (512mb, 4gb); if empty, none.",
     .form = Form::kMemory},

    {.key = "queue.lease_ms",
     .at = DITFLEET_AT(queue.lease_ms),
     .description = "A worker that is silent this long loses its units.",
     .low = 500,
     .high = kDayMs},
    {.key = "queue.renew_ms",
     .at = DITFLEET_AT(queue.renew_ms),
     .description = "How often workers renew their leases; at most half of queue.lease_ms.",
     .low = 50,
     .high = kDayMs},
    {.key = "queue.max_attempts",
     .at = DITFLEET_AT(queue.max_attempts),
     .description = "Attempts of a unit that ends in errors.",
     .low = 1,
     .high = 100},
    {.key = "queue.max_crashes",
     .at = DITFLEET_AT(queue.max_crashes),
     .description = "Workers that one unit may take down before it is given up.",
     .low = 1,
     .high = 100},
    {.key = "queue.retry_backoff_ms",
     .at = DITFLEET_AT(queue.retry_backoff_ms),
     .description = "Wait before the first retry; doubled each time, with jitter.",
     .low = 0,
     .high = kDayMs},
    {.key = "queue.retry_backoff_max_ms",
     .at = DITFLEET_AT(queue.retry_backoff_max_ms),
     .description = "Longest wait before a retry.",
     .low = 0,
     .high = kDayMs},
    {.key = "queue.retention_ms",
     .at = DITFLEET_AT(queue.retention_ms),
     .description = "How long ended jobs, their events and results are kept.",
     .low = 1000,
     .high = kManyMs},
    {.key = "queue.idempotency_ms",
     .at = DITFLEET_AT(queue.idempotency_ms),
     .description = "How long idempotency keys are remembered; at most until their job is forgotten.",
     .low = 1000,
     .high = kManyMs},
    {.key = "queue.max_queued",
     .at = DITFLEET_AT(queue.max_queued),
     .description = "Units that may wait, as counted once a second; submissions over HTTP beyond it get 429.",
     .low = 1,
     .high = 100'000'000},

    {.key = "scheduler.leader_ttl_ms",
     .at = DITFLEET_AT(scheduler.leader_ttl_ms),
     .description = "A leading coordinator that is silent this long is replaced.",
     .low = 500,
     .high = kDayMs},
    {.key = "scheduler.lookahead",
     .at = DITFLEET_AT(scheduler.lookahead),
     .description = "Units that a worker holds at once, the running one included.",
     .low = 1,
     .high = 64},
    {.key = "scheduler.age_bound_ms",
     .at = DITFLEET_AT(scheduler.age_bound_ms),
     .description = "A unit that waited this long goes first, whatever its priority.",
     .low = 100,
     .high = kManyMs},
    {.key = "scheduler.late_units_yield",
     .at = DITFLEET_AT(scheduler.late_units_yield),
     .description = "A unit that has waited so long that it would end later than nineteen in twenty do lets others of "
                    "its tenant go "
                    "first: once, and one unit in twenty at most. Shortens p95, lengthens p99."},

    {.key = "worker.count",
     .at = DITFLEET_AT(worker.count),
     .description = "Workers that `ditfleet up` starts.",
     .low = 0,
     .high = 256},
    {.key = "worker.name",
     .at = DITFLEET_AT(worker.name),
     .description = "Name of a worker; if empty, host and pid. `ditfleet up` adds -1, -2 … where there are several.",
     .form = Form::kName},
    {.key = "worker.device",
     .at = DITFLEET_AT(worker.device),
     .description = "Where models run: auto (a GPU if there is one), cpu, cuda or cuda:N.",
     .form = Form::kDevice},
    {.key = "worker.dtype",
     .at = DITFLEET_AT(worker.dtype),
     .description = "Precision: auto is bf16 on a GPU and fp32 on a CPU.",
     .choices = "auto|fp32|bf16"},
    {.key = "worker.threads",
     .at = DITFLEET_AT(worker.threads),
     .description = "CPU threads of one operation; 0: the cores divided by worker.count.",
     .low = 0,
     .high = 1024},
    {.key = "worker.heartbeat_ms",
     .at = DITFLEET_AT(worker.heartbeat_ms),
     .description = "How often a worker tells that it is there.",
     .low = 50,
     .high = 60'000},
    {.key = "worker.drain_ms",
     .at = DITFLEET_AT(worker.drain_ms),
     .description = "How long a worker that is asked to end may finish what it runs; what is left is handed back.",
     .low = 0,
     .high = kDayMs},
    {.key = "worker.warmup",
     .at = DITFLEET_AT(worker.warmup),
     .description = "Run one small image of each model after loading it, and worker.warmup_classes, before the worker "
                    "says that it "
                    "is ready."},

    {.key = "worker.metrics_listen",
     .at = DITFLEET_AT(worker.metrics_listen),
     .description = "Address, as 127.0.0.1:9464, where a worker serves its metrics (/metrics): compiles, the kernel "
                    "cache. Of several "
                    "that `ditfleet up` starts each takes the next port. If empty, they are not served.",
     .form = Form::kListenIfAny},

    {.key = "worker.lora.slots",
     .at = DITFLEET_AT(worker.lora.slots),
     .description = "LoRA adapters that each model of a worker holds on its device at once; a request may use as many.",
     .low = 1,
     .high = 64},
    {.key = "worker.lora.max_rank",
     .at = DITFLEET_AT(worker.lora.max_rank),
     .description = "Largest rank of a LoRA adapter at one linear layer; slots have room for it at every one.",
     .low = 1,
     .high = 1024},
    {.key = "worker.lora.together_rank",
     .at = DITFLEET_AT(worker.lora.together_rank),
     .description = "Rank that the adapters used at once, by one request or in one batch, may have in all at one "
                    "linear layer of a compiled "
                    "transformer, which keeps that many columns beside its weights; with more its blocks run op by op. "
                    "At least worker.lora.max_rank.",
     .low = 1,
     .high = 1024},
    {.key = "worker.lora.host_bytes",
     .at = DITFLEET_AT(worker.lora.host_bytes),
     .description = "Host memory in which each model of a worker keeps adapters, ready to be copied into a slot.",
     .low = 1 << 20,
     .high = kManyBytes},
    {.key = "worker.lora.cache_dir",
     .at = DITFLEET_AT(worker.lora.cache_dir),
     .description =
         "Folder of the adapters' files that workers have fetched and checked; several workers of a host may share "
         "it. If empty, `adapters` in the data folder (data.dir).",
     .form = Form::kPath},
    {.key = "worker.lora.cache_bytes",
     .at = DITFLEET_AT(worker.lora.cache_bytes),
     .description = "Size of that folder beyond which the least recently used files go; what is in use stays.",
     .low = 0,
     .high = kManyBytes},

    {.key = "results.backend",
     .at = DITFLEET_AT(results.backend),
     .description = "Where finished pictures are kept.",
     .choices = "redis|file"},
    {.key = "results.dir",
     .at = DITFLEET_AT(results.dir),
     .description = "Folder of the file backend, shared by all hosts.",
     .form = Form::kPath},
    {.key = "results.preview_ms",
     .at = DITFLEET_AT(results.preview_ms),
     .description = "How long previews are kept.",
     .low = 1000,
     .high = kManyMs},

    {.key = "loras.folders",
     .at = DITFLEET_AT(loras.folders),
     .description = "Folders whose files may be registered as LoRA adapters by path, with ':' between; on disks that "
                    "workers see under "
                    "the same paths, and with this option on workers, too. If empty, adapters are uploaded only.",
     .form = Form::kPath},
    {.key = "loras.max_upload_bytes",
     .at = DITFLEET_AT(loras.max_upload_bytes),
     .description = "Largest adapter that is taken as an upload; larger ones get 413. Uploads are kept in Redis.",
     .low = 1 << 20,
     .high = kManyBytes},

    {.key = "compile.backend",
     .at = DITFLEET_AT(compile.backend),
     .description = "What compiles a model's repeated blocks: nvrtc on a GPU, cpu_jit on a CPU (with the system's C++ "
                    "compiler), eager (they run op by op), or auto: nvrtc or cpu_jit where it is to be had, else (and "
                    "in bf16 on a CPU, where eager is diffusers to the bit) eager.",
     .choices = "auto|nvrtc|cpu_jit|eager"},
    {.key = "compile.mode",
     .at = DITFLEET_AT(compile.mode),
     .description = "default; reduce-overhead adds CUDA graphs, max-autotune-no-cudagraphs timed GEMMs and attention, "
                    "max-autotune both. "
                    "On a CPU all are default.",
     .choices = "default|reduce-overhead|max-autotune-no-cudagraphs|max-autotune"},
    {.key = "compile.attention",
     .at = DITFLEET_AT(compile.attention),
     .description =
         "The implementation of attention: cudnn and efficient on a GPU, flash on a CPU or in bf16 on a GPU, math "
         "anywhere, or auto: what LibTorch prefers; with timed GEMMs, the faster of that and flash.",
     .choices = "auto|cudnn|flash|efficient|math"},
    {.key = "compile.fullgraph",
     .at = DITFLEET_AT(compile.fullgraph),
     .description =
         "A block that would run op by op, for an op without a kernel or a compiler that fails, is an error."},
    {.key = "compile.dynamic",
     .at = DITFLEET_AT(compile.dynamic),
     .description = "One program for all sizes; false: one for each size."},
    {.key = "compile.error_on_recompile",
     .at = DITFLEET_AT(compile.error_on_recompile),
     .description = "A second program for a block is an error."},
    {.key = "compile.recompile_limit",
     .at = DITFLEET_AT(compile.recompile_limit),
     .description = "Programs that a block may have; beyond it runs op by op (with compile.fullgraph an error).",
     .low = 1,
     .high = 1000},
    {.key = "compile.cxx",
     .at = DITFLEET_AT(compile.cxx),
     .description = "The C++ compiler of cpu_jit: a name that PATH finds or a path. If empty, the variable "
                    "DITFLEET_CXX, else c++."},
    {.key = "compile.nvrtc",
     .at = DITFLEET_AT(compile.nvrtc),
     .description =
         "NVIDIA's run-time compiler: the file libnvrtc.so.13. If empty, the variable DITFLEET_NVRTC, else where it is "
         "commonly installed.",
     .form = Form::kPath},
    {.key = "compile.components.transformer",
     .at = DITFLEET_AT(compile.components.transformer),
     .description = "Compile the transformer."},
    {.key = "compile.components.text_encoders",
     .at = DITFLEET_AT(compile.components.text_encoders),
     .description = "Compile the layers of the text encoders."},
    {.key = "compile.components.vae",
     .at = DITFLEET_AT(compile.components.vae),
     .description =
         "Compile what lies between the VAE's convolutions, on a GPU; auto: where that is to be had. true on a CPU is "
         "counted as a fallback, refused with compile.fullgraph.",
     .choices = "auto|true|false"},

    {.key = "cache.dir",
     .at = DITFLEET_AT(cache.dir),
     .description =
         "Folder of the kernel cache, which keeps compiled programs; several workers of a host may share it. If "
         "empty, `kernels` in the data folder (data.dir).",
     .form = Form::kPath},
    {.key = "cache.memory_bytes",
     .at = DITFLEET_AT(cache.memory_bytes),
     .description = "Compiled programs that a worker holds in memory; 0: none.",
     .low = 0,
     .high = kManyBytes},
    {.key = "cache.disk_bytes",
     .at = DITFLEET_AT(cache.disk_bytes),
     .description = "Size of the folder beyond which the least recently used programs go; 0: nothing on disk.",
     .low = 0,
     .high = kManyBytes},
    {.key = "cache.redis",
     .at = DITFLEET_AT(cache.redis),
     .description =
         "Share compiled programs through redis.url. Needs cache.secret or cache.secret_file, which `ditfleet "
         "up` sets for its private Redis; without, it is off."},
    {.key = "cache.secret",
     .at = DITFLEET_AT(cache.secret),
     .description =
         "Signs compiled programs; the same on all nodes that share them. At least 16 characters, as `openssl "
         "rand -hex 32` makes. A file (cache.secret_file) or the environment keeps it out of sight.",
     .form = Form::kSecret},
    {.key = "cache.secret_file",
     .at = DITFLEET_AT(cache.secret_file),
     .description =
         "File with the secret on one line. If both are empty, the file `secret` in cache.dir, made with the "
         "folder, signs what is on disk.",
     .form = Form::kPath},
    {.key = "cache.redis_timeout_ms",
     .at = DITFLEET_AT(cache.redis_timeout_ms),
     .description =
         "How long one operation on Redis may take; half of it counts as too slow. After three such in a row Redis "
         "is left out for a while.",
     .low = 10,
     .high = 10'000},
    {.key = "cache.redis_ttl_ms",
     .at = DITFLEET_AT(cache.redis_ttl_ms),
     .description = "How long a program stays in Redis after it was stored or last read.",
     .low = 60'000,
     .high = kManyMs},
    {.key = "cache.lock_ms",
     .at = DITFLEET_AT(cache.lock_ms),
     .description = "A process that compiles and is silent this long is taken for dead, and another compiles.",
     .low = 100,
     .high = 4500},
    {.key = "cache.wait_ms",
     .at = DITFLEET_AT(cache.wait_ms),
     .description =
         "Longest wait for a program that another process compiles; then a worker compiles it itself. 0: no wait.",
     .low = 0,
     .high = 9000},

    {.key = "data.dir",
     .at = DITFLEET_AT(data.dir),
     .description = "What `ditfleet up` keeps: Redis' files, logs, results; if empty, "
                    "$XDG_STATE_HOME/ditfleet, else ~/.local/state/ditfleet.",
     .form = Form::kPath},

    {.key = "telemetry.otlp_endpoint",
     .at = DITFLEET_AT(telemetry.otlp_endpoint),
     .description =
         "Where spans go, by OTLP over HTTP with JSON bodies: the receiver's base URL, as http://127.0.0.1:4318. If "
         "empty, "
         "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; without them no spans are made.",
     .form = Form::kHttpUrl},

    {.key = "log.level",
     .at = DITFLEET_AT(log.level),
     .description = "Least severity that is logged.",
     .choices = "trace|debug|info|warning|error|critical|off"},
    {.key = "log.format",
     .at = DITFLEET_AT(log.format),
     .description = "Lines to read, or one JSON object a line.",
     .choices = "text|json"},
};

#undef DITFLEET_AT

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const auto end = std::min(text.find(separator), text.size());
    parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

bool is_number_between(std::string_view text, long low, long high) {
  long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
}

bool has_form(Form form, std::string_view text) {
  if (text.empty()) return form != Form::kListen && form != Form::kDevice;
  switch (form) {
    case Form::kAny:
    case Form::kPath: return true;
    case Form::kListen:
    case Form::kListenIfAny: return ListenAddress::parse(text).ok();
    case Form::kHttpUrl: return !http_url_problem(text);
    case Form::kRedisUrl: return redis::Endpoint::parse(text).ok();
    case Form::kMemory: {
      const auto digits = text.find_first_not_of("0123456789");
      const auto unit = digits == std::string_view::npos ? std::string_view() : text.substr(digits);
      constexpr std::string_view kUnits[] = {"", "k", "kb", "m", "mb", "g", "gb"};
      return digits != 0 && std::find(std::begin(kUnits), std::end(kUnits), unit) != std::end(kUnits);
    }
    case Form::kDevice:
      return text == "auto" || text == "cpu" || text == "cuda" ||
             (text.starts_with("cuda:") && is_number_between(text.substr(5), 0, 255));
    case Form::kSecret:
      return text.size() >= 16 && text.size() <= 4096 && text.find_first_of("\r\n") == std::string_view::npos;
    case Form::kName: return text.size() <= 64 && text.find_first_of(" \t\r\n:/{}\"'") == std::string_view::npos;
  }
  return false;
}

std::string_view form_text(Form form) {
  switch (form) {
    case Form::kAny: return "text";
    case Form::kPath: return "path";
    case Form::kListen:
    case Form::kListenIfAny: return "HOST:PORT";
    case Form::kHttpUrl: return "http:// or https:// URL";
    case Form::kRedisUrl: return "redis://, rediss:// or unix:// URL";
    case Form::kMemory: return "a size such as 512mb or 4gb";
    case Form::kDevice: return "auto, cpu, cuda or cuda:N";
    case Form::kSecret: return "16 to 4096 characters on one line";
    case Form::kName: return "a name of at most 64 characters without spaces, colons, slashes or braces";
  }
  return "text";
}

bool is_one_of(std::string_view choices, std::string_view text) {
  for (const std::string& choice : split(choices, '|')) {
    if (choice == text) return true;
  }
  return false;
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true" || text == "yes" || text == "on" || text == "1") return true;
  if (text == "false" || text == "no" || text == "off" || text == "0") return false;
  return std::nullopt;
}

template <class Int>
bool assign_integer(const Option& option, const std::string& text, Int& out) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < option.low || value > option.high)
    return false;
  out = static_cast<Int>(value);
  return true;
}

// Why `text` was not taken, as the end of a sentence. A URL may carry a password: neither it nor a secret is repeated.
std::string refusal_of(const Option& option, const std::string& text) {
  const std::string right = "; it must be " + type_text(option);
  if (option.form == Form::kSecret ||
      ((option.form == Form::kRedisUrl || option.form == Form::kHttpUrl) && !is_valid_utf8(text)))
    return "is malformed" + right;
  if (option.form == Form::kRedisUrl) {
    const auto parsed = redis::Endpoint::parse(text);
    if (parsed) return "is malformed" + right;  // a NUL in it
    constexpr std::string_view kPart = "[redis] ";
    const std::string_view why = parsed.error().message;
    return "is malformed: " + std::string(why.starts_with(kPart) ? why.substr(kPart.size()) : why) + right;
  }
  const bool login = option.form == Form::kHttpUrl && text.find('@') != std::string::npos;
  const std::string why =
      option.form == Form::kHttpUrl ? http_url_problem(text).value_or(std::string()) : std::string();
  return "is " + (login ? "malformed" : "'" + excerpt(text, 128) + "'") + (why.empty() ? "" : ", which " + why) + right;
}

}  // namespace

std::span<const Option> options() { return kOptions; }

const Option* find_option(std::string_view key) {
  for (const Option& option : kOptions) {
    if (option.key == key) return &option;
  }
  return nullptr;
}

std::string type_text(const Option& option) {
  if (std::holds_alternative<bool& (*)(Settings&)>(option.at)) return "true or false";
  if (!std::holds_alternative<std::string& (*)(Settings&)>(option.at)) {
    return "an integer from " + std::to_string(option.low) + " to " + std::to_string(option.high);
  }
  if (option.choices.empty()) return std::string(form_text(option.form));
  std::string text = "one of ";
  const auto choices = split(option.choices, '|');
  for (std::size_t i = 0; i < choices.size(); ++i) text += (i ? ", " : "") + choices[i];
  return text;
}

std::string value_text(const Option& option, const Settings& settings) {
  auto& place = const_cast<Settings&>(settings);  // the accessors only name the member
  return std::visit(
      [&](auto at) -> std::string {
        auto& value = at(place);
        using T = std::remove_reference_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>)
          return value;
        else if constexpr (std::is_same_v<T, bool>)
          return value ? "true" : "false";
        else
          return std::to_string(value);
      },
      option.at);
}

Result<void> assign(const Option& option, const std::string& text, Settings& settings) {
  const bool done = std::visit(
      [&](auto at) {
        auto& value = at(settings);
        using T = std::remove_reference_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>) {
          if (!is_valid_utf8(text) || text.find('\0') != std::string::npos) return false;
          if (option.choices.empty() ? !has_form(option.form, text) : !is_one_of(option.choices, text)) return false;
          value = text;
          return true;
        } else if constexpr (std::is_same_v<T, bool>) {
          const auto parsed = parse_bool(text);
          if (parsed) value = *parsed;
          return parsed.has_value();
        } else {
          return assign_integer(option, text, value);
        }
      },
      option.at);
  if (done) return {};
  return invalid_argument(refusal_of(option, text));
}

std::string environment_name(std::string_view key) {
  std::string name = "DITFLEET_";
  for (char c : key) {
    if (c == '.')
      name += "__";
    else
      name += c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  }
  return name;
}

}  // namespace ditfleet::config
