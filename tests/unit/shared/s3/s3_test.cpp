#include <gtest/gtest.h>

#include "shared/s3/client.h"

namespace ditfleet::s3 {
namespace {

// The examples of https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.
const Credentials kKeys{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
constexpr std::int64_t kAt = 1369353600;  // 2013-05-24
const std::string kNothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

SignedParts parts(const std::string& method, const std::string& path, const std::string& sha256 = kNothing) {
  return {method,
          "examplebucket.s3.amazonaws.com",
          path,
          {},
          {{"x-amz-content-sha256", sha256}, {"x-amz-date", "20130524T000000Z"}},
          sha256};
}

std::string signed_by(const SignedParts& what) {
  const std::string header = authorization(what, kKeys, "us-east-1", kAt);
  return header.substr(header.find("Signature=") + 10);
}

TEST(S3Signature, IsThatOfAwsExamples) {
  SignedParts get = parts("GET", "/test.txt");
  get.headers["range"] = "bytes=0-9";
  EXPECT_EQ(authorization(get, kKeys, "us-east-1", kAt),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  SignedParts put = parts("PUT", "/" + uri_encoded("test$file.text", true),
                          "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072");
  put.headers["date"] = "Fri, 24 May 2013 00:00:00 GMT";
  put.headers["x-amz-storage-class"] = "REDUCED_REDUNDANCY";
  EXPECT_EQ(signed_by(put), "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  SignedParts lifecycle = parts("GET", "/");
  lifecycle.query["lifecycle"] = "";
  EXPECT_EQ(signed_by(lifecycle), "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  SignedParts list = parts("GET", "/");
  list.query = {{"prefix", "J"}, {"max-keys", "2"}};
  EXPECT_EQ(signed_by(list), "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(S3Signature, OfALinkIsThatOfAwsExample) {
  EXPECT_EQ(presigned_query({"GET", "examplebucket.s3.amazonaws.com", "/test.txt", {}}, kKeys, "us-east-1", kAt, 86400),
            "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2F"
            "aws4_request&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host&X-Amz-Signature="
            "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404");
}

TEST(S3Signature, EncodesAsAws) {
  EXPECT_EQ(uri_encoded("a/b c+~é", true), "a/b%20c%2B~%C3%A9");
  EXPECT_EQ(uri_encoded("a/b"), "a%2Fb");
}

TEST(S3Credentials, AreThoseOfTheProfile) {
  const std::string file =
      "# mine\n[default]\r\naws_access_key_id = A\naws_secret_access_key=s=1 \n; old\n[other]\n"
      "aws_access_key_id=B\naws_secret_access_key=t\naws_session_token = u\nregion = x\n[half]\naws_access_key_id=C\n";
  const auto first = credentials_in(file, "default"), other = credentials_in(file, "other");
  ASSERT_TRUE(first.ok() && other.ok());
  EXPECT_EQ(first->id + "|" + first->secret + "|" + first->token, "A|s=1|");
  EXPECT_EQ(other->id + "|" + other->secret + "|" + other->token, "B|t|u");
  EXPECT_EQ(credentials_in(file, "none").error().code, Code::kNotFound);
  EXPECT_EQ(credentials_in(file, "half").error().code, Code::kInvalidArgument);
}

TEST(S3Credentials, OfARoleExpire) {
  const auto role = credentials_of_answer(
      R"({"AccessKeyId":"A","SecretAccessKey":"s","Token":"t","Expiration":"2013-05-24T00:00:00Z"})");
  ASSERT_TRUE(role.ok());
  EXPECT_EQ(role->token, "t");
  EXPECT_EQ(role->expires_ms, kAt * 1000);
  for (const char* wrong : {"", "[]", "{}", R"({"AccessKeyId":"A"})", "<html>"})
    EXPECT_FALSE(credentials_of_answer(wrong).ok()) << wrong;
}

TEST(S3Client, FindsTheBucketsHost) {
  const auto origin = [](Options options, const char* bucket = "photos") { return Client(options).origin(bucket); };
  EXPECT_EQ(origin({.region = "eu-west-1"}), "https://photos.s3.eu-west-1.amazonaws.com");
  EXPECT_EQ(origin({.region = "eu-west-1"}, "my.photos"), "https://s3.eu-west-1.amazonaws.com");
  EXPECT_EQ(origin({.endpoint = "http://10.0.0.1:9000/"}), "http://10.0.0.1:9000");
  EXPECT_EQ(origin({.endpoint = "https://store.example", .addressing = "virtual"}), "https://photos.store.example");
  EXPECT_EQ(origin({.endpoint = "https://store.example:443"}), "https://store.example");
  EXPECT_EQ(origin({.endpoint = "http://store.example:80/"}), "http://store.example");
  EXPECT_EQ(origin({.endpoint = "http://store.example:443"}), "http://store.example:443");
  EXPECT_EQ(Client({}).link("photos", "a", 60), "");
}

}  // namespace
}  // namespace ditfleet::s3
