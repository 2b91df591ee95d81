// The configuration of every process, with its defaults. config/REFERENCE.md describes each option; the option table
// (options.cpp) defines its text form. Precedence: flags and --set, then the environment (DITFLEET_SECTION__KEY), then
// the file, then the default.
//
// Functions are thread-safe unless the environment changes during the call. load() reads a file and blocks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::redis {
struct Endpoint;
}

namespace ditfleet::config {

struct ModelSetting {
  std::string path;                                  // a model folder in diffusers' layout
  std::map<std::string, std::string> files = {};     // as pipeline::ModelSource::files
  std::map<std::string, std::string> quantize = {};  // as pipeline::ModelSource::quantize
  std::string vae_dtype = {};                        // fp32 or bf16; empty: as worker.dtype
  std::string attention = {};                        // fp8; empty: as worker.dtype
  double objective_s = 0;                            // in which a job should end, for metrics; 0: none
};

// The components whose weights may be in a file of their own.
inline constexpr const char* kFileComponents[] = {"transformer",    "transformer_2", "text_encoder",
                                                  "text_encoder_2", "image_encoder", "vae"};

// Parses COMPONENT=FORMAT,…, such as "transformer=nf4,text_encoder_2=nf4", or "auto", which is {"*": "auto"}.
// kInvalidArgument: another form.
Result<std::map<std::string, std::string>> parse_quantize(std::string_view text);

struct ApiKey {
  std::string tenant;
  std::string sha256;  // of the API key, 64 lower-case hexadecimal digits
  bool admin = false;  // may see and cancel every tenant's jobs
};

// Limits of each tenant.
struct Quotas {
  std::int64_t queued_units = 0;  // 0: only queue.max_queued
  std::int64_t queued_bytes = 256 << 20, adapters = 10'000, adapter_bytes = std::int64_t{16} << 30, streams = 256;
  std::int64_t inputs = 1000, input_bytes = 512 << 20;  // uploaded images
};

struct Webhooks {
  std::string url;    // of jobs that name none; empty: none
  std::string hosts;  // that may receive events, separated by commas; empty: all
  bool allow_private = false;
  std::int64_t timeout_ms = 10'000, retry_ms = 5000, give_up_ms = 86'400'000;
};

struct TenantSetting {
  double weight = 1.0;  // 0.001 … 1000; shares are proportional
  // Members of Quotas, webhook_url and webhook_hosts of Webhooks, and s3_inputs that differ for this tenant; checked.
  std::map<std::string, std::string> own;
};

// Bounds are inclusive; without a bound, there is no limit. The first matching rule applies.
struct CompileRule {
  std::optional<int> min_frames, max_frames, min_tokens, max_tokens;
  std::string mode;  // a mode as in compile.mode, or "none" for eager execution
};

// A shape class that a worker runs before it reports ready. width and height are required.
struct WarmupClass {
  std::string model;  // empty: every model
  std::optional<int> width, height, frames, max_sequence_length;
  bool true_cfg = false;
  std::optional<int> gpus;
};

struct Settings {
  struct {
    std::string listen = "127.0.0.1:8780";
    std::int64_t max_body_bytes = 1 << 20;
    int max_connections = 1024;
    int max_connections_per_peer = 0;  // 0: a quarter of max_connections
    std::string public_url;
    std::string allowed_origins;  // comma-separated
    bool open = false, require_keys = false;
    std::string tls_cert_file, tls_key_file;
    std::string metrics_listen;
    std::int64_t request_timeout_ms = 600'000;
  } gateway;
  struct {
    std::string url;  // empty: `ditfleet up` sets the URL of its private Redis
    std::string tls_ca_file, tls_cert_file, tls_key_file;
    bool tls_verify = true;
    std::string sentinel_user, sentinel_password;
    std::string appendfsync = "everysec";
    std::string maxmemory;
    bool allow_eviction = false;
  } redis;
  struct {
    std::int64_t lease_ms = 5000, renew_ms = 1000;
    int max_attempts = 3, max_crashes = 2, max_lapses = 5;
    std::int64_t retry_backoff_ms = 500, retry_backoff_max_ms = 30'000;
    std::int64_t retention_ms = 3'600'000, idempotency_ms = 86'400'000;
    std::int64_t max_queued = 100'000, max_age_ms = 604'800'000;
    std::int64_t history_days = 30, history_jobs = 1'000'000;
    int wait_replicas = 0;
  } queue;
  Quotas quotas;
  Webhooks webhooks;
  struct {
    std::int64_t leader_ttl_ms = 3000;
    int lookahead = 2;
    std::int64_t age_bound_ms = 60'000;
    bool refuse_too_large = true;
  } scheduler;
  struct {
    int count = 1;
    std::string name;  // empty: host-pid
    std::string device = "auto", dtype = "auto";
    int gpus = 1;
    int threads = 0;  // 0: cores / (count · gpus)
    std::int64_t heartbeat_ms = 1000, drain_ms = 30'000, stuck_ms = 60'000, orphan_ms = 600'000;
    std::int64_t checkpoint_ms = 10'000;
    bool warmup = true;
    std::vector<WarmupClass> warmup_classes;
    std::string metrics_listen;
    struct {
      int slots = 4, max_rank = 64, together_rank = 128;
      std::int64_t host_bytes = std::int64_t{4} << 30;
      std::string cache_dir;  // empty: `adapters` in data_folder()
      std::int64_t cache_bytes = std::int64_t{16} << 30;
    } lora;
  } worker;
  struct {
    std::string backend = "redis", dir;
    std::int64_t preview_ms = 600'000, redis_max_bytes = 32 << 20;
    std::int64_t input_ms = 3'600'000, input_max_bytes = 20 << 20;
    bool carry_receipts = false;
    struct {
      std::string bucket, prefix, region, endpoint, addressing = "auto";
      bool links = true, delete_expired = true;
      std::string inputs;  // "s3://bucket/prefix" that jobs may name, separated by commas; empty: none
    } s3;
  } results;
  struct {
    std::string folders;  // separated by ':'
    std::int64_t max_upload_bytes = std::int64_t{2} << 30;
  } loras;
  struct {
    std::string backend = "auto", mode = "default", attention = "auto";
    bool fullgraph = false, dynamic = true, error_on_recompile = false;
    int recompile_limit = 8;
    std::vector<CompileRule> rules;
    std::string cxx, nvrtc;
    struct {
      bool transformer = true;
      std::string vae = "auto";
    } components;
  } compile;
  struct {
    std::string dir;  // empty: `kernels` in data_folder()
    std::int64_t memory_bytes = 256 << 20, disk_bytes = std::int64_t{2} << 30;
    bool redis = true;
    std::string secret, secret_file;
    std::int64_t redis_timeout_ms = 1000, redis_ttl_ms = 2'592'000'000;
    std::int64_t lock_ms = 2000, wait_ms = 8000;
  } cache;
  struct {
    std::string dir;
  } data;
  struct {
    std::string otlp_endpoint, trace_url;
    double sample_rate = 1, slow_s = 30;
  } telemetry;
  struct {
    std::string level = "info", format = "text";
  } log;
  struct {
    std::string offload = "auto";
    double limit = 0, reserve = 0;  // GiB
  } memory;
  std::string default_model;
  std::map<std::string, ModelSetting> models;
  std::vector<ApiKey> keys;
  std::map<std::string, TenantSetting> tenants;
};

struct Sources {
  std::string file;               // empty: no file
  std::vector<std::string> sets;  // "section.key=value"; later ones win
  bool environment = true;
  std::optional<std::string> text = {};  // of the file, in place of what it has
};

// kInvalidArgument: requests cannot name a model so.
Result<void> check_model_name(const std::string& name);

// Merges the sources and checks the result.
// kInvalidArgument: the message has a line for each wrong value: the source (file:line, variable or --set), the key,
// the error and the expected value; for an unknown key, it suggests the nearest one. kNotFound: no such file.
Result<Settings> load(const Sources& sources);

// Like load(), but only from YAML text. Errors contain `name` as the file name.
Result<Settings> load_text(std::string_view yaml, const std::string& name);

// The data folder of `ditfleet up`: data.dir, else $XDG_STATE_HOME/ditfleet, else ~/.local/state/ditfleet. Empty if
// data.dir, XDG_STATE_HOME and HOME are all unset.
std::string data_folder(const Settings& settings);

// The endpoint of redis.url with the other options of section `redis`. Reads the client certificate, if one is set.
// Errors: kInvalidArgument (the URL is invalid), those of check_certificate().
Result<redis::Endpoint> redis_endpoint(const Settings& settings);

// The quotas and webhooks of one tenant.
Quotas quotas_of(const Settings& settings, const std::string& tenant);
Webhooks webhooks_of(const Settings& settings, const std::string& tenant);
std::string s3_inputs_of(const Settings& settings, const std::string& tenant);
// The rules of a process that serves the gateway. kInvalidArgument: gateway.listen can be reached from other hosts, but
// neither keys nor gateway.open are configured; only one of certificate and key is set.
Result<void> check_gateway(const Settings& settings);

// A worker without a heartbeat for this time counts as silent: three heartbeat intervals, plus 0.5 s for latency.
std::int64_t silent_after_ms(const Settings& settings);

// All settings as YAML that load() accepts. Unless `with_secrets`, the password in redis.url and secrets are
// replaced by ***, and the text no longer loads if cache.secret was set.
std::string to_yaml(const Settings& settings, bool with_secrets = false);
std::string reference_markdown();  // config/REFERENCE.md
struct OptionHelp {
  std::string key, type, default_value, description;
  std::string environment;  // the variable's name; empty: the option has no variable
};
std::vector<OptionHelp> option_table();

}  // namespace ditfleet::config
