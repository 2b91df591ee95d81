// shared/kernel_cache: a value as bytes. Whatever was done to it, nothing comes out that was not signed.
#include "shared/kernel_cache/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sodium.h>

#include <sys/stat.h>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace ditfleet::kernel_cache {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::shared_ptr<const Secret> secret_of(const std::string& text) { return *Secret::from_text(text); }
const auto kSecret = secret_of("the secret of this cluster");
const auto kOther = secret_of("the secret of another cluster");
const Key kKey = KeyBuilder().add("program", "first").finish();

Entry entry_of(std::size_t code_bytes = 300) {
  Entry entry;
  entry.region = "double_stream";
  entry.arch = "sm_90a";
  entry.kernels = {{"norm_modulate", {8, 8, 4}, 1024, 40, 0}, {"rope", {}, 0, 64, 16}};
  entry.source_bytes = 12345;
  for (std::size_t i = 0; i < code_bytes; ++i) entry.code += static_cast<char>(i * i >> 3);
  return entry;
}

std::string encoded(const Entry& entry = entry_of(), const Key& key = kKey, const Secret& secret = *kSecret) {
  auto bytes = encode(entry, key, secret);
  EXPECT_TRUE(bytes.ok()) << bytes.error().message;
  return *bytes;
}

Refusal refusal_of(std::string_view bytes, const Key& key = kKey, const Secret& secret = *kSecret,
                   std::string_view arch = "sm_90a") {
  const auto decoded = decode(bytes, key, arch, secret);
  EXPECT_FALSE(decoded.ok());
  EXPECT_FALSE(decoded.error().message.empty());
  return decoded.error().why;
}

std::string sha256(std::string_view bytes) {
  std::string digest(32, '\0');
  crypto_hash_sha256(reinterpret_cast<unsigned char*>(digest.data()),
                     reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
  return digest;
}

// `bytes` changed by whoever knows the format but not the secret: the checksum fits again.
std::string with_checksum(std::string bytes) {
  bytes.replace(bytes.size() - 64, 32, sha256(std::string_view(bytes).substr(0, bytes.size() - 64)));
  return bytes;
}
// … and by whoever knows the secret, too.
std::string with_signature(std::string bytes, const Secret& secret = *kSecret) {
  bytes = with_checksum(std::move(bytes));
  const auto signature = secret.sign(std::string_view(bytes).substr(0, bytes.size() - 32));
  return bytes.replace(bytes.size() - 32, 32, reinterpret_cast<const char*>(signature.data()), 32);
}

TEST(KernelCacheCodec, WhatGoesInComesOut) {
  Entry empty;
  empty.arch = "cpu";
  empty.kind = Kind::kSharedObject;
  for (const Entry& entry : {entry_of(), entry_of(3 << 20), empty}) {
    const auto decoded = decode(encoded(entry), kKey, entry.arch, *kSecret);
    ASSERT_TRUE(decoded.ok()) << decoded.error().message;
    EXPECT_EQ(*decoded, entry);
  }
  EXPECT_TRUE(decode(encoded(), kKey, "", *kSecret).ok()) << "no architecture asked for: any";
}

TEST(KernelCacheCodec, IsTheSameInEveryProcess) { EXPECT_EQ(encoded(), encoded()); }

TEST(KernelCacheCodec, CodeIsCompressed) {
  Entry entry = entry_of();
  entry.code = std::string(1 << 20, 'x');
  EXPECT_LT(encoded(entry).size(), 10'000u);
}

TEST(KernelCacheCodec, EveryChangedBitIsRefused) {
  const std::string good = encoded();
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    std::string bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    const auto decoded = decode(bad, kKey, "sm_90a", *kSecret);
    ASSERT_FALSE(decoded.ok()) << "bit " << bit << " of " << good.size() * 8;
    // The signature's own bytes are not under the checksum: a change there is a signature that is not ours.
    const bool in_signature = bit / 8 >= good.size() - 32;
    EXPECT_EQ(decoded.error().why, in_signature ? Refusal::kWrongSignature : Refusal::kCorrupt) << "bit " << bit;
  }
}

TEST(KernelCacheCodec, EveryTruncationAndEveryExtensionIsRefused) {
  const std::string good = encoded();
  for (std::size_t size = 0; size < good.size(); ++size)
    ASSERT_EQ(refusal_of(good.substr(0, size)), Refusal::kCorrupt) << size;
  EXPECT_EQ(refusal_of(good + '\0'), Refusal::kCorrupt);
  EXPECT_EQ(refusal_of(good + good), Refusal::kCorrupt);
}

TEST(KernelCacheCodec, EveryChangeWithAChecksumThatFitsIsRefused) {
  const std::string good = encoded();
  for (std::size_t at = 0; at < good.size() - 64; ++at) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x55);
    ASSERT_FALSE(decode(with_checksum(bad), kKey, "sm_90a", *kSecret).ok()) << at;
  }
}

