// shared/job: what a request may say, what it gets where it says nothing, and the words of each refusal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shared/job/catalogue.h"
#include "shared/job/shape_class.h"
#include "shared/job/validate.h"
#include "tests/fixtures/image_model.h"

namespace ditfleet::job {
namespace {

using testing::HasSubstr;

Catalogue demo_catalogue() {
  ModelEntry demo = image_model("demo", 256, 20);
  for (const Field side : {Field("width"), Field("height")}) demo.fields.at(side).high = 512;
  demo.max_pixels = 512 * 384;
  demo.fields.at("max_sequence_length").high = 128;
  demo.defaults.set("max_sequence_length", 64);
  demo.defaults.set("true_cfg_scale", 3.0);
  demo.defaults.set("negative_prompt", "");
  return {{{"demo", demo}, {"large", image_model("large")}}, "demo"};
}

Error refused(std::string_view text) {
  const auto spec = parse_spec(text);
  EXPECT_FALSE(spec.ok()) << text;
  return spec.ok() ? Error{} : spec.error();
}

Error refused_by_model(const std::string& text) {
  const auto spec = parse_spec(text);
  EXPECT_TRUE(spec.ok()) << text << ": " << (spec.ok() ? "" : spec.error().message);
  if (!spec.ok()) return {};
  const auto complete = complete_spec(*spec, demo_catalogue());
  EXPECT_FALSE(complete.ok()) << text;
  return complete.ok() ? Error{} : complete.error();
}

TEST(ParseSpec, ReadsEveryField) {
  const auto spec = parse_spec(
      R"({"model":"demo","prompt":"ein roter Kreis \u00e9 \ud83d\ude00","negative_prompt":"","n":4,"width":256,
    "height":128,"seed":9223372036854775807,"num_inference_steps":7,"guidance_scale":3.5,"true_cfg_scale":2,)"
      R"("max_sequence_length":512,
    "loras":[{"name":"pixel","scale":-0.5},{"name":"ink"}],"priority":-100,"deadline_ms":1000,"output_format":"webp",
    "output_compression":80,"partial_images":3,"pause_after_steps":5,"resume_from":"j/1","user":"u"})");
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->prompt, "ein roter Kreis é 😀");
  EXPECT_EQ(*spec->fields.text("negative_prompt"), "");
  EXPECT_EQ(spec->n, 4);
  EXPECT_EQ(spec->fields.integer("width"), 256);
  EXPECT_EQ(spec->fields.integer("height"), 128);
  EXPECT_EQ(spec->seed, 9223372036854775807LL);
  EXPECT_DOUBLE_EQ(*spec->fields.real("true_cfg_scale"), 2.0);
  ASSERT_EQ(spec->loras.size(), 2u);
  EXPECT_DOUBLE_EQ(spec->loras[0].scale, -0.5);
  EXPECT_DOUBLE_EQ(spec->loras[1].scale, 1.0);
  EXPECT_EQ(spec->priority, -100);
  EXPECT_EQ(spec->pause_after_steps, 5);
  EXPECT_EQ(spec->resume_from, "j/1");
  EXPECT_EQ(spec->output_format, OutputFormat::kWebp);
}

TEST(ParseSpec, TakesSizeOrItsParts) {
  const auto sized = parse_spec(R"({"prompt":"x","size":"512x256"})");
  ASSERT_TRUE(sized.ok());
  EXPECT_EQ(sized->fields.integer("width"), 512);
  EXPECT_EQ(sized->fields.integer("height"), 256);
  EXPECT_TRUE(parse_spec(R"({"prompt":"x","size":"auto"})").ok());
  EXPECT_THAT(refused(R"({"prompt":"x","size":"512x256","width":3})").message, HasSubstr("one or the other"));
  for (const char* size : {"512", "x", "512x", "512x256x", "-1x5", "0x0", "512X256", "99999999999x1", "512x 256"}) {
    EXPECT_THAT(refused(std::string(R"({"prompt":"x","size":")") + size + "\"}").param, "size");
  }
}

TEST(ParseSpec, ToJsonReadsBackTheSame) {
  const std::string text =
      R"({"model":"demo","prompt":"a \"b\" \u0001 é","negative_prompt":"","n":2,"width":256,"height":128,)"
      R"("num_inference_steps":7,)"
      R"("guidance_scale":3.5,"true_cfg_scale":0.1,"max_sequence_length":64,"seed":5,"loras":[{"name":"p",)"
      R"("scale":0.5}],"priority":3,)"
      R"("deadline_ms":9,"output_format":"jpeg","output_compression":1,"partial_images":2,"user":"me",)"
      R"("remixed_from":"a"})";
  const auto first = parse_spec(text);
  ASSERT_TRUE(first.ok());
  const auto second = parse_spec(to_json(*first));
  ASSERT_TRUE(second.ok()) << second.error().message;
  EXPECT_EQ(to_json(*first), to_json(*second));
  EXPECT_EQ(to_json(*first), text);
  EXPECT_EQ(to_json(*parse_spec(R"({"prompt":""})")), R"({"prompt":"","priority":0,"partial_images":0})");
  for (const std::string cache : {R"({"mode":"first_block","threshold":0.08})", R"({"mode":"off"})"})
    EXPECT_EQ(to_json(*parse_spec(R"({"prompt":"","cache":)" + cache + "}")),
              R"({"prompt":"","cache":)" + cache + R"(,"priority":0,"partial_images":0})");
}

