// HOST:PORT as people write it.
#include "shared/core/listen_address.h"

#include <gtest/gtest.h>

namespace ditfleet {
namespace {

TEST(ListenAddress, ParsesAndTellsTheUrl) {
  EXPECT_EQ(ListenAddress::parse("localhost:80")->host, "localhost");
  EXPECT_EQ(ListenAddress::parse("0.0.0.0:80")->local_url(), "http://127.0.0.1:80");
  EXPECT_EQ(ListenAddress::parse("[::]:80")->local_url(), "http://[::1]:80");
  EXPECT_EQ(ListenAddress::parse("[::1]:81")->text(), "[::1]:81");
  EXPECT_EQ(ListenAddress::parse("a:0")->port, 0);
}

TEST(ListenAddress, WithoutAHostIsEveryInterface) {
  EXPECT_EQ(ListenAddress::parse(":80")->text(), "0.0.0.0:80");
  EXPECT_EQ(ListenAddress::parse("*:80")->text(), "0.0.0.0:80");
}

TEST(ListenAddress, RefusesWhatIsNone) {
  for (const char* wrong : {"", "80", "a", "a:", "a:b", "a:65536", "a:-1", "a:1 ", "a b:1", "http://a:1", "::1:80", "[]:80", "[:80"}) {
    const auto parsed = ListenAddress::parse(wrong, "gateway.listen");
    ASSERT_FALSE(parsed.ok()) << wrong;
    EXPECT_EQ(parsed.error().code, Code::kInvalidArgument);
    EXPECT_EQ(parsed.error().param, "gateway.listen");
  }
}

}  // namespace
}  // namespace ditfleet