TEST(KernelCacheCodec, UnsignedIsToldFromWronglySigned) {
  std::string unsigned_value = encoded();
  unsigned_value.replace(24, 8, 8, '\0');
  EXPECT_EQ(refusal_of(with_checksum(unsigned_value)), Refusal::kUnsigned);
  EXPECT_EQ(refusal_of(with_signature(unsigned_value)), Refusal::kUnsigned)
      << "a signature it does not claim to have does not count";

  EXPECT_EQ(refusal_of(encoded(entry_of(), kKey, *kOther)), Refusal::kForeignSecret);

  std::string forged = encoded(entry_of(), kKey, *kOther);
  forged.replace(24, 8, encoded().substr(24, 8));  // claims our secret
  EXPECT_EQ(refusal_of(with_checksum(forged)), Refusal::kWrongSignature);
  EXPECT_EQ(refusal_of(with_signature(forged, *kOther)), Refusal::kWrongSignature);
}

TEST(KernelCacheCodec, AReplayUnderAnotherKeyIsRefused) {
  const Key other = KeyBuilder().add("program", "second").finish();
  EXPECT_EQ(refusal_of(encoded(), other), Refusal::kWrongKey);
  std::string renamed = encoded();
  renamed.replace(32, 32, reinterpret_cast<const char*>(other.bytes.data()), 32);
  EXPECT_EQ(refusal_of(with_checksum(renamed), other), Refusal::kWrongSignature);
}

TEST(KernelCacheCodec, AnotherArchitectureIsRefused) {
  EXPECT_EQ(refusal_of(encoded(), kKey, *kSecret, "sm_80"), Refusal::kWrongArch);
  EXPECT_EQ(refusal_of(encoded(), kKey, *kSecret, "sm_90"), Refusal::kWrongArch);
}

// Only someone with the secret could make these; the decoder must live with them all the same.
TEST(KernelCacheCodec, SignedNonsenseIsRefused) {
  const std::string good = encoded();
  for (std::size_t at = 64; at < good.size() - 64; ++at) {
    for (const char byte : {'\0', '\xff', '\x7f'}) {
      std::string bad = good;
      bad[at] = byte;
      const auto decoded = decode(with_signature(bad), kKey, "", *kSecret);
      if (decoded.ok()) {
        EXPECT_LE(decoded->code.size(), kMaxCodeBytes);
      } else {
        EXPECT_EQ(decoded.error().why, Refusal::kCorrupt);
      }
    }
  }
}

TEST(KernelCacheCodec, ABombUnpacksToNoMoreThanItsBound) {
  // The length of the code stands before the compressed bytes: a lie there must not be believed.
  Entry entry;
  entry.arch = "sm_90a";
  entry.code = std::string(1 << 20, '\0');
  const std::string good = encoded(entry);
  const std::size_t code_bytes_at = 64 + 4 + 6 + 4 + 0 + 1 + 8 + 4;
  for (const std::uint64_t claim : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{(1 << 20) + 1}, kMaxCodeBytes,
                                    kMaxCodeBytes + 1, ~std::uint64_t{0}}) {
    std::string bad = good;
    for (int i = 0; i < 8; ++i) bad[code_bytes_at + static_cast<std::size_t>(i)] = static_cast<char>(claim >> (8 * i));
    EXPECT_EQ(refusal_of(with_signature(bad)), Refusal::kCorrupt) << claim;
  }
  EXPECT_TRUE(decode(with_signature(good), kKey, "", *kSecret).ok())
      << "the place of the length is wrong: the test tests nothing";
}