TEST(ParseSpec, ImagesAreOneOrAnArray) {
  const std::string a(64, 'a'), b(64, 'b'), rest = R"(,"priority":0,"partial_images":0})";
  const auto text = [&](const std::string& fields) {
    const auto spec = parse_spec(R"({"prompt":"")" + fields + "}");
    return spec.ok() ? to_json(*spec) : spec.error().message;
  };
  const std::string one = R"(,"image":")" + a + "\"", both = R"(,"images":[")" + a + R"(",")" + b + "\"]";
  EXPECT_EQ(text(one), R"({"prompt":"")" + one + rest);
  EXPECT_EQ(text(R"(,"images":[")" + a + "\"]"), R"({"prompt":"")" + one + rest) << "the form of one image";
  EXPECT_EQ(text(both), R"({"prompt":"")" + both + rest);
  const std::string whole = one + R"(,"mask":")" + b + R"(","strength":0.55,"auto_resize":false)";
  EXPECT_EQ(text(whole), R"({"prompt":"")" + whole + rest);
  EXPECT_EQ(text(R"(,"image":null,"images":null,"auto_resize":true)"), R"({"prompt":"","auto_resize":true)" + rest);
  const auto spec = parse_spec(R"({"prompt":"","images":[")" + b + R"(",")" + a + R"(",")" + b + "\"]}");
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_THAT(spec->fields.images("image"), testing::ElementsAre(b, a, b)) << "in order, with repetitions";
  EXPECT_THAT(spec->fields.images("mask"), testing::IsEmpty());
}

TEST(ParseSpec, RefusesWhatIsNoImage) {
  const std::string a(64, 'a'), quoted = "\"" + a + "\"";
  const std::vector<std::array<std::string, 3>> cases = {
      {R"("image":"x")", "image", "is 'x'; it must be the id of an upload"},
      {R"("image":[])", "image", "an array; it must be a string"},
      {R"("mask":")" + std::string(64, 'A') + "\"", "mask", "lower-case"},
      {R"("images":)" + quoted, "images", "is a string; it must be an array of 1 to 4 images"},
      {R"("images":[])", "images", "has 0 entries"},
      {R"("images":[)" + quoted + ",5]", "images[1]", "is a number"},
      {R"("images":[null])", "images[0]", "is null"},
      {R"("images":[)" + quoted + R"(,"x"])", "images[1]", "is 'x'"},
      {R"("images":["x","x","x","x","x"])", "images", "has 5 entries; it must have 1 to 4 images"},
      {R"("images":[)" + quoted + R"(],"image":)" + quoted, "images", "use one or the other"},
      {R"("strength":1.01)", "strength", "from 0 to 1"},
      {R"("auto_resize":1)", "auto_resize", "must be true or false"},
  };
  for (const auto& [fields, param, says] : cases) {
    const Error error = refused(R"({"prompt":"",)" + fields + "}");
    EXPECT_EQ(error.param, param) << fields;
    EXPECT_THAT(error.message, HasSubstr(says)) << fields;
  }
}

