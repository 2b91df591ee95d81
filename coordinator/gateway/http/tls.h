// The TLS side of the server.
#pragma once

#include <boost/asio/ssl/context.hpp>
#include <memory>
#include <string>

#include "shared/core/result.h"

namespace ditfleet::gateway {

// TLS 1.2 or later with this certificate chain and private key, both PEM. Blocks.
// kInvalidArgument: the message names the option and the file. Errors of read_secret_file() for the key.
Result<std::unique_ptr<boost::asio::ssl::context>> tls_context(const std::string& cert_file,
                                                               const std::string& key_file);

}  // namespace ditfleet::gateway
