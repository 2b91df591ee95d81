// What webhooks may reach, and how their events are signed. tests/clients/webhooks_test.py sends real ones.
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <cstring>

#include "coordinator/gateway/webhooks/address.h"
#include "coordinator/gateway/webhooks/signature.h"

namespace ditfleet::gateway {
namespace {

bool is_public(const char* text) {
  sockaddr_storage storage{};
  if (std::strchr(text, ':')) {
    auto& address = reinterpret_cast<sockaddr_in6&>(storage);
    address.sin6_family = AF_INET6;
    EXPECT_EQ(inet_pton(AF_INET6, text, &address.sin6_addr), 1) << text;
  } else {
    auto& address = reinterpret_cast<sockaddr_in&>(storage);
    address.sin_family = AF_INET;
    EXPECT_EQ(inet_pton(AF_INET, text, &address.sin_addr), 1) << text;
  }
  return is_public_address(reinterpret_cast<const sockaddr&>(storage));
}

TEST(Webhooks, AddressesThatAreNotPublic) {
  for (const char* address : {"0.0.0.0",
                              "10.0.0.1",
                              "100.64.0.1",
                              "127.0.0.1",
                              "127.255.255.255",
                              "169.254.169.254",
                              "172.16.0.1",
                              "172.31.255.255",
                              "192.0.0.8",
                              "192.168.1.1",
                              "198.18.0.1",
                              "198.19.255.255",
                              "203.0.113.9",
                              "224.0.0.1",
                              "240.0.0.1",
                              "255.255.255.255",
                              "::",
                              "::1",
                              "::ffff:10.0.0.1",
                              "::127.0.0.1",
                              "64:ff9b::a00:1",
                              "fc00::1",
                              "fd12::1",
                              "fe80::1",
                              "ff02::1",
                              "2001::1",
                              "2001:db8::1",
                              "2002:7f00:1::",
                              "3fff::1",
                              "4000::1"})
    EXPECT_FALSE(is_public(address)) << address;
  for (const char* address : {"1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.0.0.1",
                              "172.15.0.1", "172.32.0.1", "192.167.0.1", "198.17.0.1", "198.20.0.1", "223.255.255.255",
                              "2606:4700::1111", "2a00::1", "::ffff:8.8.8.8", "2002:808:808::", "64:ff9b::808:808"})
    EXPECT_TRUE(is_public(address)) << address;
}

TEST(Webhooks, HostsOfUrls) {
  EXPECT_EQ(host_of("https://App.Example:8443/x@y"), "app.example");
  EXPECT_EQ(host_of("http://user:pw@[FD00::1]:80?x"), "fd00::1");
  EXPECT_EQ(host_of("http://app.example.#x"), "app.example");
  EXPECT_TRUE(is_listed_host("https://a.hooks.test/x", "app.example, *.hooks.test"));
  EXPECT_TRUE(is_listed_host("https://APP.example:1/", "app.example,*.hooks.test"));
  EXPECT_FALSE(is_listed_host("https://hooks.test/", "app.example,*.hooks.test"));
  EXPECT_FALSE(is_listed_host("https://evilhooks.test/", "*.hooks.test"));
  EXPECT_FALSE(is_listed_host("https://app.example.evil.test/", "app.example"));
  EXPECT_TRUE(is_listed_host("https://any.test/", ""));
}

// The example of Standard Webhooks' own libraries.
TEST(Webhooks, Signature) {
  EXPECT_EQ(webhook_signature({"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330,
                              R"({"test": 2432232314})"),
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
  const std::string secret = new_webhook_secret();
  EXPECT_EQ(secret.size(), 6U + 44U);
  EXPECT_NE(secret, new_webhook_secret());
  EXPECT_EQ(webhook_signature({secret, secret}, "a", 1, "b").size(), 2U * 47U + 1U);
}

}  // namespace
}  // namespace ditfleet::gateway