TEST(CompleteSpec, ImagesBelongToModelsThatTakeThem) {
  const std::string a(64, 'a');
  Catalogue catalogue = demo_catalogue();
  ModelEntry& edits = catalogue.models["edits"] = image_model("edits");
  edits.apply("image") = {.low = 1, .high = 2};
  edits.apply("mask");
  edits.apply("strength");
  edits.defaults.set("strength", 0.6);
  edits.free_width = edits.free_height = 1024;
  const auto complete = [&](const std::string& fields) {
    return complete_spec(*parse_spec(R"({"prompt":"","model":"edits",)" + fields + "}"), catalogue);
  };
  const std::string image = R"("image":")" + a + "\"", mask = R"(,"mask":")" + a + "\"";
  const auto edit = complete(image + mask);
  ASSERT_TRUE(edit.ok()) << edit.error().message;
  EXPECT_EQ(edit->fields.real("strength"), 0.6);
  EXPECT_FALSE(edit->fields.has("width")) << "the image gives the size";
  EXPECT_EQ(shape_class_of(*edit, edits, "bf16").key(), "edits/1024x1024x1/embedded/512/bf16");
  EXPECT_EQ(to_json(*complete_spec(*edit, catalogue)), to_json(*edit));
  const auto text = complete(R"("seed":1)");
  ASSERT_TRUE(text.ok()) << text.error().message;
  EXPECT_FALSE(text->fields.has("strength")) << "without image";
  EXPECT_EQ(text->fields.integer("width"), 1024);
  EXPECT_EQ(complete(image + R"(,"size":"64x32")")->fields.integer("height"), 32);
  const std::vector<std::array<std::string, 3>> cases = {
      {R"("images":[")" + a + R"(",")" + a + R"(",")" + a + "\"]", "images",
       "has 3 images; model 'edits' takes 1 to 2"},
      {R"("images":[")" + a + R"(",")" + a + "\"]" + mask, "mask", "it belongs to one"},
      {mask.substr(1), "mask", "is given without image"},
      {R"("strength":0.5)", "strength", "is given without image"},
      {image + R"(,"strength":0)", "strength", "must be above 0"},
      {image + R"(,"auto_resize":true)", "auto_resize", "does not apply to model 'edits'"},
      {R"("auto_resize":true)", "auto_resize", "does not apply to model 'edits'"},
  };
  for (const auto& [fields, param, says] : cases) {
    const auto spec = complete(fields);
    ASSERT_FALSE(spec.ok()) << fields;
    EXPECT_EQ(spec.error().param, param) << fields;
    EXPECT_THAT(spec.error().message, HasSubstr(says)) << fields;
  }
  EXPECT_THAT(refused_by_model(R"({"prompt":"",)" + image + "}").message, HasSubstr("image does not apply to model"));
}

// As FluxImg2ImgPipeline.get_timesteps() of diffusers 0.42.1 counts them.
TEST(StepsOf, AreThePartThatStrengthRuns) {
  const auto steps = [](int all, double strength) {
    FieldValues fields;
    fields.set("num_inference_steps", std::int64_t{all});
    fields.set("strength", strength);
    return steps_of(fields);
  };
  EXPECT_EQ(steps(7, 0.55), 4);
  EXPECT_EQ(steps(20, 0.55), 11);
  EXPECT_EQ(steps(50, 0.56), 29) << "50 * 0.56 is 28.000000000000004";
  EXPECT_EQ(steps(4, 0.15), 1);
  EXPECT_EQ(steps(10, 0.5), 5);
  EXPECT_EQ(steps(28, 1), 28);
  EXPECT_EQ(steps(1, 0.01), 1);
  FieldValues fields;
  EXPECT_EQ(steps_of(fields), 1);
  fields.set("num_inference_steps", std::int64_t{9});
  EXPECT_EQ(steps_of(fields), 9);
}

TEST(ParseSpec, FieldsOfVideosComeAfterThoseOfImages) {
  const std::string text = R"({"prompt":"","width":64,"height":32,"frames":81,"fps":16.5,"guidance_scale":4,)"
                           R"("guidance_scale_2":3,"priority":0,"output_format":"png","partial_images":0})";
  const auto spec = parse_spec(text);
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->fields.integer("frames"), 81);
  EXPECT_EQ(spec->fields.real("fps"), 16.5);
  EXPECT_EQ(to_json(*spec), text);
}

// What a worker reads: nothing is filled in.
TEST(ParseCompleteSpec, TakesWhatCompleteSpecMadeAndRefusesLess) {
  const auto complete = complete_spec(*parse_spec(R"({"prompt":"x"})"), demo_catalogue());
  ASSERT_TRUE(complete.ok()) << complete.error().message;
  const auto read = parse_complete_spec(to_json(*complete));
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(to_json(*read), to_json(*complete));
  for (const std::string name : {"model", "n", "seed", "output_format", "output_compression"}) {
    auto body = json::parse(to_json(*complete)).as_object();
    body.erase(name);
    const auto refused = parse_complete_spec(json::serialize(body));
    ASSERT_FALSE(refused.ok()) << name;
    EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
    EXPECT_EQ(refused.error().param, name);
  }
  auto body = json::parse(to_json(*complete)).as_object();
  body["loras"] = json::array{json::object{{"name", "ink"}}};
  EXPECT_EQ(parse_complete_spec(json::serialize(body)).error().param, "loras[0].sha256");
  EXPECT_EQ(parse_complete_spec("{").error().code, Code::kInvalidArgument);
}

