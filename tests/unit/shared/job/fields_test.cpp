// shared/job/fields.h: the table of a spec's fields and the values of one request.
#include "shared/job/fields.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace ditfleet::job {
namespace {

static_assert(Field("width") == Field("width"));
static_assert(Field("width") != Field("height"));

TEST(Fields, AreFoundByName) {
  EXPECT_EQ(find_field("frames"), Field("frames"));
  EXPECT_EQ(Field("frames").name(), "frames");
  EXPECT_FALSE(find_field("widht"));
  EXPECT_FALSE(find_field(""));
}

TEST(Fields, HaveUniqueNamesAndFlagsAndADescription) {
  std::set<std::string_view> names, flags;
  for (const FieldRow& row : kFieldRows) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_TRUE(row.flag.empty() || flags.insert(row.flag).second) << row.flag;
    EXPECT_THAT(std::string(row.description), testing::EndsWith(".")) << row.name;
    EXPECT_LE(row.low, row.high) << row.name;
  }
}

TEST(FieldValues, KeepWhatWasSet) {
  FieldValues values;
  EXPECT_FALSE(values.has("width"));
  EXPECT_FALSE(values.integer("width"));
  EXPECT_FALSE(values.real("guidance_scale"));
  EXPECT_EQ(values.text("negative_prompt"), nullptr);
  values.set("width", 512);
  values.set("guidance_scale", 3);  // an integer is a number, too
  values.set("true_cfg_scale", 1.5);
  values.set("negative_prompt", "");
  EXPECT_EQ(values.integer("width"), 512);
  EXPECT_EQ(values.real("guidance_scale"), 3.0);
  EXPECT_EQ(values.real("true_cfg_scale"), 1.5);
  ASSERT_NE(values.text("negative_prompt"), nullptr);
  EXPECT_EQ(*values.text("negative_prompt"), "");
  values.set("width", 256);
  EXPECT_EQ(values.integer("width"), 256);
}

TEST(FieldValues, AreComparedByValue) {
  FieldValues one, two;
  one.set("width", 512);
  EXPECT_NE(one, two);
  two.set("width", 512);
  EXPECT_EQ(one, two);
  two.set("height", 512);
  EXPECT_NE(one, two);
}

}  // namespace
}  // namespace ditfleet::job
