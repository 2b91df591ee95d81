#include "coordinator/gateway/http/tls.h"

#include "shared/core/secret_file.h"

namespace ditfleet::gateway {

namespace ssl = boost::asio::ssl;

Result<std::unique_ptr<ssl::context>> tls_context(const std::string& cert_file, const std::string& key_file) {
  if (auto key = read_secret_file(key_file); !key)
    return Error{key.error().code, "gateway.tls_key_file: " + key.error().message, {}};
  auto context = std::make_unique<ssl::context>(ssl::context::tls_server);
  SSL_CTX_set_min_proto_version(context->native_handle(), TLS1_2_VERSION);
  SSL_CTX_set_options(context->native_handle(), SSL_OP_NO_RENEGOTIATION);
  // Without it, OpenSSL would ask for the password of an encrypted key on the terminal.
  context->set_password_callback([](std::size_t, ssl::context::password_purpose) { return std::string(); });
  boost::system::error_code ec;
  context->use_certificate_chain_file(cert_file, ec);
  if (ec) {
    return invalid_argument("gateway.tls_cert_file: '" + cert_file +
                            "' is not a readable certificate chain in PEM: " + ec.message());
  }
  context->use_private_key_file(key_file, ssl::context::pem, ec);
  if (ec) {
    return invalid_argument("gateway.tls_key_file: '" + key_file +
                            "' is not the unencrypted PEM private key of the certificate in '" + cert_file +
                            "': " + ec.message());
  }
  return context;
}

}  // namespace ditfleet::gateway