TEST(Branch, MayDifferInWhatNeedsNoOtherState) {
  const auto from =
      complete_spec(*parse_spec(R"({"prompt":"a","seed":7,"width":256,"num_inference_steps":9,"guidance_scale":3})"),
                    demo_catalogue());
  ASSERT_TRUE(from.ok()) << from.error().message;
  const auto branch = [&](const std::string& fields) {
    auto spec = parse_spec(R"({"prompt":"b","resume_from":"j/2")" + fields + "}");
    EXPECT_TRUE(spec.ok()) << spec.error().message;
    inherit(*spec, *from, 2);
    auto complete = complete_spec(*spec, demo_catalogue());
    EXPECT_TRUE(complete.ok()) << complete.error().message;
    return *complete;
  };
  const JobSpec same = branch("");
  EXPECT_FALSE(check_branch(same, *from));
  EXPECT_EQ(same.seed, 9) << "that of unit 2";
  EXPECT_EQ(same.fields, from->fields);
  EXPECT_FALSE(check_branch(branch(R"(,"guidance_scale":4,"seed":3,"negative_prompt":"c")"), *from));
  for (const auto& [fields, name] : {std::pair{R"(,"num_inference_steps":10)", "num_inference_steps"},
                                     {R"(,"width":512)", "width"},
                                     {R"(,"n":2)", "n"}}) {
    const auto refused = check_branch(branch(fields), *from);
    ASSERT_TRUE(refused) << fields;
    EXPECT_EQ(refused->param, name);
  }
}

TEST(ParseSpec, NullCountsAsLeftOutAndWholeNumbersAsIntegers) {
  const auto spec = parse_spec(R"({"prompt":"x","n":2.0,"seed":null,"loras":null})");
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->n, 2);
  EXPECT_FALSE(spec->seed.has_value());
}

// What was acknowledged is read again by the scheduler and the workers, in forms that grow.
TEST(ParseSpec, TheLongestJobStaysReadableInItsCompleteForm) {
  std::string loras;
  for (int i = 0; i < 16; ++i)
    loras += std::string(i ? "," : "") + R"({"name":")" + std::string(127, 'a') +
             std::string(1, static_cast<char>('a' + i)) + "\"}";
  auto spec = parse_spec(R"({"prompt":"","size":"256x256","loras":[)" + loras + "]}");
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  spec->prompt = std::string(kMaxTextBytes, '\x01');  // six bytes each in JSON
  spec->fields.set("negative_prompt", spec->prompt);
  spec->user = std::string(512, '\x01');
  ASSERT_LT(to_json(*spec).size(), kMaxSpecBytes);
  const auto complete = complete_spec(*spec, demo_catalogue(), [](const LoraUse&, const ModelEntry&) {
    return Result<std::string>(std::string(64, 'a'));
  });
  ASSERT_TRUE(complete.ok()) << complete.error().message;
  const auto again = parse_spec(to_json(*complete));
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->prompt, spec->prompt);
}

// Normalizing takes quadratic time in the marks after one letter, on the only text thread of a worker.
TEST(ParseSpec, ATextHasAFewKilobytesAndFewCombiningMarksInARow) {
  const auto marks = [](int count, const char* mark = "\u0301") {
    std::string text = "a";
    for (int i = 0; i < count; ++i) text += mark;
    return text;
  };
  const auto refusal = [](const std::string& field, const std::string& text) {
    const auto spec = parse_spec(R"({"prompt":"x",")" + field + R"(":")" + text + "\"}");
    return spec ? std::string() : spec.error().message;
  };
  const std::string most(16 << 10, 'x');
  for (const std::string field : {"prompt", "negative_prompt"}) {
    EXPECT_EQ(refusal(field, most), "");
    EXPECT_EQ(refusal(field, most + "x"), field + " has 16385 bytes; at most 16384 are allowed");
  }
  for (const std::string field : {"prompt", "negative_prompt", "user"}) {
    EXPECT_EQ(refusal(field, marks(30) + marks(30)), "") << "two runs";
    EXPECT_EQ(refusal(field, marks(31)), field + " has 31 combining marks in a row; at most 30 are allowed");
  }
  EXPECT_EQ(refusal("prompt", marks(5000, "\u0323")),
            "prompt has 5000 combining marks in a row; at most 30 are allowed");
  EXPECT_NE(refusal("prompt", marks(31, "\u0f73")), "") << "class 0, but it decomposes to two marks";
  EXPECT_EQ(refusal("prompt", marks(31, "\u0e33")), "") << "Thai, no mark";
  EXPECT_EQ(refusal("prompt", marks(100, "\U0001f600")), "");
}

