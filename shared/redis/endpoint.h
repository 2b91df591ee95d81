// The address of a Redis as a URL. It is a separate library (ditfleet_redis_endpoint) for users that need no
// connection.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/core/result.h"

namespace ditfleet::redis {

// redis://[user:password@]host[:port][/db], rediss://… (TLS), unix:///path[?db=N],
// redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db], rediss+sentinel://….
struct Endpoint {
  bool tls = false;
  std::string unix_path;  // if not empty, the path of a unix socket, used instead of host and port
  std::string host = "127.0.0.1";
  int port = 6379;
  int db = 0;
  std::string user, password;
  std::string tls_ca_file;  // empty: the system's certificates
  bool tls_verify = true;
  std::string tls_cert_file, tls_key_file;  // of this client, in PEM; empty: none

  // If not empty, sentinels that say which host and port is the master of `service`. `user`, `password`, `db` and TLS
  // are those of the master. TLS also applies to the sentinels.
  struct Node {
    std::string host;
    int port = 26379;
    bool operator==(const Node&) const = default;
  };
  std::vector<Node> sentinels;
  std::string service;
  std::string sentinel_user, sentinel_password;  // empty: the sentinels require no log-in

  // kInvalidArgument: the message says which part is wrong, and never contains a password.
  static Result<Endpoint> parse(std::string_view url);
  std::string display() const;  // without credentials
  std::string url() const;      // the text for parse(); without the TLS files, tls_verify and the sentinels' log-in
};

}  // namespace ditfleet::redis
