// libFuzzer: any bytes as the head of an HTTP request. The first byte selects the gateway's configuration. A head that
// is accepted must match a route or not without harm, and a site that is refused gets a message in UTF-8.
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "coordinator/gateway/http/reading.h"
#include "coordinator/gateway/routes/foreign_site.h"
#include "coordinator/gateway/routes/router.h"
#include "shared/core/bytes.h"

namespace {

using namespace ditfleet;
namespace http = boost::beast::http;

gateway::Router routes() {
  gateway::Router router;
  for (const char* pattern : {"/", "/healthz", "/v1/jobs", "/v1/jobs/{id}", "/v1/jobs/{id}/results/{index}"})
    router.add({.method = "GET", .pattern = pattern, .handler = {}});
  router.add({.method = "POST", .pattern = "/v1/jobs", .handler = {}});
  return router;
}

void require(bool held) {
  if (!held) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const gateway::Router router = routes();
  if (size == 0) return 0;
  config::Settings settings;
  settings.gateway.open = (data[0] & 1) != 0;
  if ((data[0] & 2) != 0) settings.gateway.public_url = "https://images.example/base";
  http::request_parser<http::empty_body> parser;
  parser.header_limit(16 << 10);
  boost::system::error_code ec;
  parser.put(boost::asio::buffer(data + 1, size - 1), ec);
  if (ec || !parser.is_header_done()) {
    if (ec && gateway::is_protocol_error(ec)) require(!gateway::describe(ec).message.empty());
    return 0;
  }
  if (const auto problem = gateway::problem_of(parser.get())) {
    require(problem->status >= 400 && !problem->message.empty());
    return 0;
  }
  (void)gateway::expects_continue(parser.get());
  const auto request = gateway::request_of(parser.get());
  if (!request) {
    require(!request.error().message.empty() && is_valid_utf8(request.error().message));
    return 0;
  }
  for (const std::string& segment : request->segments) require(is_valid_utf8(segment));
  const auto match = router.match(*request);
  require(match.route == nullptr || !match.allow.empty());
  if (const auto refused = gateway::refuse_foreign_site(*request, settings))
    require(refused->status == 403 && is_valid_utf8(refused->body));
  return 0;
}