TEST(ParseSpec, RefusesWithTheFieldAndWhatWouldBeRight) {
  struct Case {
    const char *text, *param, *says;
  };
  const Case cases[] = {
      {R"({})", "prompt", "missing"},
      {R"({"prompt":5})", "prompt", "must be a string"},
      {R"({"promt":"x"})", "promt", "did you mean 'prompt'?"},
      {R"({"prompt":"x","n":0})", "n", "from 1 to"},
      {R"({"prompt":"x","n":"2"})", "n", "is a string; it must be an integer"},
      {R"({"prompt":"x","n":2.5})", "n", "an integer"},
      {R"({"prompt":"x","n":true})", "n", "a boolean"},
      {R"({"prompt":"x","n":1e300})", "n", "an integer"},
      {R"({"prompt":"x","seed":9223372036854775808})", "seed", "from 0 to 9223372036854775807"},
      {R"({"prompt":"x","seed":-1})", "seed", "from 0"},
      {R"({"prompt":"x","num_inference_steps":0})", "num_inference_steps", "from 1"},
      {R"({"prompt":"x","guidance_scale":-1})", "guidance_scale", "from 0 to 100"},
      {R"({"prompt":"x","guidance_scale":"a"})", "guidance_scale", "a number"},
      {R"({"prompt":"x","max_sequence_length":1025})", "max_sequence_length", "from 1 to 1024"},
      {R"({"prompt":"x","priority":101})", "priority", "-100 to 100"},
      {R"({"prompt":"x","deadline_ms":0})", "deadline_ms", "from 1"},
      {R"({"prompt":"x","output_format":"gif"})", "output_format", "png, jpeg, webp or mp4"},
      {R"({"prompt":"x","partial_images":4})", "partial_images", "from 0 to 3"},
      {R"({"prompt":"x","loras":{}})", "loras", "an array"},
      {R"({"prompt":"x","loras":[5]})", "loras[0]", "name"},
      {R"({"prompt":"x","loras":[{"scale":1}]})", "loras[0].name", "missing"},
      {R"({"prompt":"x","loras":[{"name":"a","scal":1}]})", "loras[0].scal", "did you mean 'scale'?"},
      {R"({"prompt":"x","loras":[{"name":"a","expert":"medium"}]})", "loras[0].expert", "high, low or both"},
      {R"({"prompt":"x","cache":0.1})", "cache", R"(is a number; it must be {"mode": "first_block")"},
      {R"({"prompt":"x","cache":{}})", "cache.mode", "is missing; it must be first_block or off"},
      {R"({"prompt":"x","cache":{"mode":"teacache"}})", "cache.mode", "'teacache'; it must be first_block or off"},
      {R"({"prompt":"x","cache":{"mode":"first_block"}})", "cache.threshold", "missing; it must be a number"},
      {R"({"prompt":"x","cache":{"mode":"first_block","threshold":"a"}})", "cache.threshold", "is a string"},
      {R"({"prompt":"x","cache":{"mode":"first_block","threshold":0}})", "cache.threshold", "from 0.001 to 1"},
      {R"({"prompt":"x","cache":{"mode":"first_block","threshold":-1}})", "cache.threshold", "from 0.001 to 1"},
      {R"({"prompt":"x","cache":{"mode":"first_block","threshold":1.1}})", "cache.threshold", "is 1.1; it must be"},
      {R"({"prompt":"x","cache":{"mode":"off","threshold":0.1}})", "cache.threshold", "leave it out"},
      {R"({"prompt":"x","cache":{"mode":"off","treshold":0.1}})", "cache.treshold", "did you mean 'threshold'?"},
      {R"([1])", "", "a JSON object"},
      {R"({"prompt":"x")", "", "not valid JSON"},
      {R"({"prompt":"x"} y)", "", "not valid JSON"},
      {"{\"prompt\":\"\xff\"}", "", "not valid JSON"},
      {R"({"prompt":"\ud800"})", "", "not valid JSON"},
  };
  for (const Case& c : cases) {
    const Error error = refused(c.text);
    EXPECT_EQ(error.code, Code::kInvalidArgument) << c.text;
    EXPECT_EQ(error.param, c.param) << c.text << ": " << error.message;
    EXPECT_THAT(error.message, HasSubstr(c.says)) << c.text;
  }
  EXPECT_EQ(refused(R"({"prompt":"x","loras":[{"name":"a","weight":1}]})").message,
            "unknown field 'loras[0].weight'; known are name, scale, sha256, expert");
  EXPECT_EQ(refused("{\"prompt\":\"" + std::string(kMaxSpecBytes, 'x') + "\"}").code, Code::kPayloadTooLarge);
  std::string deep;
  for (int i = 0; i < 1000; ++i) deep += "{\"a\":";
  EXPECT_EQ(refused(deep).code, Code::kInvalidArgument);
}

TEST(CompleteSpec, FillsWhatIsUnset) {
  const auto spec = complete_spec(*parse_spec(R"({"prompt":""})"), demo_catalogue());
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->model, "demo");
  EXPECT_EQ(spec->n, 1);
  EXPECT_EQ(spec->fields.integer("width"), 256);
  EXPECT_EQ(spec->fields.integer("num_inference_steps"), 20);
  EXPECT_DOUBLE_EQ(*spec->fields.real("true_cfg_scale"), 3.0);
  EXPECT_EQ(*spec->fields.text("negative_prompt"), "");
  EXPECT_EQ(spec->fields.integer("max_sequence_length"), 64);
  ASSERT_TRUE(spec->seed.has_value());
  const auto other = complete_spec(*parse_spec(R"({"prompt":""})"), demo_catalogue());
  EXPECT_NE(*spec->seed, *other->seed);
  EXPECT_EQ(to_json(*parse_spec(to_json(*spec))), to_json(*spec));
}

