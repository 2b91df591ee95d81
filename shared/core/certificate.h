// The certificate and the private key of a TLS server or client.
#pragma once

#include <cstdint>
#include <string>

#include "shared/core/result.h"

namespace ditfleet {

// Opens a certificate chain and the unencrypted private key of its first certificate, both in PEM. Returns when this
// certificate expires, in seconds since 1970. Blocks. Errors: those of read_secret_file() for the key, kInvalidArgument
// (not PEM, or not of one pair); the message begins with the option's name, SECTION.tls_cert_file or
// SECTION.tls_key_file.
Result<std::int64_t> check_certificate(const std::string& section, const std::string& cert_file,
                                       const std::string& key_file);

}  // namespace ditfleet
