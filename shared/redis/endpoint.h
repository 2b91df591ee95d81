// The address of a Redis as a URL. A library of its own (ditfleet_redis_endpoint), because checking a URL needs no
// connection.
#pragma once

#include <string>
#include <string_view>

#include "shared/core/result.h"

namespace ditfleet::redis {

// redis://[user:password@]host[:port][/db], rediss://… (TLS), unix:///path[?db=N].
struct Endpoint {
  bool tls = false;
  std::string unix_path;  // not empty: a unix socket
  std::string host = "127.0.0.1";
  int port = 6379;
  int db = 0;
  std::string user, password;
  std::string tls_ca_file;  // empty: the system's certificates
  bool tls_verify = true;

  // kInvalidArgument names the part that is wrong. The message never contains a password.
  static Result<Endpoint> parse(std::string_view url);
  std::string display() const;  // without credentials
  std::string url() const;      // parse() reads it back; without the TLS files
};

}  // namespace ditfleet::redis
