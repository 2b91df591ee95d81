// A model's entry in the text of a configuration: what else is in the file stays as it is.
#include "shared/config/edit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ditfleet::config {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const ModelSetting kModel{
    .path = "/m/a b", .files = {{"transformer", "/m/t.gguf"}}, .quantize = {{"text_encoder_2", "nf4"}}};
const std::string kEntry =
    "  new:\n    path: \"/m/a b\"\n    transformer: \"/m/t.gguf\"\n    quantize:\n      text_encoder_2: nf4\n";
const std::string kFlow = "new: {path: \"/m/a b\", transformer: \"/m/t.gguf\", quantize: {text_encoder_2: nf4}}";

std::string edited(const std::string& text, bool replace = false) {
  const auto made = with_model(text, "fleet.yaml", "new", kModel, replace);
  return made ? *made : "error: " + made.error().message;
}

TEST(ConfigEdit, AFileWithoutModelsGetsThemAtItsEnd) {
  EXPECT_EQ(edited(""), "models:\n" + kEntry);
  EXPECT_EQ(edited("# mine\n"), "# mine\n\nmodels:\n" + kEntry);
  EXPECT_EQ(edited("worker: {count: 2}  # two"), "worker: {count: 2}  # two\n\nmodels:\n" + kEntry);
}

TEST(ConfigEdit, AnEmptySectionIsFilled) {
  EXPECT_EQ(edited("models:\n"), "models:\n" + kEntry);
  EXPECT_EQ(edited("models:"), "models:\n" + kEntry);
  EXPECT_EQ(edited("a: {}\nmodels: {}   # none\n#  x: {path: y}\nlog:\n  level: info\n"),
            "a: {}\nmodels:   # none\n" + kEntry + "#  x: {path: y}\nlog:\n  level: info\n");
}

TEST(ConfigEdit, AnEntryComesLastInItsSection) {
  const std::string before =
      "# head\nmodels:  # all\n  one: {path: /one}  # first\n\n  # the second\n  two:\n    path: /two\n";
  EXPECT_EQ(edited(before), before + kEntry);
  EXPECT_EQ(edited(before + "\n# next\nlog: {level: info}\n"), before + kEntry + "\n# next\nlog: {level: info}\n");
  EXPECT_EQ(edited("models:\n  one: {path: /one}"), "models:\n  one: {path: /one}\n" + kEntry);
  EXPECT_EQ(edited("models:\n  one: {\n  path: /one\n  }\nlog: {level: info}\n"),
            "models:\n  one: {\n  path: /one\n  }\n" + kEntry + "log: {level: info}\n");
  EXPECT_THAT(edited("models:\n     one: /one\n"), HasSubstr("     one: /one\n     new:\n       path: "));
}

TEST(ConfigEdit, ASectionOnOneLineStaysOnIt) {
  EXPECT_EQ(edited("models: {one: {path: /one}}  # x\n"), "models: {" + kFlow + ", one: {path: /one}}  # x\n");
}

TEST(ConfigEdit, ATakenNameIsReplacedOnlyOnRequest) {
  const std::string old = "models:\n  one: /one\n  new:  # old\n    path: /old\n    # note\n  # of two\n  two: /two\n";
  EXPECT_THAT(edited(old), AllOf(HasSubstr("fleet.yaml has a model 'new'"), HasSubstr("--replace")));
  EXPECT_EQ(edited(old, true), "models:\n  one: /one\n" + kEntry + "  # of two\n  two: /two\n");
  EXPECT_EQ(edited("models:\n  new: {path: /old}\nlog: {level: info}\n", true),
            "models:\n" + kEntry + "log: {level: info}\n");
  EXPECT_EQ(edited("models:\n  new:\n", true), "models:\n" + kEntry);
  EXPECT_EQ(edited("models: {new: {path: /old}, two: /two}\n", true), "models: {" + kFlow + ", two: /two}\n");
  EXPECT_EQ(edited("models: {two: /two, new: {path: /old}}\n", true), "models: {two: /two, " + kFlow + "}\n");
  EXPECT_EQ(edited("models:\n  one: /one\n", true), "models:\n  one: /one\n" + kEntry);
}

TEST(ConfigEdit, WhatCannotBeEditedIsRefusedWithTheEntry) {
  for (const char* text : {"{log: {level: info}}\n", "log: {level: info}\n...\n", "models: &a\n  one: /one\n...\n",
                           "models: [a]\n", "models: x\n", "data: &a {dir: /x}\nmodels: *a\n", "x", "[]"})
    EXPECT_THAT(edited(text), AllOf(HasSubstr("error: fleet.yaml: cannot insert"), HasSubstr(kEntry))) << text;
  EXPECT_THAT(edited("models: [\n"), HasSubstr("fleet.yaml:"));
  EXPECT_THAT(edited("models: {one: {path: \"/one\n# }\"}}\n"), HasSubstr("models: {" + kFlow));
}

TEST(ConfigEdit, NamesAreQuotedWhereYamlNeedsIt) {
  for (const char* name : {"null", "~", "1.0", "true", "#a", "a#b", "&a", "-", "Ä", "[a]", "a,b"}) {
    const auto made = with_model("models:\n  one: {path: /one}\n", "fleet.yaml", name, kModel, false);
    ASSERT_TRUE(made) << name << made.error().message;
    const auto settings = load_text(*made, "fleet.yaml");
    ASSERT_TRUE(settings) << settings.error().message;
    EXPECT_EQ(settings->models.at(name).path, kModel.path);
    EXPECT_EQ(settings->models.at(name).files, kModel.files);
    EXPECT_EQ(settings->models.at(name).quantize, kModel.quantize);
    EXPECT_EQ(settings->models.size(), 2u);
  }
}

}  // namespace
}  // namespace ditfleet::config
