// Everything that can be configured, in one table (options.cpp) that drives YAML, --set, the environment
// (DITFLEET_SECTION__KEY), --help and config/REFERENCE.md. Precedence: flags and --set, then environment,
// then the file, then the default.
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
  std::string path;
};

struct ApiKey {
  std::string tenant;
  std::string sha256;  // of the bearer key, hexadecimal: keys themselves are never stored
  bool admin = false;  // sees every tenant's jobs
};

struct TenantSetting {
  double weight = 1.0;
};

// Bounds are inclusive; where one is not given it is none.
struct CompileRule {
  std::optional<int> min_frames, max_frames, min_tokens, max_tokens;
  std::string mode;  // compile.mode's, or none
};

// A class that is run before a worker is ready.
struct WarmupClass {
  std::string model;  // empty: each
  std::optional<int> width, height, max_sequence_length;
  bool true_cfg = false;
};

struct Settings {
  struct {
    std::string listen = "127.0.0.1:8780";
    std::int64_t max_body_bytes = 1 << 20;
    int max_connections = 1024;
    std::string public_url;                     // in results' url fields; empty: from the request's Host
    std::int64_t request_timeout_ms = 600'000;  // a synchronous generation
  } gateway;
  struct {
    std::string url;  // empty: `ditfleet up` starts a private one
    std::string tls_ca_file;
    bool tls_verify = true;
    std::string appendfsync = "everysec";  // of the private one: always | everysec | no
    std::string maxmemory;                 // of the private one, as in redis.conf; empty: no limit
  } redis;
  struct {
    std::int64_t lease_ms = 5000, renew_ms = 1000;
    int max_attempts = 3, max_crashes = 2;
    std::int64_t retry_backoff_ms = 500, retry_backoff_max_ms = 30'000;
    std::int64_t retention_ms = 3'600'000, idempotency_ms = 86'400'000;
    std::int64_t max_queued = 100'000;  // submissions beyond it get 429
  } queue;
  struct {
    std::int64_t leader_ttl_ms = 3000;
    int lookahead = 2;  // units a worker holds, the running one included
    std::int64_t age_bound_ms = 60'000;
    bool late_units_yield = true;
  } scheduler;
  struct {
    int count = 1;
    std::string name;  // empty: host-pid
    std::string device = "auto", dtype = "auto";
    int threads = 0;  // 0: cores / count
    std::int64_t heartbeat_ms = 1000, drain_ms = 30'000;
    bool warmup = true;
    std::vector<WarmupClass> warmup_classes;
    std::string metrics_listen;  // empty: not served
    struct {
      int slots = 4, max_rank = 64, together_rank = 128;  // of each model
      std::int64_t host_bytes = std::int64_t{4} << 30;
      std::string cache_dir;  // empty: `adapters` in the data folder
      std::int64_t cache_bytes = std::int64_t{16} << 30;
    } lora;
  } worker;
  struct {
    std::string backend = "redis", dir;
    std::int64_t preview_ms = 600'000;
  } results;
  struct {
    std::string folders;  // with ':' between
    std::int64_t max_upload_bytes = std::int64_t{2} << 30;
  } loras;
  struct {
    std::string backend = "auto", mode = "default", attention = "auto";
    bool fullgraph = false, dynamic = true, error_on_recompile = false;
    int recompile_limit = 8;
    std::vector<CompileRule> rules;  // the first that holds; none: mode
    std::string cxx, nvrtc;          // the C++ compiler, libnvrtc; empty: looked for
    struct {
      bool transformer = true, text_encoders = false;
      std::string vae = "auto";
    } components;
  } compile;
  struct {
    std::string dir;                                                            // empty: `kernels` in the data folder
    std::int64_t memory_bytes = 256 << 20, disk_bytes = std::int64_t{2} << 30;  // 0: without that tier
    bool redis = true;
    std::string secret, secret_file;  // neither: one of this node's own, and no Redis tier
    std::int64_t redis_timeout_ms = 1000, redis_ttl_ms = 2'592'000'000;
    std::int64_t lock_ms = 2000, wait_ms = 8000;
  } cache;
  struct {
    std::string dir;  // of `ditfleet up`: Redis' files, logs, results; empty: $XDG_STATE_HOME/ditfleet
  } data;
  struct {
    std::string otlp_endpoint;  // http(s)://HOST:PORT of an OTLP/HTTP receiver; empty: OTEL_EXPORTER_OTLP_ENDPOINT's,
                                // else no spans
  } telemetry;
  struct {
    std::string level = "info", format = "text";  // text | json
  } log;
  std::string default_model;  // models' only one if empty
  std::map<std::string, ModelSetting> models;
  std::vector<ApiKey> keys;
  std::map<std::string, TenantSetting> tenants;
};

struct Sources {
  std::string file;               // empty: none
  std::vector<std::string> sets;  // "section.key=value", in order
  bool environment = true;
};

// kInvalidArgument names the source (file:line, variable or --set), the key, what was wrong, what would be
// right; an unknown key comes with the nearest known one. kNotFound: the file.
Result<Settings> load(const Sources& sources);

// The same from YAML text, for tests and for input that is no file; `name` stands for the file in errors.
Result<Settings> load_text(std::string_view yaml, const std::string& name);

// Where `ditfleet up` keeps its files: data.dir, else the user's state folder; empty if neither says where.
std::string data_folder(const Settings& settings);

// redis.url with the TLS options of the section. kInvalidArgument: the URL is invalid.
Result<redis::Endpoint> redis_endpoint(const Settings& settings);

// After how long without a heartbeat a worker is held for silent: three of them, and half a second for the way.
std::int64_t silent_after_ms(const Settings& settings);

// Every option as a file that load() reads back. The password in redis.url and cache.secret are shown as *** unless
// asked for.
std::string to_yaml(const Settings& settings, bool with_secrets = false);
std::string reference_markdown();  // config/REFERENCE.md
struct OptionHelp {
  std::string key, type, default_value, description;
  std::string environment;  // the variable's name; empty: in the file alone
};
std::vector<OptionHelp> option_table();

}  // namespace ditfleet::config
