// A worker's metrics over HTTP, on a port of the loopback.
#include "shared/telemetry/metrics_server.h"

#include <arpa/inet.h>
#include <curl/curl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <prometheus/counter.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "shared/telemetry/metrics.h"

namespace ditfleet::telemetry {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Fetched {
  long status = 0;
  std::string body;
};

Fetched get(const std::string& url) {
  Fetched fetched;
  CURL* curl = curl_easy_init();
  curl_easy_setopt(curl, CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl, CURLOPT_TIMEOUT, 10L);
  curl_easy_setopt(curl, CURLOPT_PROXY, "");
  curl_easy_setopt(curl, CURLOPT_WRITEDATA, &fetched.body);
  curl_easy_setopt(
      curl, CURLOPT_WRITEFUNCTION, +[](char* data, std::size_t size, std::size_t count, void* body) {
        static_cast<std::string*>(body)->append(data, size * count);
        return size * count;
      });
  curl_easy_perform(curl);
  curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &fetched.status);
  curl_easy_cleanup(curl);
  return fetched;
}

TEST(MetricsServer, ServesWhatTheProcessCounts) {
  auto& counter =
      prometheus::BuildCounter().Name("test_things_total").Help("Things").Register(registry()).Add({{"kind", "good"}});
  const auto server = MetricsServer::start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.error().message;
  EXPECT_THAT((*server)->url(), StartsWith("http://127.0.0.1:"));
  counter.Increment(3);
  const auto first = get((*server)->url());
  EXPECT_EQ(first.status, 200);
  EXPECT_THAT(first.body, HasSubstr("test_things_total{kind=\"good\"} 3"));
  counter.Increment();
  EXPECT_THAT(get((*server)->url()).body, HasSubstr("test_things_total{kind=\"good\"} 4"));
  const std::string url = (*server)->url();
  EXPECT_EQ(get(url.substr(0, url.rfind('/')) + "/elsewhere").status, 404);
}

TEST(MetricsServer, TellsWhetherTheProcessIsReady) {
  std::atomic<const char*> why = "loading the models";
  const auto server = MetricsServer::start("127.0.0.1:0", [&] { return std::string(why); });
  ASSERT_TRUE(server.ok()) << server.error().message;
  const std::string url = (*server)->url(), base = url.substr(0, url.rfind('/'));
  EXPECT_EQ(get(base + "/healthz").status, 200);
  const auto loading = get(base + "/readyz");
  EXPECT_EQ(loading.status, 503);
  EXPECT_EQ(loading.body, "loading the models\n");
  why = "";
  EXPECT_EQ(get(base + "/readyz").status, 200);
  EXPECT_EQ(get(base + "/readyz/more").status, 404);
}

// As a browser opens some in advance, or as somebody who means harm does.
TEST(MetricsServer, ConnectionsThatAskNothingKeepNoScrapeOut) {
  const auto server = MetricsServer::start("127.0.0.1:0");
  ASSERT_TRUE(server.ok()) << server.error().message;
  const std::string url = (*server)->url();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(std::stoi(url.substr(url.rfind(':') + 1))));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> idle;
  for (int i = 0; i < 7; ++i) {
    idle.push_back(::socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(::connect(idle.back(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (i % 2 == 1) {
      ASSERT_EQ(::send(idle.back(), "GET /met", 8, 0), 8);
    }
  }
  EXPECT_EQ(get(url).status, 200);
  for (const int one : idle) ::close(one);
}

TEST(MetricsServer, SaysWhereItCannotListen) {
  const auto first = MetricsServer::start("127.0.0.1:0");
  ASSERT_TRUE(first.ok());
  const std::string url = (*first)->url(), address = url.substr(7, url.rfind('/') - 7);
  const auto second = MetricsServer::start(address);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.error().code, Code::kUnavailable);
  EXPECT_EQ(second.error().message, address + " is in use; set worker.metrics_listen to another address");
  EXPECT_THAT(MetricsServer::start("198.51.100.1:0").error().message,
              AllOf(HasSubstr("198.51.100.1:0: Cannot assign"), HasSubstr("an address of this host")));
  EXPECT_EQ(MetricsServer::start("nowhere").error().code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace ditfleet::telemetry
