#include "shared/core/certificate.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cstring>
#include <ctime>
#include <memory>

#include "shared/core/secrets.h"

namespace ditfleet {
namespace {

std::string reason() {
  const unsigned long error = ERR_peek_error();
  if (ERR_SYSTEM_ERROR(error)) return std::strerror(ERR_GET_REASON(error));
  const char* text = ERR_reason_error_string(error);
  return text ? text : "no reason given";
}

}  // namespace

Result<std::int64_t> check_certificate(const std::string& section, const std::string& cert_file,
                                       const std::string& key_file) {
  if (auto key = read_secret_file(key_file); !key)
    return Error{key.error().code, section + ".tls_key_file: " + key.error().message, {}};
  ERR_clear_error();
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  // Without it, OpenSSL would ask for the password of an encrypted key on the terminal.
  SSL_CTX_set_default_passwd_cb(context.get(), [](char*, int, int, void*) { return 0; });
  if (SSL_CTX_use_certificate_chain_file(context.get(), cert_file.c_str()) != 1) {
    return invalid_argument(section + ".tls_cert_file: '" + cert_file +
                            "' is not a readable certificate chain in PEM: " + reason());
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), key_file.c_str(), SSL_FILETYPE_PEM) != 1) {
    return invalid_argument(section + ".tls_key_file: '" + key_file +
                            "' is not the unencrypted PEM private key of the certificate in '" + cert_file +
                            "': " + reason());
  }
  std::tm end{};
  ASN1_TIME_to_tm(X509_get0_notAfter(SSL_CTX_get0_certificate(context.get())), &end);
  return ::timegm(&end);
}

}  // namespace ditfleet
