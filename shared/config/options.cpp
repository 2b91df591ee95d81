// Longer than 400 lines because the option table is kept in one place: REFERENCE.md, --help, environment variables and
// suggestions for misspelled keys are all made from it.
#include "shared/config/options.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/http_url.h"
#include "shared/core/listen_address.h"
#include "shared/core/text.h"
#include "shared/redis/endpoint.h"

namespace ditfleet::config {
namespace {

constexpr std::int64_t kDayMs = 86'400'000;
constexpr std::int64_t kManyMs = 365 * kDayMs;
constexpr std::int64_t kManyBytes = std::int64_t{1} << 50;

// The name and the accessor of an option, which is a member of Settings.
#define DITFLEET_OPTION(member) \
  .key = #member, .at = +[](Settings & s) -> auto& { return s.member; }

const Option kOptions[] = {
    {DITFLEET_OPTION(default_model),
     .description = "Model of requests that name none. If empty and only one model is configured, that one.",
     .form = Form::kName},

    {DITFLEET_OPTION(gateway.listen), .description = "Address of the HTTP gateway. Port 0 picks a free port.",
     .form = Form::kListen},
    {DITFLEET_OPTION(gateway.max_body_bytes),
     .description = "Largest request body; larger ones get 413. A body is held in memory while its request is read. "
                    "Images have their own limit, results.input_max_bytes, and adapters loras.max_upload_bytes.",
     .range = {1024, 1 << 30}},
    {DITFLEET_OPTION(gateway.max_connections),
     .description =
         "Maximum number of open connections. When full, the oldest half-sent request is closed, else the longest-idle "
         "connection; without one the new connection gets 503, except for /healthz, /readyz and /metrics. At most "
         "three quarters may be event streams, waiting image requests and downloads of large results. Up to twice as "
         "many file descriptors are "
         "needed.",
     .range = {1, 1'000'000}},
    {DITFLEET_OPTION(gateway.max_connections_per_peer),
     .description = "Maximum number of connections of one IPv4 address or IPv6 /64 network, except this host's. 0 is a "
                    "quarter of gateway.max_connections. Raise it if a proxy on another host forwards all requests.",
     .range = {0, 1'000'000}},
    {DITFLEET_OPTION(gateway.open),
     .description = "Serve addresses of gateway.listen that other hosts can reach although no keys are configured. "
                    "Everybody who reaches the gateway is then an administrator."},
    {DITFLEET_OPTION(gateway.require_keys),
     .description =
         "Refuse every request without a key with 401, also while no keys exist. A coordinator that once had "
         "keys behaves like this by itself, as long as the data folder (data.dir) is kept."},
    {DITFLEET_OPTION(gateway.tls_cert_file),
     .description = "Certificate chain in PEM. If set, the gateway speaks only HTTPS (TLS 1.2 or later). Read once, at "
                    "the start.",
     .form = Form::kPath},
    {DITFLEET_OPTION(gateway.tls_key_file),
     .description = "Unencrypted private key of gateway.tls_cert_file in PEM, with mode 0600.", .form = Form::kPath},
    {DITFLEET_OPTION(gateway.metrics_listen),
     .description = "Separate address for the gateway's /metrics, without keys and TLS, such as 127.0.0.1:9463. If "
                    "keys are configured, gateway.listen serves /metrics only to administrators and, if this option is "
                    "empty, to clients on this host that no proxy forwards.",
     .form = Form::kListenIfAny},
    {DITFLEET_OPTION(gateway.public_url),
     .description = "Base of the URLs in responses, for gateways behind a proxy. If empty, it is made from the "
                    "request's Host header. Without keys, requests for other hosts are refused, except localhost.",
     .form = Form::kHttpUrl},
    {DITFLEET_OPTION(gateway.allowed_origins),
     .description = "Other sites whose pages may use the API from a browser (CORS), separated by commas, such as "
                    "https://app.example; * allows every site. Has no effect without keys.",
     .form = Form::kOrigins},
    {DITFLEET_OPTION(gateway.request_timeout_ms),
     .description = "How long a synchronous image request waits for its job before it gets 504. The job continues.",
     .range = {1000, kDayMs}},

    {DITFLEET_OPTION(redis.url),
     .description =
         "URL of the queue's Redis: `redis://[user:password@]host[:port][/db]`, `rediss://…` for TLS, "
         "`unix:///path[?db=N]`, or with Sentinel "
         "`redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db]` (`rediss+sentinel://…`). "
         "If empty, `ditfleet up` starts a private one.",
     .form = Form::kRedisUrl},
    {DITFLEET_OPTION(redis.tls_ca_file),
     .description = "CA certificates that must sign the certificate of a rediss:// server. If empty, the system's.",
     .form = Form::kPath},
    {DITFLEET_OPTION(redis.tls_verify), .description = "Verify the certificate and host name of a rediss:// server."},
    {DITFLEET_OPTION(redis.tls_cert_file),
     .description =
         "Certificate chain in PEM that this process presents to a rediss:// server with `tls-auth-clients`. "
         "Read again for each connection.",
     .form = Form::kPath},
    {DITFLEET_OPTION(redis.tls_key_file),
     .description = "Unencrypted private key of redis.tls_cert_file in PEM, with mode 0600.", .form = Form::kPath},
    {DITFLEET_OPTION(redis.sentinel_user),
     .description = "User at the sentinels of a redis+sentinel:// URL. If empty, the default user."},
    {DITFLEET_OPTION(redis.sentinel_password),
     .description =
         "Password at the sentinels. The password in redis.url is sent only to the master. If empty, the "
         "sentinels require none. Prefer the configuration file or the environment, which keep it out of sight.",
     .form = Form::kPassword},
    {DITFLEET_OPTION(redis.appendfsync),
     .description =
         "When the private Redis syncs its append-only file to disk. With everysec a power failure may lose the last "
         "second of acknowledged jobs. With always it loses none, but every submission waits for the disk.",
     .choices = "always|everysec|no"},
    {DITFLEET_OPTION(redis.maxmemory),
     .description = "Memory limit of the private Redis, as in redis.conf; 0 is unlimited. If empty, half of the host's "
                    "memory. At the limit, new jobs are refused until old ones expire (queue.retention_ms).",
     .form = Form::kMemory},
    {DITFLEET_OPTION(redis.allow_eviction),
     .description = "Accept a Redis whose maxmemory-policy evicts keys of any kind (allkeys-*). Such a Redis deletes "
                    "jobs when its memory is full."},

    {DITFLEET_OPTION(queue.lease_ms),
     .description = "A worker that does not renew its leases for this long loses its units to other workers. Raising "
                    "it delays recovery from a crash; lowering it takes units away from workers that only stall.",
     .range = {500, kDayMs}},
    {DITFLEET_OPTION(queue.renew_ms),
     .description =
         "How often workers renew their leases; at most half of queue.lease_ms. Lowering it costs Redis commands.",
     .range = {50, kDayMs}},
    {DITFLEET_OPTION(queue.max_attempts), .description = "Maximum attempts of a unit that fails with errors.",
     .range = {1, 100}},
    {DITFLEET_OPTION(queue.max_crashes),
     .description = "How many workers may crash while running a unit before the unit fails. Raising it lets a job that "
                    "crashes workers take down more of them.",
     .range = {1, 100}},
    {DITFLEET_OPTION(queue.max_lapses),
     .description = "How many workers may be lost while they hold a unit, started or not, before the unit fails. "
                    "Counts workers that come back too.",
     .range = {1, 100}},
    {DITFLEET_OPTION(queue.retry_backoff_ms),
     .description = "Delay before the first retry. It doubles with each retry and has jitter.", .range = {0, kDayMs}},
    {DITFLEET_OPTION(queue.retry_backoff_max_ms), .description = "Maximum delay before a retry.", .range = {0, kDayMs}},
    {DITFLEET_OPTION(queue.retention_ms),
     .description = "How long ended jobs, their events and their results are kept. Raising it costs memory in Redis, "
                    "most of it for images if results.backend is redis.",
     .range = {1000, kManyMs}},
    {DITFLEET_OPTION(queue.idempotency_ms),
     .description = "How long idempotency keys are remembered; never longer than their job.", .range = {1000, kManyMs}},
    {DITFLEET_OPTION(queue.max_queued),
     .description = "Maximum number of queued units. Beyond it, only tenants below their share (by weight, of all "
                    "tenants with keys) may submit; others get 429, and their XADD entries are rejected. Raising it "
                    "costs memory in Redis and lets waits grow.",
     .range = {1, 100'000'000}},
    {DITFLEET_OPTION(queue.max_age_ms), .description = "A job that is open for longer expires. 0: never.",
     .range = {0, kManyMs}},
    {DITFLEET_OPTION(queue.history_days),
     .description = "How long the history keeps an ended job, in days. `ditfleet capacity` and `ditfleet history "
                    "export` read it. 0: no history.",
     .range = {0, 3650}},
    {DITFLEET_OPTION(queue.history_jobs),
     .description = "Maximum number of jobs in the history; the oldest are removed. Raising it costs memory in Redis, "
                    "about 240 bytes per job. 0: no history.",
     .range = {0, 100'000'000}},
    {DITFLEET_OPTION(queue.wait_replicas),
     .description = "How many replicas of Redis must have received a new job before it is acknowledged. A submission "
                    "that they do not confirm within a second gets 503 and may be repeated. With 0, a failover to a "
                    "replica may lose the latest jobs.",
     .range = {0, 16}},

    {DITFLEET_OPTION(quotas.queued_units),
     .description = "Maximum number of units in a tenant's open jobs. 0: only queue.max_queued limits them. This and "
                    "the other quotas can be set for one tenant, as tenants.NAME.queued_units and so on.",
     .range = {0, 100'000'000}},
    {DITFLEET_OPTION(quotas.queued_bytes),
     .description = "Maximum size of the specs of a tenant's open jobs, each counted as whole KiB.",
     .range = {1024, std::int64_t{32} << 30}},
    {DITFLEET_OPTION(quotas.adapters), .description = "Maximum number of a tenant's LoRA adapters.",
     .range = {0, 1'000'000}},
    {DITFLEET_OPTION(quotas.adapter_bytes),
     .description = "Maximum size of a tenant's uploaded LoRA adapters, which Redis stores. Adapters that are "
                    "registered by path do not count.",
     .range = {0, kManyBytes}},
    {DITFLEET_OPTION(quotas.inputs),
     .description = "Maximum number of images that a tenant has stored with the service.", .range = {0, 1'000'000}},
    {DITFLEET_OPTION(quotas.input_bytes),
     .description = "Maximum size of the images that a tenant has stored with the service, in bytes of their files.",
     .range = {0, kManyBytes}},
    {DITFLEET_OPTION(quotas.streams),
     .description = "Maximum number of a tenant's event streams, waiting image requests and downloads of large results "
                    "on one gateway. With keys, "
                    "never more than half of all that gateway.max_connections permits.",
     .range = {1, 1'000'000}},

    {DITFLEET_OPTION(webhooks.url),
     .description = "URL that gets the ends of jobs that name no webhook. A tenant's own is tenants.NAME.webhook_url.",
     .form = Form::kHttpUrl},
    {DITFLEET_OPTION(webhooks.hosts),
     .description = "Hosts that may receive events, separated by commas, such as app.example,*.hooks.example. If "
                    "empty, all. A tenant's own are tenants.NAME.webhook_hosts."},
    {DITFLEET_OPTION(webhooks.allow_private),
     .description = "Whether receivers may have private addresses, as in a company's network. With true, whoever "
                    "submits jobs can send requests into that network, so list the receivers in webhooks.hosts."},
    {DITFLEET_OPTION(webhooks.timeout_ms), .description = "Time that a receiver has for its answer.",
     .range = {100, 60'000}},
    {DITFLEET_OPTION(webhooks.retry_ms),
     .description = "Pause before the first retry of a delivery. It doubles with each further one, up to an hour.",
     .range = {10, kDayMs}},
    {DITFLEET_OPTION(webhooks.give_up_ms),
     .description = "How long a delivery is tried. Then it is a dead letter, which can be replayed.",
     .range = {1000, kManyMs}},

    {DITFLEET_OPTION(scheduler.leader_ttl_ms),
     .description = "A leading coordinator that is silent for this long is replaced. Raising it delays failover; "
                    "lowering it replaces leaders that only stall.",
     .range = {500, kDayMs}},
    {DITFLEET_OPTION(scheduler.lookahead),
     .description = "Maximum number of units assigned to a worker, including the running one. With 2 or more, a "
                    "worker prepares the next unit while the current one runs. Raising it assigns units earlier, when "
                    "another worker might become free sooner.",
     .range = {1, 64}},
    {DITFLEET_OPTION(scheduler.age_bound_ms),
     .description = "A unit that has waited this long goes first, regardless of its priority.",
     .range = {100, kManyMs}},
    {DITFLEET_OPTION(scheduler.refuse_too_large),
     .description = "Reject a job at once if its images need more memory than any registered worker of the model has. "
                    "Set it to false if larger workers are started on demand: such a job then waits for one."},

    {DITFLEET_OPTION(worker.count),
     .description = "Number of workers that `ditfleet up` starts. Each one loads its own copy of the models.",
     .range = {0, 256}},
    {DITFLEET_OPTION(worker.name),
     .description = "Name of the worker. If empty, host and pid. With several workers, `ditfleet up` appends -1, -2 ….",
     .form = Form::kName},
    {DITFLEET_OPTION(worker.device),
     .description = "Device that runs the models: auto (a GPU if available), cpu, cuda or cuda:N.",
     .form = Form::kDevice},
    {DITFLEET_OPTION(worker.gpus),
     .description =
         "Number of GPUs that one worker owns, from worker.device on. Each holds the models, and all share "
         "the steps of one request. On a CPU, the number of processes. The attention heads of the models must be "
         "divisible by it.",
     .range = {1, 32}},
    {DITFLEET_OPTION(worker.dtype), .description = "Precision of the models. auto is bf16 on a GPU and fp32 on a CPU.",
     .choices = "auto|fp32|bf16"},
    {DITFLEET_OPTION(worker.threads),
     .description = "CPU threads per operation. 0 divides the cores by worker.count × worker.gpus.",
     .range = {0, 1024}},
    {DITFLEET_OPTION(worker.heartbeat_ms),
     .description = "How often a worker reports its state. After three missed heartbeats it gets no units. Lowering it "
                    "costs Redis commands.",
     .range = {50, 60'000}},
    {DITFLEET_OPTION(worker.drain_ms),
     .description =
         "How long a worker that is asked to stop may finish its running units. The rest goes back to the queue.",
     .range = {0, kDayMs}},
    {DITFLEET_OPTION(worker.checkpoint_ms),
     .description =
         "A worker stores a checkpoint of a unit after so much denoising, and when it leaves, so that another worker "
         "goes on from there. A checkpoint has some MB and is stored as results are, in Redis up to "
         "results.redis_max_bytes. 0: only of paused units.",
     .range = {0, kDayMs}},
    {DITFLEET_OPTION(worker.stuck_ms),
     .description =
         "A worker whose step, text or image makes no progress for this long, or for 20 times the slowest of "
         "its class, fails the unit and ends. The first of a class may take five times as long. With several "
         "GPUs, a step of a class that has an image may take 1/24 of this, at least 2.5 s, and twice the slowest. "
         "Lowering it below the time of a slow step ends healthy workers.",
     .range = {100, kDayMs}},
    {DITFLEET_OPTION(worker.orphan_ms),
     .description = "How long a worker continues its units while Redis does not answer. No other worker can take them "
                    "meanwhile. Longer outages hand the units back.",
     .range = {1000, kDayMs}},
    {DITFLEET_OPTION(worker.warmup),
     .description = "Run one small image of each model, and worker.warmup_classes, before the worker reports ready. "
                    "This delays the start, but the first jobs need not wait for compilation."},

    {DITFLEET_OPTION(worker.metrics_listen),
     .description = "Address of a worker's /metrics endpoint, such as 127.0.0.1:9464. With several workers, ports are "
                    "assigned consecutively. If empty, workers serve no metrics.",
     .form = Form::kListenIfAny},

    {DITFLEET_OPTION(worker.lora.slots),
     .description = "Number of LoRA adapters that a model can have on its device, and that one request may use. "
                    "Each slot reserves device memory for worker.lora.max_rank.",
     .range = {1, 64}},
    {DITFLEET_OPTION(worker.lora.max_rank),
     .description = "A slot has room for a LoRA adapter with this rank at every linear layer. Adapters with a higher "
                    "rank, up to 256, fit if they change fewer layers. Raising it costs device memory in every slot.",
     .range = {1, 1024}},
    {DITFLEET_OPTION(worker.lora.together_rank),
     .description = "Maximum combined rank of the adapters active at one linear layer of a compiled transformer. "
                    "Beyond it the transformer's blocks run eagerly. At least worker.lora.max_rank. Raising it costs "
                    "device memory next to the weights of every layer.",
     .range = {1, 1024}},
    {DITFLEET_OPTION(worker.lora.host_bytes),
     .description = "Host memory in which each model keeps adapters ready to be copied into a slot. With less, "
                    "adapters are read from disk more often.",
     .range = {1 << 20, kManyBytes}},
    {DITFLEET_OPTION(worker.lora.cache_dir),
     .description = "Folder for adapter files that workers have fetched and verified. Workers of one host may share "
                    "it. If empty, `adapters` in the data folder (data.dir).",
     .form = Form::kPath},
    {DITFLEET_OPTION(worker.lora.cache_bytes),
     .description =
         "Size of worker.lora.cache_dir above which the least recently used files are deleted. Files in use stay.",
     .range = {0, kManyBytes}},

    {DITFLEET_OPTION(memory.offload),
     .description =
         "What may leave the device's memory for pinned host memory. none: nothing. model: text encoders and "
         "modulation, which are needed only while a request is prepared. block: these and as many of the "
         "transformer's blocks as can be copied behind the computation of a step. auto: as much as "
         "necessary, the least costly first; and of several models, the least used ones.",
     .choices = "auto|none|model|block"},
    {DITFLEET_OPTION(memory.limit),
     .description =
         "Most device memory, in GiB, that each worker may take, with the driver's own; 0: all that is free. "
         "On a CPU: most memory for tensors.",
     .range = {0, 1 << 20}},
    {DITFLEET_OPTION(memory.reserve),
     .description = "Device memory, in GiB, that each worker leaves free for other programs.", .range = {0, 1 << 20}},

    {DITFLEET_OPTION(results.backend),
     .description = "Where finished images are stored: in Redis, as files in results.dir, or as objects in "
                    "results.s3.bucket. Images in Redis cost its memory for queue.retention_ms.",
     .choices = "redis|file|s3"},
    {DITFLEET_OPTION(results.dir),
     .description =
         "Folder of the file backend. All hosts must share it. Its files have mode 0600, so coordinators and "
         "workers need the same user.",
     .form = Form::kPath},
    {DITFLEET_OPTION(results.preview_ms),
     .description = "How long previews are kept. Raising it costs memory in Redis.", .range = {1000, kManyMs}},
    {DITFLEET_OPTION(results.redis_max_bytes),
     .description =
         "Largest result that is stored in Redis; a unit with a larger one fails. Redis needs this memory for "
         "each result. Large videos need results.backend: file or s3.",
     .range = {1 << 10, std::int64_t{4} << 30}},
    {DITFLEET_OPTION(results.input_ms),
     .description =
         "How long an image that a client sent is kept after its upload. Jobs that name it keep it until the "
         "last of them ends. Raising it costs memory in Redis, or on the disk of the file backend.",
     .range = {1000, kManyMs}},
    {DITFLEET_OPTION(results.input_max_bytes),
     .description = "Largest image that clients may send, in bytes of its file: in JSON, in a form or as an upload.",
     .range = {1 << 10, 256 << 20}},

    {DITFLEET_OPTION(results.carry_receipts),
     .description = "PNG and MP4 files have a comment with the id of their receipt, by which it can be told later what "
                    "made them. Then the same picture has other bytes if it was asked for in another way."},
    {DITFLEET_OPTION(results.s3.bucket),
     .description = "Bucket of the s3 backend. Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                    "~/.aws/credentials (AWS_PROFILE), or the role of the container or the instance. They need "
                    "s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket. Previews stay in Redis."},
    {DITFLEET_OPTION(results.s3.prefix),
     .description = "Folder in the bucket. A result is PREFIX/results/TENANT/JOB/UNIT.ATTEMPT.png, so that policies "
                    "and lifecycle rules can be a tenant's."},
    {DITFLEET_OPTION(results.s3.region),
     .description = "Region of the bucket; empty: AWS_REGION, AWS_DEFAULT_REGION or us-east-1."},
    {DITFLEET_OPTION(results.s3.endpoint),
     .description = "URL of an S3 store other than AWS, such as https://minio.example:9000. Its certificate may be "
                    "checked by AWS_CA_BUNDLE.",
     .form = Form::kHttpUrl},
    {DITFLEET_OPTION(results.s3.addressing),
     .description = "Where the bucket's name is: in the path, in the host's name (virtual), or auto: in the host's "
                    "name at AWS, in the path elsewhere.",
     .choices = "auto|path|virtual"},
    {DITFLEET_OPTION(results.s3.links),
     .description = "Answer with links from which clients fetch results in the store themselves; they are valid as "
                    "long as the gateway's own, and at most for seven days. Without it, the gateway sends results."},
    {DITFLEET_OPTION(results.s3.delete_expired),
     .description = "Delete results after queue.retention_ms. Without it, the bucket keeps them until a lifecycle rule "
                    "deletes them."},
    {DITFLEET_OPTION(results.s3.inputs),
     .description = "Places from which jobs may take images by s3:// URL, such as s3://photos/2026/, separated by "
                    "commas; empty: none. A tenant's own are tenants.NAME.s3_inputs."},

    {DITFLEET_OPTION(loras.folders),
     .description = "Folders whose files may be registered as LoRA adapters by path, separated by ':'. Workers need "
                    "the same option, and the files under the same paths. If empty, adapters can only be uploaded.",
     .form = Form::kPaths},
    {DITFLEET_OPTION(loras.max_upload_bytes),
     .description = "Largest adapter file, uploaded or registered by path; larger ones get 413. Uploads are stored in "
                    "Redis and cost its memory.",
     .range = {1 << 20, kManyBytes}},

    {DITFLEET_OPTION(compile.backend),
     .description = "Compiler for the models' repeated blocks: nvrtc (GPU), cpu_jit (CPU, with the system's C++ "
                    "compiler) or eager (none). auto uses nvrtc or cpu_jit if available, otherwise eager; in bf16 on a "
                    "CPU it uses eager, which matches diffusers bit for bit.",
     .choices = "auto|nvrtc|cpu_jit|eager"},
    {DITFLEET_OPTION(compile.mode),
     .description =
         "Compilation mode. reduce-overhead adds CUDA graphs, which cost device memory per class. "
         "PyTorch's names max-autotune-no-cudagraphs and max-autotune equal default and reduce-overhead, because "
         "attention is always measured. On a CPU all modes equal default.",
     .choices = "default|reduce-overhead|max-autotune-no-cudagraphs|max-autotune"},
    {DITFLEET_OPTION(compile.attention),
     .description = "Attention implementation: cudnn and efficient on a GPU, fa3 (FlashAttention-3, installed by "
                    "ditfleet-worker-setup --fa3) on Hopper, flash on a CPU or in bf16 on a GPU, math anywhere. auto "
                    "measures cudnn, fa3 and flash once for a GPU and a range of lengths, and uses the fastest.",
     .choices = "auto|cudnn|fa3|flash|efficient|math"},
    {DITFLEET_OPTION(compile.fullgraph),
     .description = "Fail instead of falling back to eager code, for every reason of ditfleet_region_fallbacks_total."},
    {DITFLEET_OPTION(compile.dynamic),
     .description = "Compile one program for all sizes. If false, each size is compiled separately."},
    {DITFLEET_OPTION(compile.error_on_recompile), .description = "Fail if a block needs a second program."},
    {DITFLEET_OPTION(compile.recompile_limit),
     .description =
         "Maximum compiled programs per block. Beyond it the block runs eagerly, or fails with compile.fullgraph.",
     .range = {1, 1000}},
    {DITFLEET_OPTION(compile.cxx),
     .description = "C++ compiler of cpu_jit: a path, or a name to find in PATH. If empty, the variable DITFLEET_CXX, "
                    "else c++."},
    {DITFLEET_OPTION(compile.nvrtc),
     .description = "Path of NVIDIA's run-time compiler, libnvrtc.so.13. If empty, the variable DITFLEET_NVRTC, else "
                    "the usual locations.",
     .form = Form::kPath},
    {DITFLEET_OPTION(compile.components.transformer), .description = "Compile the transformer."},
    {DITFLEET_OPTION(compile.components.vae),
     .description = "Compile the operations between the VAE's convolutions, on a GPU. auto: if possible. true on a CPU "
                    "counts as a fallback, or fails with compile.fullgraph.",
     .choices = "auto|true|false"},

    {DITFLEET_OPTION(cache.dir),
     .description = "Folder of the kernel cache, which stores compiled programs. Workers of one host may share it. If "
                    "empty, `kernels` in the data folder (data.dir).",
     .form = Form::kPath},
    {DITFLEET_OPTION(cache.memory_bytes),
     .description = "Memory for compiled programs in each worker; 0 disables this tier.", .range = {0, kManyBytes}},
    {DITFLEET_OPTION(cache.disk_bytes),
     .description = "Size of cache.dir above which the least recently used programs are deleted; 0 disables this tier.",
     .range = {0, kManyBytes}},
    {DITFLEET_OPTION(cache.redis),
     .description = "Share compiled programs through redis.url. Without cache.secret or cache.secret_file this is off; "
                    "`ditfleet up` sets a secret for its private Redis."},
    {DITFLEET_OPTION(cache.secret),
     .description = "Signs compiled programs. All nodes that share programs need the same secret. At least 16 "
                    "characters, such as the output of `openssl rand -hex 32`. Prefer cache.secret_file or the "
                    "environment, which keep it out of sight.",
     .form = Form::kSecret},
    {DITFLEET_OPTION(cache.secret_file),
     .description = "File with the secret on one line. If both are empty, a generated secret in the file `secret` in "
                    "cache.dir signs the programs on disk.",
     .form = Form::kPath},
    {DITFLEET_OPTION(cache.redis_timeout_ms),
     .description = "Timeout of one operation on Redis; half of it counts as too slow. After three slow operations in "
                    "a row the cache stops using Redis for a while.",
     .range = {10, 10'000}},
    {DITFLEET_OPTION(cache.redis_ttl_ms),
     .description = "How long a program stays in Redis after it was stored or last read.", .range = {60'000, kManyMs}},
    {DITFLEET_OPTION(cache.lock_ms),
     .description =
         "A compiling process that is silent for this long is considered dead, and another one compiles instead.",
     .range = {100, 4500}},
    {DITFLEET_OPTION(cache.wait_ms),
     .description = "Maximum wait for a program that another process is compiling. After it the worker compiles the "
                    "program itself. 0 disables waiting; otherwise at least twice cache.lock_ms.",
     .range = {0, 9000}},

    {DITFLEET_OPTION(data.dir),
     .description = "Where `ditfleet up` stores Redis' files, logs and results, and where a coordinator remembers that "
                    "keys are required. If empty, $XDG_STATE_HOME/ditfleet, else ~/.local/state/ditfleet.",
     .form = Form::kPath},

    {DITFLEET_OPTION(telemetry.otlp_endpoint),
     .description =
         "Base URL of an OTLP/HTTP receiver for spans in JSON, such as http://127.0.0.1:4318. If empty, "
         "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; without them no spans are recorded.",
     .form = Form::kHttpUrl},
    {DITFLEET_OPTION(telemetry.trace_url),
     .description =
         "Where the tracing backend shows a trace, such as https://jaeger.example/trace/{trace_id}. A job's page links "
         "to it, for everybody who may see the job. If empty, the page shows the trace's id only.",
     .form = Form::kHttpUrl},
    {DITFLEET_OPTION(telemetry.sample_rate),
     .description = "The share of new traces that are exported. A request's traceparent decides for itself. With 1, "
                    "OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG apply.",
     .range = {0, 1}},
    {DITFLEET_OPTION(telemetry.slow_s),
     .description = "Jobs that take at least this many seconds from submission on are exported even if their trace is "
                    "not sampled, like failed and retried ones: the spans of the worker. 0: no job is slow.",
     .range = {0, 86'400}},

    {DITFLEET_OPTION(log.level), .description = "Minimum severity of logged messages.",
     .choices = "trace|debug|info|warning|error|critical|off"},
    {DITFLEET_OPTION(log.format), .description = "Plain text, or one JSON object per line.", .choices = "text|json"},
};

#undef DITFLEET_OPTION

bool are_origins(std::string_view text) {
  const auto origins = split(text, ',');
  return std::all_of(origins.begin(), origins.end(), [](std::string_view one) {
    if (one == "*") return true;
    const bool http = one.starts_with("http://") || one.starts_with("https://");
    const std::string_view authority = one.substr(std::min(one.size(), one.find("://") + 3));
    return http && !authority.empty() && authority.find_first_of("/?#@ \t") == std::string_view::npos;
  });
}

bool has_form(Form form, std::string_view text) {
  if (text.empty()) return form != Form::kListen && form != Form::kDevice;
  switch (form) {
    case Form::kAny:
    case Form::kPath:
    case Form::kPaths: return true;
    case Form::kPassword: return text.find_first_of("\r\n") == std::string_view::npos;
    case Form::kListen:
    case Form::kListenIfAny: return ListenAddress::parse(text).ok();
    case Form::kHttpUrl: return !http_url_problem(text);
    case Form::kOrigins: return are_origins(text);
    case Form::kRedisUrl: return redis::Endpoint::parse(text).ok();
    case Form::kMemory: {
      const auto digits = text.find_first_not_of("0123456789");
      const auto unit = digits == std::string_view::npos ? std::string_view() : text.substr(digits);
      constexpr std::string_view kUnits[] = {"", "k", "kb", "m", "mb", "g", "gb"};
      return digits != 0 && std::find(std::begin(kUnits), std::end(kUnits), unit) != std::end(kUnits);
    }
    case Form::kDevice:
      return text == "auto" || text == "cpu" || text == "cuda" ||
             (text.starts_with("cuda:") && number_of(text.substr(5), 0, 255));
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
    case Form::kPaths: return "paths";
    case Form::kListen:
    case Form::kListenIfAny: return "HOST:PORT";
    case Form::kHttpUrl: return "http:// or https:// URL";
    case Form::kOrigins: return "* or origins, as https://app.example,http://localhost:3000, without paths and spaces";
    case Form::kRedisUrl: return "redis://, rediss://, redis+sentinel://, rediss+sentinel:// or unix:// URL";
    case Form::kMemory: return "a size such as 512mb or 4gb";
    case Form::kDevice: return "auto, cpu, cuda or cuda:N";
    case Form::kSecret: return "16 to 4096 characters on one line";
    case Form::kPassword: return "text on one line";
    case Form::kName: return "a name of at most 64 characters without spaces, colons, slashes or braces";
  }
  return "text";
}

std::optional<bool> parse_bool(std::string_view text) {
  if (text == "true" || text == "yes" || text == "on" || text == "1") return true;
  if (text == "false" || text == "no" || text == "off" || text == "0") return false;
  return std::nullopt;
}

// Why `text` was refused, as the end of a sentence. Does not repeat secrets or URLs, which may contain a password.
std::string refusal_of(const Option& option, const std::string& text) {
  const std::string right = "; it must be " + type_text(option);
  if (option.form == Form::kSecret || option.form == Form::kPassword ||
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

bool is_one_of(std::string_view choices, std::string_view text) {
  const auto all = split(choices, '|');
  return std::find(all.begin(), all.end(), text) != all.end();
}

std::string choices_text(std::string_view choices) {
  std::string text;
  for (const std::string_view choice : split(choices, '|')) text.append(text.empty() ? "one of " : ", ").append(choice);
  return text;
}

std::string type_text(const Option& option) {
  if (std::holds_alternative<bool& (*)(Settings&)>(option.at)) return "true or false";
  if (!std::holds_alternative<std::string& (*)(Settings&)>(option.at)) {
    const bool real = std::holds_alternative<double& (*)(Settings&)>(option.at);
    return (real ? "a number from " : "an integer from ") + std::to_string(option.range.low) + " to " +
           std::to_string(option.range.high);
  }
  return option.choices.empty() ? std::string(form_text(option.form)) : choices_text(option.choices);
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
        else if constexpr (std::is_same_v<T, double>)
          return (std::ostringstream() << value).str();
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
        } else if constexpr (std::is_same_v<T, double>) {
          const auto parsed =
              number_of(text, static_cast<double>(option.range.low), static_cast<double>(option.range.high));
          if (parsed) value = *parsed;
          return parsed.has_value();
        } else {
          const auto parsed = number_of(text, option.range.low, option.range.high);
          if (parsed) value = static_cast<T>(*parsed);
          return parsed.has_value();
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