TEST(KernelCacheCodec, WhatIsBeyondTheLimitsIsNotEncoded) {
  Entry large = entry_of();
  large.code.resize(kMaxCodeBytes + 1);
  Entry many = entry_of();
  many.kernels.resize(kMaxKernels + 1);
  Entry named = entry_of();
  named.kernels[0].name.resize(kMaxNameBytes + 1);
  for (const Entry& entry : {large, many, named}) {
    const auto bytes = encode(entry, kKey, *kSecret);
    ASSERT_FALSE(bytes.ok());
    EXPECT_EQ(bytes.error().code, Code::kInvalidArgument);
  }
}

TEST(KernelCacheSecret, ShortOnesAreRefusedAndNeverRepeated) {
  const auto short_secret = Secret::from_text("hunter2");
  ASSERT_FALSE(short_secret.ok());
  EXPECT_EQ(short_secret.error().code, Code::kInvalidArgument);
  EXPECT_THAT(short_secret.error().message, Not(HasSubstr("hunter2")));
}

TEST(KernelCacheSecret, IdsTellSecretsApart) {
  EXPECT_EQ(secret_of("the secret of this cluster")->id(), kSecret->id());
  EXPECT_NE(kSecret->id(), kOther->id());
  EXPECT_EQ(kSecret->id_text().size(), 16u);
}

struct SecretFile : ::testing::Test {
  SecretFile() {
    char folder[] = "/tmp/ditfleet-secret-XXXXXX";
    EXPECT_NE(::mkdtemp(folder), nullptr);
    dir = folder;
  }
  ~SecretFile() override { std::filesystem::remove_all(dir); }
  std::string dir;
};

TEST_F(SecretFile, ALineEndIsNotPartOfIt) {
  std::ofstream(dir + "/secret") << "the secret of this cluster\n";
  std::filesystem::permissions(dir + "/secret", std::filesystem::perms(0644));
  EXPECT_EQ(Secret::from_file(dir + "/secret").error().code, Code::kInvalidArgument) << "others can read it";
  std::filesystem::permissions(dir + "/secret", std::filesystem::perms(0600));
  const auto secret = Secret::from_file(dir + "/secret");
  ASSERT_TRUE(secret.ok()) << secret.error().message;
  EXPECT_EQ((*secret)->id(), kSecret->id());
}

TEST_F(SecretFile, AMissingOneIsNamed) {
  const auto secret = Secret::from_file(dir + "/none");
  ASSERT_FALSE(secret.ok());
  EXPECT_EQ(secret.error().code, Code::kNotFound);
  EXPECT_THAT(secret.error().message, HasSubstr(dir + "/none"));
  EXPECT_FALSE(Secret::from_file_or_new(dir + "/no/such/folder/secret").ok());
}

TEST_F(SecretFile, MadeByManyAtOnceItIsOne) {
  std::vector<std::uint64_t> ids(8);
  std::vector<std::thread> threads;
  for (auto& id : ids) {
    threads.emplace_back([&id, this] {
      const auto secret = Secret::from_file_or_new(dir + "/secret");
      if (secret.ok()) id = (*secret)->id();
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_NE(ids[0], 0u);
  EXPECT_THAT(ids, ::testing::Each(ids[0]));
  struct stat info {};
  ASSERT_EQ(::stat((dir + "/secret").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir), {}), 1) << "something was left beside it";
}

}  // namespace
}  // namespace ditfleet::kernel_cache
