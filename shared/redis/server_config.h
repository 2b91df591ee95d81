// The redis.conf of a Redis that DiTFleet starts (`ditfleet up`, benches, tests). README.md explains the settings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::redis {

struct ServerConfig {
  std::string dir;                       // an existing folder for the append-only file and the log
  std::string unix_socket;               // empty: none
  int port = 0;                          // TCP port on 127.0.0.1; 0: no TCP
  std::string appendfsync = "everysec";  // always | everysec | no
  std::string maxmemory;                 // as in redis.conf ("2gb"); empty: no limit
  std::string password;                  // empty: none
  // If tls_cert_file is set, `port` uses TLS instead of plain TCP.
  std::string tls_cert_file, tls_key_file, tls_ca_file;
  std::vector<std::string> extra;  // further lines, which override the lines before
};

// The text of redis.conf. Paths with spaces or quotes are quoted.
std::string redis_server_config(const ServerConfig& config);

}  // namespace ditfleet::redis
