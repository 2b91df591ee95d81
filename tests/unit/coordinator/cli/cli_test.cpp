// The command line's parts that decide: event streams, job bodies, tables, errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>

#include "coordinator/cli/generate.h"
#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/sse_parser.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/wall_clock.h"

namespace ditfleet::cli {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

std::vector<ServerEvent> parse_in_pieces(const std::string& stream, std::size_t piece) {
  SseParser parser;
  std::vector<ServerEvent> events;
  for (std::size_t i = 0; i < stream.size(); i += piece) {
    parser.feed(std::string_view(stream).substr(i, piece), [&](const ServerEvent& event) { events.push_back(event); });
  }
  return events;
}

TEST(SseParser, ReadsEventsInWhateverPieces) {
  const std::string stream =
      ": keep alive\n\nid: 1-0\nevent: queued\ndata: {\"a\":1}\n\nid: 2-0\r\nevent: step\r\ndata: "
      "one\r\ndata:two\r\n\r\ndata: x\n\nid: 9\n\nevent: lost\ndata: unfinished";
  for (std::size_t piece = 1; piece <= stream.size(); ++piece) {
    const auto events = parse_in_pieces(stream, piece);
    ASSERT_EQ(events.size(), 3u) << piece;
    EXPECT_EQ(events[0].id, "1-0");
    EXPECT_EQ(events[0].type, "queued");
    EXPECT_EQ(events[0].data, "{\"a\":1}");
    EXPECT_EQ(events[1].id, "2-0");
    EXPECT_EQ(events[1].data, "one\ntwo");
    EXPECT_EQ(events[2].type, "message");
    EXPECT_EQ(events[2].id, "2-0");  // an id holds until the next one
  }
}

TEST(JobWatch, OnlyTheJobsOwnEndIsTheEnd) {
  EXPECT_TRUE(is_terminal_event({"1", "succeeded", R"({"unit":null})"}));
  EXPECT_TRUE(is_terminal_event({"1", "rejected", R"({})"}));
  EXPECT_FALSE(is_terminal_event({"1", "succeeded", R"({"unit":0})"}));
  EXPECT_FALSE(is_terminal_event({"1", "started", R"({"unit":null})"}));
  EXPECT_THAT(event_line({"1", "step", R"({"unit":2,"step":3,"total":20,"at_ms":1})"}), HasSubstr("unit 2 step 3/20"));
}

TEST(Generate, BodySaysWhatWasTypedAndNothingElse) {
  GenerateFlags flags;
  flags.fields = {{job::Field("prompt"), "a red circle"}};
  EXPECT_EQ(*job_body(flags), R"({"prompt":"a red circle"})");
  flags.fields = {{job::Field("cache"), "first_block:0.5"}};
  EXPECT_EQ(*job_body(flags), R"({"cache":{"mode":"first_block","threshold":5E-1}})");
  flags.fields = {{job::Field("cache"), "off"}};
  EXPECT_EQ(*job_body(flags), R"({"cache":{"mode":"off"}})");
  EXPECT_EQ(job::name_the_flag({Code::kInvalidArgument, "m", "cache.mode"}).message, "--cache: m");
  EXPECT_EQ(job::name_the_flag({Code::kInvalidArgument, "m", "images[1]"}).message, "--image: m");
  flags.fields = {{job::Field("image"), "a"}, {job::Field("mask"), "b"}, {job::Field("auto_resize"), "false"}};
  EXPECT_EQ(*job_body(flags), R"({"image":"a","mask":"b","auto_resize":false})");
  flags.fields = {{job::Field("image"), "a\nb"}, {job::Field("strength"), "0.5"}};
  EXPECT_EQ(*job_body(flags), R"({"images":["a","b"],"strength":5E-1})");
  flags.out = "x.webp";
  flags.fields = {{job::Field("prompt"), "a red circle"},
                  {job::Field("size"), "256x128"},
                  {job::Field("n"), "2"},
                  {job::Field("seed"), "7"},
                  {job::Field("negative_prompt"), ""}};
  flags.loras = {"pixel:0.5", "ink", "oil:-1:high", "tar:low"};
  const auto body = parse_json(*job_body(flags));
  ASSERT_TRUE(body.ok());
  EXPECT_EQ(body->at("output_format"), "webp");
  EXPECT_EQ(body->at("n"), 2);
  EXPECT_EQ(body->at("negative_prompt"), "");
  EXPECT_EQ(body->at("loras").at(0).at("scale"), 0.5);
  EXPECT_EQ(body->at("loras").at(1).at("name"), "ink");
  EXPECT_EQ(json::serialize(body->at("loras").at(2)), R"({"name":"oil","scale":-1E0,"expert":"high"})");
  EXPECT_EQ(json::serialize(body->at("loras").at(3)), R"({"name":"tar","scale":1E0,"expert":"low"})");
}

TEST(Generate, RefusesWhatCannotBeWritten) {
  GenerateFlags flags;
  flags.out = "x.gif";
  EXPECT_THAT(job_body(flags).error().message, HasSubstr(".png, .jpg, .webp or .mp4"));
  flags.out = {};
  flags.fields = {{job::Field("cache"), "first_block:much"}};
  EXPECT_EQ(job_body(flags).error().message, "--cache is 'first_block:much'; it must be first_block:THRESHOLD or off");
  flags.fields.clear();
  flags.out = "x.png";
  for (const char* lora :
       {"pixel:much", "pixel:nan", "pixel:inf", "pixel:1e3", "pixel:", "pixel:1:medium", "pixel:x:low"}) {
    flags.loras = {lora};
    const auto body = job_body(flags);
    ASSERT_FALSE(body.ok()) << lora;
    EXPECT_THAT(body.error().message, HasSubstr("NAME:SCALE"));
  }
  flags.loras.clear();
  flags.fields = {{job::Field("prompt"), "\xff"}};
  EXPECT_THAT(job_body(flags).error().message, HasSubstr("UTF-8"));
}

TEST(Generate, ThePicturesFormatIsThatOfItsNameHoweverItIsSpelled) {
  GenerateFlags flags;
  for (const auto& [out, format] :
       {std::pair{"x.PNG", "png"}, {"x.Jpg", "jpeg"}, {"x.JPEG", "jpeg"}, {"x.webP", "webp"}, {"x.mp4", "mp4"}}) {
    flags.out = out;
    const auto body = job_body(flags);
    ASSERT_TRUE(body.ok()) << body.error().message;
    EXPECT_THAT(*body, HasSubstr("\"output_format\":\"" + std::string(format) + "\""));
  }
}

TEST(HttpClient, WhatGoesIntoAPathIsEncoded) {
  EXPECT_EQ(percent_encoded("a b&c=%/é.x_-~"), "a%20b%26c%3D%25%2F%C3%A9.x_-~");
}

TEST(Generate, SeveralPicturesAreNumbered) {
  EXPECT_EQ(job::numbered_path("a/out.png", 0, 1), "a/out.png");
  EXPECT_EQ(job::numbered_path("a/out.png", 1, 3), "a/out-2.png");
  EXPECT_EQ(job::numbered_path("a.b/out.x.webp", 0, 2), "a.b/out.x-1.webp");
}

TEST(Terminal, TablesAlignAndTextStaysOnItsLine) {
  EXPECT_EQ(table({{"A", "LONG"}, {"größer", "x"}}), "A       LONG\ngrößer  x\n");
  EXPECT_EQ(one_line("a\nb\x1b[31m", 20), "a b [31m");
  EXPECT_EQ(one_line("a\xc2\x9b"
                     "31m \xc2\xa9",
                     20),
            "a 31m \xc2\xa9");
  EXPECT_EQ(one_line("äöü", 2), "äö…");
  EXPECT_EQ(short_duration(999), "999 µs");
  EXPECT_EQ(short_duration(0), "0 ms");
  EXPECT_EQ(short_duration(3'163), "3.2 ms");
  EXPECT_EQ(short_duration(6'000), "6 ms");
  EXPECT_EQ(short_duration(9'960), "10 ms");
  EXPECT_EQ(short_duration(12'345), "12 ms");
  EXPECT_EQ(short_duration(999'700), "1 s");
  EXPECT_EQ(short_duration(3'163'000), "3.2 s");
  EXPECT_EQ(short_duration(23'200'000), "23.2 s");
  EXPECT_EQ(short_duration(119'960'000), "2 min 0 s");
  EXPECT_EQ(short_duration(185'000'000), "3 min 5 s");
  EXPECT_EQ(short_duration(7'380'000'000), "2 h 3 min");
  EXPECT_EQ(short_duration(-1), "-");
  const auto now = unix_ms();
  EXPECT_EQ(ago(0), "");
  EXPECT_EQ(ago(now), "now");
  EXPECT_EQ(ago(now + 5'000), "now") << "the clocks differ";
  EXPECT_EQ(ago(now - 971), "1 s ago");
  EXPECT_THAT(ago(now - 23'200), ::testing::AnyOf("23 s ago", "24 s ago"));
  EXPECT_EQ(whole_seconds(0), "now");
  EXPECT_EQ(whole_seconds(3'200), "3 s");
}

TEST(JobWatch, OutlooksAreTexts) {
  const auto text_of = [](std::int64_t position, std::int64_t left_ms) {
    return outlook_text(
        json::object{{"position", position < 0 ? json::value(nullptr) : json::value(position)},
                     {"eta_ms", left_ms == 0 ? json::value(nullptr) : json::value(unix_ms() + left_ms)}});
  };
  EXPECT_EQ(text_of(-1, 0), "");
  EXPECT_EQ(text_of(0, 0), "next");
  EXPECT_EQ(text_of(1, 0), "1 job ahead");
  EXPECT_EQ(text_of(12, 185'200), "12 jobs ahead, 3 min 5 s left");
  EXPECT_EQ(text_of(-1, 1), "");
  EXPECT_EQ(outlook_text(json::object{}), "") << "an older service";
}

TEST(HttpClient, RefusesToSendAPipeAtOnce) {
  const fs::path pipe = fs::temp_directory_path() / ("ditfleet_cli_pipe_" + std::to_string(::getpid()));
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  Target target;
  target.url = "http://127.0.0.1:1";
  const auto sent = HttpClient(target).send_file("PUT", "/v1/loras/x", pipe.string());
  fs::remove(pipe);
  ASSERT_FALSE(sent.ok());
  EXPECT_EQ(sent.error().code, Code::kInvalidArgument);
  EXPECT_THAT(sent.error().message, HasSubstr("not a regular file"));
}

// Of the codes that share a status (503, 500) the client takes the one that the status alone stands for.
TEST(ErrorOf, ReadsTheStatusAndTheMessage) {
  const std::map<long, Code> codes = {{400, Code::kInvalidArgument},
                                      {401, Code::kUnauthenticated},
                                      {403, Code::kPermissionDenied},
                                      {404, Code::kNotFound},
                                      {409, Code::kConflict},
                                      {413, Code::kPayloadTooLarge},
                                      {422, Code::kIdempotencyMismatch},
                                      {429, Code::kResourceExhausted},
                                      {500, Code::kInternal},
                                      {503, Code::kUnavailable},
                                      {504, Code::kDeadlineExceeded},
                                      {418, Code::kInternal}};
  for (const auto& [status, code] : codes) {
    HttpResponse response;
    response.status = status;
    response.body = R"({"error":{"message":"why"}})";
    const Error error = error_of(response, "here");
    EXPECT_EQ(error.code, code) << status;
    EXPECT_EQ(error.message, "why");
  }
}

}  // namespace
}  // namespace ditfleet::cli