TEST(CompleteSpec, APauseIsBeforeTheLastStep) {
  const auto spec = [](const char* fields) {
    return complete_spec(*parse_spec(std::string(R"({"prompt":"","num_inference_steps":8)") + fields + "}"),
                         demo_catalogue());
  };
  EXPECT_TRUE(spec("").ok());
  EXPECT_EQ(spec(R"(,"pause_after_steps":7)")->pause_after_steps, 7);
  EXPECT_THAT(spec(R"(,"pause_after_steps":8)").error().message,
              HasSubstr("pause_after_steps is 8, but the job runs 8 steps; it must be less"));
}

TEST(CompleteSpec, KeepsWhatWasGivenAndAnAbsentNegativePromptAbsent) {
  const auto spec = complete_spec(
      *parse_spec(R"({"prompt":"","model":"large","seed":1,"width":512,"height":768,"guidance_scale":0})"),
      demo_catalogue());
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->seed, 1);
  EXPECT_EQ(spec->fields.integer("height"), 768);
  EXPECT_DOUBLE_EQ(*spec->fields.real("guidance_scale"), 0.0);
  EXPECT_FALSE(spec->fields.has("negative_prompt"));
}

TEST(CompleteSpec, RefusesWhatTheModelCannotMake) {
  const Error model = refused_by_model(R"({"prompt":"","model":"flx-dev"})");
  EXPECT_EQ(model.code, Code::kNotFound);
  EXPECT_EQ(model.param, "model");
  EXPECT_THAT(model.message, HasSubstr("demo, large"));
  EXPECT_THAT(refused_by_model(R"({"prompt":"","width":250})").message,
              testing::AllOf(HasSubstr("multiple of 16"), HasSubstr("240 or 256")));
  EXPECT_EQ(refused_by_model(R"({"prompt":"","height":250})").param, "height");
  EXPECT_THAT(refused_by_model(R"({"prompt":"","width":1024})").message, HasSubstr("16 to 512"));
  EXPECT_THAT(refused_by_model(R"({"prompt":"","width":512,"height":512})").message, HasSubstr("at most 196608"));
  EXPECT_THAT(refused_by_model(R"({"prompt":"","num_inference_steps":201})").param, "num_inference_steps");
  EXPECT_THAT(refused_by_model(R"({"prompt":"","max_sequence_length":129})").param, "max_sequence_length");
  EXPECT_EQ(refused_by_model(R"({"prompt":"","loras":[{"name":"a"}]})").param, "loras[0].sha256");
  EXPECT_THAT(refused_by_model(R"({"prompt":"","n":2,"seed":9223372036854775807})").param, "seed");
}

TEST(CompleteSpec, PinsAdaptersToTheirDigests) {
  const std::string digest(64, 'a'), other(64, 'b');
  const AdapterResolver resolve = [&](const LoraUse& use, const ModelEntry& model) -> Result<std::string> {
    EXPECT_EQ(model.name, "demo");
    if (use.name == "ink") return digest;
    return invalid_argument("there is no adapter '" + use.name + "'");
  };
  const auto spec =
      complete_spec(*parse_spec(R"({"prompt":"","loras":[{"name":"ink","scale":0.5}]})"), demo_catalogue(), resolve);
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->loras[0].sha256, digest);
  // What reaches a worker names it so, and needs no registry any more.
  const auto again = parse_spec(to_json(*spec));
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->loras[0].sha256, digest);
  EXPECT_DOUBLE_EQ(again->loras[0].scale, 0.5);
  EXPECT_EQ(to_json(*complete_spec(*again, demo_catalogue())), to_json(*spec));
  const auto unknown =
      complete_spec(*parse_spec(R"({"prompt":"","loras":[{"name":"ink"},{"name":"oil"}]})"), demo_catalogue(), resolve);
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().param, "loras[1].name");
  EXPECT_EQ(refused(R"({"prompt":"","loras":[{"name":"ink","sha256":"AB"}]})").param, "loras[0].sha256");
}

TEST(CompleteSpec, RefusesAnExpertOfAModelWithOneTransformer) {
  const Error error = refused_by_model(R"({"prompt":"","loras":[{"name":"a"},{"name":"b","expert":"low"}]})");
  EXPECT_EQ(error.param, "loras[1].expert");
  EXPECT_EQ(error.message, "loras[1].expert is low, but model 'demo' has one transformer; leave expert out");
}

Catalogue catalogue_with_presets() {
  Catalogue catalogue = demo_catalogue();
  ModelEntry& demo = catalogue.models["demo"];
  demo.experts = true;
  Preset& fast = demo.presets["fast"];
  fast.fields.set("num_inference_steps", 4);
  fast.fields.set("guidance_scale", 1);
  fast.loras = {{.name = "fast-high", .expert = Expert::kHigh},
                {.name = "fast-low", .scale = 0.5, .expert = Expert::kLow}};
  demo.presets["slow"].fields.set("num_inference_steps", 200);
  return catalogue;
}

