// The certificate and the private key of a TLS server.
#pragma once

#include <cstdint>
#include <string>

#include "shared/core/result.h"

namespace ditfleet {

// Opens a certificate chain and the unencrypted private key of its first certificate, both in PEM. Returns when this
// certificate expires, in seconds since 1970. Blocks. Errors: those of read_secret_file() for the key, kInvalidArgument
// (not PEM, or not of one pair); the message begins with the option's name.
Result<std::int64_t> check_certificate(const std::string& cert_file, const std::string& key_file);

}  // namespace ditfleet
