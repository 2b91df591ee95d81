// HOST:PORT addresses to listen on, and URLs of HTTP services.
#include <gtest/gtest.h>

#include "shared/core/http_url.h"
#include "shared/core/listen_address.h"

namespace ditfleet {
namespace {

TEST(ListenAddress, ParsesAndReturnsTheUrl) {
  EXPECT_EQ(ListenAddress::parse("localhost:80")->host, "localhost");
  EXPECT_EQ(ListenAddress::parse("0.0.0.0:80")->local_url(), "http://127.0.0.1:80");
  EXPECT_EQ(ListenAddress::parse("[::]:80")->local_url(), "http://[::1]:80");
  EXPECT_EQ(ListenAddress::parse("[::1]:81")->text(), "[::1]:81");
  EXPECT_EQ(ListenAddress::parse("a:0")->port, 0);
}

TEST(ListenAddress, NoHostMeansEveryInterface) {
  EXPECT_EQ(ListenAddress::parse(":80")->text(), "0.0.0.0:80");
  EXPECT_EQ(ListenAddress::parse("*:80")->text(), "0.0.0.0:80");
}

TEST(ListenAddress, RefusesInvalidAddresses) {
  for (const char* wrong :
       {"", "80", "a", "a:", "a:b", "a:65536", "a:-1", "a:1 ", "a b:1", "http://a:1", "::1:80", "[]:80", "[:80"}) {
    const auto parsed = ListenAddress::parse(wrong, "gateway.listen");
    ASSERT_FALSE(parsed.ok()) << wrong;
    EXPECT_EQ(parsed.error().code, Code::kInvalidArgument);
    EXPECT_EQ(parsed.error().param, "gateway.listen");
  }
}

TEST(HttpUrl, AcceptsAHostWithOrWithoutAPort) {
  for (const char* right : {"http://a", "https://a.example/x", "http://a:1", "http://a:65535/x?y:99999",
                            "http://[::1]:80", "http://[::1]/", "http://user:p@ss@a:80", "http://a/b@c:99999"})
    EXPECT_EQ(http_url_problem(right), std::nullopt) << right;
}

TEST(HttpUrl, HasParts) {
  const HttpUrl v6 = http_url_parts("https://u:p@x@[FD00::1]:8443/a/b?c=@d");
  EXPECT_EQ(v6.scheme, "https");
  EXPECT_EQ(v6.user, "u:p@x");
  EXPECT_EQ(v6.authority, "[FD00::1]:8443");
  EXPECT_EQ(v6.host, "FD00::1");
  EXPECT_EQ(v6.port, ":8443");
  EXPECT_EQ(v6.rest, "/a/b?c=@d");
  const HttpUrl plain = http_url_parts("http://a.example?x");
  EXPECT_EQ(plain.host, "a.example");
  EXPECT_EQ(std::string(plain.port) + std::string(plain.user), "");
  EXPECT_EQ(plain.rest, "?x");
}

TEST(HttpUrl, NamesTheFaultWithoutThePassword) {
  const auto problem = [](const char* url) { return http_url_problem(url).value_or("nothing"); };
  EXPECT_EQ(problem("http://a:99999"), "has port '99999'; a port is a number from 1 to 65535");
  for (const char* wrong :
       {"http://a:0", "http://a:", "http://a:+1", "http://a:b", "http://[::1]80", "http://u:hunter2@a:99999/"}) {
    EXPECT_NE(problem(wrong).find("a port is a number"), std::string::npos) << wrong << ": " << problem(wrong);
    EXPECT_EQ(problem(wrong).find("hunter2"), std::string::npos);
  }
  EXPECT_EQ(problem("a:80"), "begins with neither http:// nor https://");
  for (const char* wrong : {"http://", "http:///x", "https://:80", "http://u:p@:80", "http://[]:80"})
    EXPECT_EQ(problem(wrong), "has no host") << wrong;
  EXPECT_EQ(problem("http://[::1:80"), "has an address without its closing ]");
  EXPECT_EQ(problem("http://a b:80"), "has a space in its host");
}

}  // namespace
}  // namespace ditfleet