TEST(CompleteSpec, APresetSetsWhatTheRequestLeavesOut) {
  const AdapterResolver resolve = [](const LoraUse&, const ModelEntry&) { return std::string(64, 'a'); };
  const auto completed = [&](const std::string& text) {
    const auto spec = complete_spec(*parse_spec(text), catalogue_with_presets(), resolve);
    EXPECT_TRUE(spec.ok()) << spec.error().message;
    return *spec;
  };
  const JobSpec spec = completed(
      R"({"prompt":"","preset":"fast","guidance_scale":2,"loras":[{"name":"ink"},{"name":"fast-low","scale":2}]})");
  EXPECT_EQ(spec.fields.integer("num_inference_steps"), 4);
  EXPECT_DOUBLE_EQ(*spec.fields.real("guidance_scale"), 2.0);
  EXPECT_DOUBLE_EQ(*spec.fields.real("true_cfg_scale"), 3.0);  // the model's default
  ASSERT_EQ(spec.loras.size(), 3u);
  EXPECT_EQ(spec.loras[0].name, "ink");
  EXPECT_EQ(spec.loras[1].expert, Expert::kBoth);  // the request's
  EXPECT_DOUBLE_EQ(spec.loras[1].scale, 2.0);
  EXPECT_EQ(spec.loras[2].name, "fast-high");
  EXPECT_EQ(spec.loras[2].expert, Expert::kHigh);
  EXPECT_EQ(spec.loras[2].sha256, std::string(64, 'a'));
  // What reaches a worker needs no presets, and completing it again changes nothing.
  EXPECT_EQ(to_json(*parse_complete_spec(to_json(spec))), to_json(spec));
  EXPECT_EQ(to_json(completed(to_json(spec))), to_json(spec));
  EXPECT_THAT(to_json(spec), HasSubstr(R"("preset":"fast")"));
  EXPECT_EQ(completed(R"({"prompt":"","preset":"slow"})").fields.integer("num_inference_steps"), 200);
  EXPECT_EQ(completed(R"({"prompt":"","preset":"fast"})").loras.size(), 2u);
}

TEST(CompleteSpec, RefusesAPresetThatTheModelDoesNotHave) {
  const auto refusal = [](const char* text) {
    const auto spec = complete_spec(*parse_spec(text), catalogue_with_presets());
    EXPECT_FALSE(spec.ok());
    return spec.error();
  };
  EXPECT_EQ(refusal(R"({"prompt":"","preset":"quick"})").message,
            "preset is 'quick', which model 'demo' does not have; it has fast, slow");
  EXPECT_EQ(refusal(R"({"prompt":"","preset":"fast","model":"large"})").message,
            "preset is 'fast', which model 'large' does not have; it has no presets");
  EXPECT_EQ(refusal(R"({"prompt":"","preset":"quick"})").param, "preset");
  std::string loras;
  for (int i = 0; i < 15; ++i) loras += R"({"name":"a)" + std::to_string(i) + "\"},";
  EXPECT_THAT(
      refusal((R"({"prompt":"","preset":"fast","loras":[)" + loras.substr(0, loras.size() - 1) + "]}").c_str()).message,
      HasSubstr("loras has 17 entries with those of preset 'fast'; at most 16"));
}

TEST(CompleteSpec, RefusesAFieldThatDoesNotApplyToTheModel) {
  const Error error = refused_by_model(R"({"prompt":"","frames":81})");
  EXPECT_EQ(error.code, Code::kInvalidArgument);
  EXPECT_EQ(error.param, "frames");
  EXPECT_EQ(error.message, "frames does not apply to model 'demo'; leave it out");
  Catalogue videos = demo_catalogue();
  ModelEntry& demo = videos.models["demo"];
  demo.media = MediaKind::kVideo;
  demo.apply("frames") = {.low = 1, .high = 81, .multiple_of = 4};
  demo.defaults.set("frames", 16);
  const auto spec = complete_spec(*parse_spec(R"({"prompt":""})"), videos);
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_EQ(spec->fields.integer("frames"), 16);
  EXPECT_EQ(complete_spec(*parse_spec(R"({"prompt":"","frames":82})"), videos).error().message,
            "frames is 82; model 'demo' accepts 1 to 81");
  EXPECT_EQ(complete_spec(*parse_spec(R"({"prompt":"","frames":81})"), videos).error().message,
            "frames is 81, which is not a multiple of 4 as model 'demo' needs; use 80");
  FieldLimits& odd = demo.fields[Field("frames")] = {.low = 1, .high = 9, .multiple_of = 4, .remainder = 1};
  for (const auto& [frames, nearest] : {std::pair(-5, -3), {0, 1}, {1, 1}, {2, 1}, {3, 5}, {6, 5}, {8, 9}, {64, 65}})
    EXPECT_EQ(odd.nearest(frames), nearest) << frames;
  for (const char* text : {R"({"prompt":"","frames":5})", R"({"prompt":"","frames":8})"})
    EXPECT_TRUE(complete_spec(*parse_spec(text), videos).ok()) << text;
}

