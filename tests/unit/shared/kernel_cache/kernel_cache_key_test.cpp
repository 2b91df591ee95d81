// shared/kernel_cache: keys. Everything that was added decides the key, and nothing else.
#include "shared/kernel_cache/key.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ditfleet::kernel_cache {
namespace {

using Pairs = std::vector<std::pair<std::string, std::string>>;

Key key_of(const Pairs& pairs) {
  KeyBuilder builder;
  for (const auto& [name, value] : pairs) builder.add(name, value);
  return builder.finish();
}

const Pairs kFields = {
    {"schema", "1"},          {"ir", std::string("\0\1\2", 3)}, {"source", "extern \"C\" __global__ void k() {}"},
    {"compiler", "12.4.131"}, {"options", "-arch=sm_90a"},      {"arch", "sm_90a"}};

TEST(KernelCacheKey, TheSameFieldsGiveTheSameKey) {
  EXPECT_EQ(key_of(kFields), key_of(kFields));
  KeyBuilder builder;
  builder.add("a", "1");
  const Key first = builder.finish();
  builder.add("a", "1");
  EXPECT_EQ(builder.finish(), first) << "a finished builder is not as new";
}

// The values are Python's (hashlib), by the format in shared/kernel_cache/key.h. The key of a release must be the
// key of the next: what a fleet holds is found by it.
TEST(KernelCacheKey, IsWhatTheFormatSays) {
  EXPECT_EQ(KeyBuilder().finish().hex(), "a4ec63ebbd6ca66000a619ab91b3271ac20c047872c84c327d94be325931c672");
  EXPECT_EQ(KeyBuilder().add("arch", "sm_90a").add("width", 3072).finish().hex(),
            "22803f90894e4d42a2129cdc7104af93daf4f129f5acb2f4a9dc9e4f64cf68b3");
}

TEST(KernelCacheKey, EveryBitOfEveryFieldCounts) {
  std::set<std::string> seen = {key_of(kFields).hex()};
  std::size_t tried = 1;
  for (std::size_t field = 0; field < kFields.size(); ++field) {
    for (std::string Pairs::value_type::*part : {&Pairs::value_type::first, &Pairs::value_type::second}) {
      for (std::size_t bit = 0; bit < (kFields[field].*part).size() * 8; ++bit) {
        Pairs changed = kFields;
        (changed[field].*part)[bit / 8] = static_cast<char>((changed[field].*part)[bit / 8] ^ (1 << (bit % 8)));
        seen.insert(key_of(changed).hex());
        ++tried;
      }
    }
    Pairs without = kFields;
    without.erase(without.begin() + static_cast<long>(field));
    seen.insert(key_of(without).hex());
    ++tried;
  }
  EXPECT_EQ(seen.size(), tried);
}

TEST(KernelCacheKey, PartsDoNotRunIntoEachOther) {
  const std::vector<Pairs> lists = {
      {{"ab", "c"}},           {{"a", "bc"}}, {{"", "abc"}},          {{"abc", ""}},           {{"a", "b"}, {"c", ""}},
      {{"a", ""}, {"b", "c"}}, {{"a", "b"}},  {{"a", "b"}, {"", ""}}, {{"c", ""}, {"a", "b"}}, {},
      {{"a", "b"}, {"a", "b"}}};
  std::set<std::string> seen;
  for (const Pairs& pairs : lists) seen.insert(key_of(pairs).hex());
  EXPECT_EQ(seen.size(), lists.size());
}

TEST(KernelCacheKey, NumbersAreNotTheirTextNorTheirBytes) {
  std::set<std::string> seen;
  seen.insert(KeyBuilder().add("a", 1).finish().hex());
  seen.insert(KeyBuilder().add("a", "1").finish().hex());
  seen.insert(KeyBuilder().add("a", std::string_view("\1\0\0\0\0\0\0\0", 8)).finish().hex());
  seen.insert(KeyBuilder().add("a", -1).finish().hex());
  seen.insert(KeyBuilder().add("a", std::int64_t{0xffffffff}).finish().hex());
  seen.insert(KeyBuilder().add("a", std::int64_t{1} << 56).finish().hex());
  EXPECT_EQ(seen.size(), 6u);
}

TEST(KernelCacheKey, HexIsReadBack) {
  const Key key = key_of(kFields);
  EXPECT_EQ(key.hex().size(), 64u);
  ASSERT_TRUE(Key::from_hex(key.hex()).ok());
  EXPECT_EQ(*Key::from_hex(key.hex()), key);
  for (const std::string& bad :
       {std::string(), key.hex().substr(1), key.hex() + "0", "g" + key.hex().substr(1), std::string(64, ' ')})
    EXPECT_FALSE(Key::from_hex(bad).ok()) << bad;
}

}  // namespace
}  // namespace ditfleet::kernel_cache
