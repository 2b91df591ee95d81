#include "shared/redis/server_config.h"

namespace ditfleet::redis {
namespace {

// redis.conf: double quotes, with \ before " and \.
std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

}  // namespace

std::string redis_server_config(const ServerConfig& config) {
  std::string out;
  const auto line = [&](const std::string& key, const std::string& value) { out += key + ' ' + value + '\n'; };
  line("daemonize", "no");
  line("dir", quoted(config.dir));
  if (!config.unix_socket.empty()) {
    line("unixsocket", quoted(config.unix_socket));
    line("unixsocketperm", "700");
  }
  line("bind", "127.0.0.1");
  if (config.tls_cert_file.empty()) {
    line("port", std::to_string(config.port));
  } else {
    line("port", "0");
    line("tls-port", std::to_string(config.port));
    line("tls-cert-file", quoted(config.tls_cert_file));
    line("tls-key-file", quoted(config.tls_key_file));
    if (!config.tls_ca_file.empty()) line("tls-ca-cert-file", quoted(config.tls_ca_file));
    line("tls-auth-clients", "no");
  }
  if (!config.password.empty()) line("requirepass", quoted(config.password));
  line("loglevel", "notice");

  line("save", "\"\"");  // the append-only file is the one copy on disk
  line("appendonly", "yes");
  line("appendfsync", config.appendfsync);
  line("auto-aof-rewrite-percentage", "100");
  line("auto-aof-rewrite-min-size", "1gb");  // a rewrite forks and takes a core
  line("maxmemory-policy", "noeviction");    // a queue refuses work but never forgets it
  if (!config.maxmemory.empty()) line("maxmemory", config.maxmemory);

  line("latency-tracking", "no");  // one histogram update less per command of a Function

  // A job is a hash with one long field: it stays a packed list. A stream's first node is allocated at this size.
  line("hash-max-listpack-entries", "128");
  line("hash-max-listpack-value", "4096");
  line("stream-node-max-bytes", "448");
  for (const std::string& extra : config.extra) out += extra + '\n';
  return out;
}

}  // namespace ditfleet::redis