TEST(ShapeClass, TakesFramesAndGuidanceFromTheSpecAndItsModel) {
  ModelEntry model = image_model("demo", 256);
  const Catalogue catalogue{{{"demo", model}}, "demo"};
  const auto key = [&](const char* text) {
    const auto spec = complete_spec(*parse_spec(text), catalogue);
    return spec.ok() ? shape_class_of(*spec, model, "bf16").key() : spec.error().message;
  };
  EXPECT_EQ(key(R"({"prompt":""})"), "demo/256x256x1/embedded/512/bf16");
  EXPECT_EQ(key(R"({"prompt":"","true_cfg_scale":2})"), "demo/256x256x1/embedded/512/bf16");
  EXPECT_EQ(key(R"({"prompt":"","true_cfg_scale":2,"negative_prompt":""})"), "demo/256x256x1/true_cfg/512/bf16");
  JobSpec cached{.model = "demo"};
  for (const auto& [threshold, text] :
       {std::pair(0.0, ""), {0.001, "+cache0.01"}, {0.08, "+cache0.08"}, {0.084, "+cache0.08"}, {1.0, "+cache1"}}) {
    cached.fields.set("cache", threshold);
    const ShapeClass shape = shape_class_of(cached, model, "bf16");
    EXPECT_THAT(shape.key(), testing::EndsWith(std::string("/bf16") + text));
    EXPECT_EQ(parse_class_key(shape.key()), shape) << shape.key();
  }
  EXPECT_FALSE(parse_class_key("demo/256x256x1/embedded/512/bf16+cachex"));
  const std::string a(64, 'a');
  cached.fields.set("image", a + "," + a);
  EXPECT_EQ(shape_class_of(cached, model, "bf16").images, 0) << "they do not lengthen the sequence";
  model.pixels_per_image = 1 << 20;
  const ShapeClass edit = shape_class_of(cached, model, "bf16");
  EXPECT_THAT(edit.key(), testing::EndsWith("/bf16+images2+cache1"));
  EXPECT_EQ(parse_class_key(edit.key()), edit);
  EXPECT_EQ(tokens_of(edit, model), 2 * 4096 + 512);
  for (const char* wrong : {"bf16+images", "bf16+images0", "bf16+images-1", "bf16+images2x", "bf16+cache1+images2"})
    EXPECT_FALSE(parse_class_key(std::string("demo/256x256x1/embedded/512/") + wrong)) << wrong;
  JobSpec video;
  video.model = "clips/v1";
  video.fields.set("frames", 81);
  model.guidance = nullptr;
  const std::string frames = shape_class_of(video, model, "auto").key();
  EXPECT_EQ(frames, "clips/v1/0x0x81/none/512/auto");
  EXPECT_EQ(parse_class_key(frames), shape_class_of(video, model, "auto"));
  model.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
  for (const auto& [given, rounded] : {std::pair(1, 1), {2, 1}, {7, 5}, {8, 9}, {81, 81}, {82, 81}}) {
    video.fields.set("frames", given);
    EXPECT_EQ(shape_class_of(video, model, "auto").frames, rounded) << given;
  }
}

TEST(ShapeClass, CountsTheTokensOfLatentFrames) {
  ModelEntry model;
  ShapeClass shape{.model = "m", .width = 832, .height = 480, .frames = 81, .text_tokens = 512};
  EXPECT_EQ(tokens_of(shape, model), 81 * 30 * 52 + 512);
  model.apply("frames") = {.low = 1, .high = 1024, .multiple_of = 4, .remainder = 1};
  EXPECT_EQ(tokens_of(shape, model), 21 * 30 * 52 + 512);
  model.pixels_per_token = 1024;
  EXPECT_EQ(tokens_of(shape, model), 21 * 15 * 26 + 512);
  shape.frames = 1;
  EXPECT_EQ(tokens_of(shape, model), 15 * 26 + 512);
}

TEST(CompleteSpec, WithoutModelsSaysSo) {
  const auto spec = complete_spec(*parse_spec(R"({"prompt":""})"), Catalogue{});
  ASSERT_FALSE(spec.ok());
  EXPECT_THAT(spec.error().message, HasSubstr("none is configured"));
  Catalogue one = demo_catalogue();
  one.default_model.clear();
  one.models.erase("large");
  EXPECT_TRUE(complete_spec(*parse_spec(R"({"prompt":""})"), one).ok());
}

}  // namespace
}  // namespace ditfleet::job
