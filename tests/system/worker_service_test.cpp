// The worker service on a real Redis: what becomes of units; the test plays the scheduler.
#include "shared/core/sha256.h"
#include "shared/telemetry/metrics.h"
#include "tests/paths.h"
#include "tests/system/worker_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;

class WorkerService : public WorkerTest {};

TEST_F(WorkerService, DrawsAUnitAndStoresIt) {
  auto worker = start_ready_worker();
  const std::string id = ready(spec(7));
  const auto attempt = assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  const auto record = job(id);
  const auto& unit = record.unit_records.at(0);
  EXPECT_EQ(unit.nonce, attempt.nonce);
  EXPECT_EQ(picture_bytes(id), expected_bytes(7));
  const auto manifest = *results::Manifest::parse(unit.manifest);
  EXPECT_EQ(manifest.media_type, "image/png");
  EXPECT_EQ(manifest.width, 32);
  EXPECT_EQ(manifest.seed, 7);
  EXPECT_EQ(manifest.nonce, attempt.nonce);
  EXPECT_EQ(unit.phases_us.at("denoise"), 22);
  for (const char* phase : {"text", "vae", "encode", "store", "wait"})
    EXPECT_TRUE(unit.phases_us.contains(phase)) << phase;
  EXPECT_EQ(record.warnings, std::vector<std::string>{"the prompt was cut"});
  const auto events = wait(client_->events(id, "0", 1000, soon()));
  ASSERT_TRUE(events.ok());
  int last_step = 0;
  for (const auto& event : *events) {
    if (event.type == "step") last_step = std::stoi(event.fields.at("step"));
  }
  EXPECT_EQ(last_step, 4) << "the last step is told before the end";
  EXPECT_EQ(events->back().type, "succeeded");
}

TEST_F(WorkerService, ImagesOfOneJobOnTwoWorkersHaveTheSeedsOfTheirUnits) {
  auto first = start_ready_worker("w1"), second = start_ready_worker("w2");
  const std::string id = ready(spec(40, 4));
  for (int unit = 0; unit < 4; ++unit) assign(id, unit, (unit % 2 ? second : first)->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  for (int unit = 0; unit < 4; ++unit) EXPECT_EQ(picture_bytes(id, unit), expected_bytes(40 + unit));
  EXPECT_EQ(job(id).unit_records.at(3).owner, second->owner());
}

TEST_F(WorkerService, TextOfTheNextUnitIsEncodedWhileThePresentOneDenoises) {
  script_->step_ms = 50;
  auto worker = start_ready_worker();
  const std::string first = ready(spec(1)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(reaches(second, State::kSucceeded));
  EXPECT_EQ(job(first).state, State::kSucceeded);
  EXPECT_LT(script_->index_of("text 2"), script_->index_of("step 1/4"));
  EXPECT_LT(script_->index_of("decoded 1"), script_->index_of("step 2/1")) << "one unit at a time on the device";
}

TEST_F(WorkerService, ThePictureOfAUnitIsEncodedWhileTheNextOneDenoises) {
  auto worker = start_ready_worker();
  // The first picture's encoding ends only after the second unit's last step: one thread for both never would.
  script_->on_event = [this](const std::string& event) -> std::optional<Error> {
    if (event == "pixels 1" && !until([&] { return logged("decoded 2"); }))
      return internal_error("the device stood still");
    return std::nullopt;
  };
  const std::string first = ready(spec(1)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(reaches(second, State::kSucceeded));
  EXPECT_TRUE(reaches(first, State::kSucceeded));
}

TEST_F(WorkerService, TheImageOfAJobIsDecodedOnceForAllItsUnits) {
  auto options = service_options();
  options.capacity = 3;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  const auto png = read_file(source_path("tests/fixtures/images/rgb.png"));
  ASSERT_TRUE(png.ok());
  auto store = *results::open_store({}, connection_);
  for (const std::int64_t seed : {1, 11}) {
    const std::string sha256 = sha256_hex(*png);
    ASSERT_TRUE(wait(store->put_input(sha256, *png, soon())).ok());
    auto with_image = spec(seed, 3);
    with_image.fields.set("image", sha256);
    const std::string id = ready(with_image);
    script_->inputs_read = 0;
    for (int unit = 0; unit < 3; ++unit) assign(id, unit, worker->owner());
    ASSERT_TRUE(reaches(id, State::kSucceeded));
    EXPECT_EQ(script_->inputs_read, 1) << "and another job reads its own";
    const std::lock_guard lock(script_->mutex);
    EXPECT_EQ(std::count(script_->log.begin(), script_->log.end(), "image 37x23"), seed == 1 ? 3 : 6);
  }
}

TEST_F(WorkerService, NothingStartsBeforeTheDeviceIsFree) {
  script_->step_ms = 100;
  auto worker = start_ready_worker();
  const std::string first = ready(spec(1)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("text 2") && job(first).state == State::kRunning; }));
  EXPECT_EQ(job(second).state, State::kAssigned) << "assigned is not running: it can still be revoked";
}

TEST_F(WorkerService, PreviewsComeAsEventsBeforeTheEnd) {
  auto worker = start_ready_worker();
  auto wanted = spec(3);
  wanted.partial_images = 3;
  const std::string id = ready(wanted);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  auto store = *results::open_store({}, connection_);
  int previews = 0;
  const auto events = wait(client_->events(id, "0", 1000, soon()));
  for (const auto& event : *events) {
    if (event.type != "preview") continue;
    EXPECT_EQ(event.fields.at("index"), std::to_string(previews));
    EXPECT_EQ(event.fields.at("step"), std::to_string(previews + 1));
    const auto bytes = wait(store->get_preview(event.fields.at("key"), soon()));
    ASSERT_TRUE(bytes.ok()) << bytes.error().message;
    EXPECT_EQ(*bytes, "PIXELS" + std::string(12, static_cast<char>(100 + previews + 1)));
    ++previews;
  }
  EXPECT_EQ(previews, 3);
}

TEST_F(WorkerService, CancelStopsAtTheNextStepAndTheNextUnitRuns) {
  script_->step_ms = 50;
  auto worker = start_ready_worker();
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 100);
  const std::string first = ready(slow), second = ready(spec(2));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
  ASSERT_EQ(*wait(client_->cancel(first, "", soon())), queue::CancelOutcome::kRequested);
  ASSERT_TRUE(reaches(first, State::kCanceled));
  EXPECT_FALSE(logged("step 1/20")) << "a second later it still denoised";
  EXPECT_TRUE(logged("stopped 1"));
  EXPECT_TRUE(reaches(second, State::kSucceeded));
  EXPECT_EQ(keys_like("df:{0}:blob:" + first + "*"), 0u);
}

TEST_F(WorkerService, ARevokedUnitIsNotRun) {
  script_->step_ms = 50;
  auto worker = start_ready_worker();
  const std::string first = ready(spec(1)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  const auto attempt = assign(second, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("text 2"); }));
  ASSERT_TRUE(wait(client_->revoke(epoch_, std::span(&attempt, 1), soon())).ok());
  ASSERT_TRUE(reaches(first, State::kSucceeded));
  EXPECT_EQ(job(second).state, State::kReady);
  EXPECT_FALSE(logged("step 2/1"));
  // Its place is free again.
  assign(second, 0, worker->owner());
  EXPECT_TRUE(reaches(second, State::kSucceeded));
}

TEST_F(WorkerService, WhatIsOverItsCapacityIsHandedBack) {
  script_->step_ms = 50;
  auto worker = start_ready_worker();
  std::vector<std::string> ids;
  for (int i = 0; i < 3; ++i) ids.push_back(ready(spec(i)));
  for (const auto& id : ids) assign(id, 0, worker->owner());
  EXPECT_TRUE(reaches(ids[2], State::kReady));
  EXPECT_NE(event_types(ids[2]).find("assigned:0 ready:0"), std::string::npos);
  EXPECT_TRUE(reaches(ids[1], State::kSucceeded));
}

TEST_F(WorkerService, PoisonFailsWithoutARetryAndHarmsNobody) {
  auto worker = start_ready_worker();
  auto too_large = spec(1);
  too_large.fields.set("width", 1 << 20);
  auto unseeded = spec(1);
  unseeded.seed.reset();
  for (const std::string& poison : {std::string("{"), std::string("\xff\xfe"), std::string("[]"),
                                    job::to_json(too_large), job::to_json(unseeded)}) {
    const std::string id = ready(poison);
    assign(id, 0, worker->owner());
    ASSERT_TRUE(reaches(id, State::kFailed)) << poison;
    const auto record = job(id);
    ASSERT_TRUE(record.unit_records.at(0).error.has_value());
    EXPECT_EQ(record.unit_records[0].error->code, Code::kInvalidArgument) << poison;
    EXPECT_EQ(event_types(id).find("started"), std::string::npos);
  }
  const std::string good = ready(spec(5));
  assign(good, 0, worker->owner());
  EXPECT_TRUE(reaches(good, State::kSucceeded));
}

TEST_F(WorkerService, AnErrorOfAStageFailsItsUnit) {
  auto worker = start_ready_worker();
  script_->on_event = [](const std::string& event) -> std::optional<Error> {
    if (event == "text 1" || event == "step 2/3" || event == "decoded 3" || event == "pixels 4") {
      return invalid_argument("no good: " + event);
    }
    return std::nullopt;
  };
  for (int seed = 1; seed <= 4; ++seed) {
    const std::string id = ready(spec(seed));
    assign(id, 0, worker->owner());
    ASSERT_TRUE(reaches(id, State::kFailed)) << seed;
    EXPECT_NE(job(id).unit_records.at(0).error->message.find("no good"), std::string::npos);
  }
  const std::string good = ready(spec(9));
  assign(good, 0, worker->owner());
  EXPECT_TRUE(reaches(good, State::kSucceeded));
}

TEST_F(WorkerService, OutOfMemoryIsTriedAgain) {
  auto worker = start_ready_worker();
  std::atomic<int> failures{0};
  script_->on_event = [&](const std::string& event) -> std::optional<Error> {
    if (event == "step 1/2" && failures == 0 && ++failures) return Error{Code::kOutOfMemory, "out of memory", {}};
    return std::nullopt;
  };
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] {
    reap();
    return job(id).state == State::kReady &&
           wait(client_->open_units(std::chrono::seconds(10)))->at(0).state == State::kReady &&
           job(id).unit_records.at(0).nonce.empty();
  }));
  ASSERT_TRUE(until([&] { return reap() >= 0 && redis({"ZCARD", "df:{0}:ready"}).integer == 1; }));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_EQ(failures, 1);
}

TEST_F(WorkerService, ADeviceFaultIsACrashAndEndsTheProcess) {
  auto worker = start_ready_worker();
  script_->on_event = [](const std::string& event) -> std::optional<Error> {
    if (event == "step 1/2") return Error{Code::kDeviceFault, "the device fell off the bus", {}};
    return std::nullopt;
  };
  const std::string first = ready(spec(1)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  EXPECT_EQ(worker->join(), 1);
  EXPECT_EQ(worker_state("w1"), "");
  const auto events = wait(client_->events(first, "0", 100, soon()));
  EXPECT_EQ(events->back().type, "ready");
  EXPECT_EQ(events->back().fields.at("crashes"), "1");
  EXPECT_EQ(job(second).state, State::kReady) << "handed back, not crashed";
  EXPECT_FALSE(logged("step 2/1"));
}

// Where the model hangs, and what the error calls it. The unit's first wait is five times worker.stuck_ms.
using Hang = std::pair<const char*, const char*>;
class WorkerHang : public WorkerService, public ::testing::WithParamInterface<Hang> {};

TEST_P(WorkerHang, FailsTheUnitAndEndsTheProcess) {
  auto options = service_options();
  options.stuck = 100ms;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  HeldEvent hang(*script_, GetParam().first);
  const std::string first = ready(spec(1)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  ASSERT_TRUE(until([&] { return hang.reached(); }));
  assign(second, 0, worker->owner());
  ASSERT_TRUE(until([&] { return worker_state("w1") == "stuck"; }));
  EXPECT_EQ(worker->join(), 1);
  EXPECT_TRUE(worker->busy()) << "the process must not wait for the thread";
  EXPECT_EQ(worker_state("w1"), "") << "deregistered";
  const auto events = wait(client_->events(first, "0", 100, soon()));
  EXPECT_EQ(events->back().type, "ready");
  EXPECT_EQ(events->back().fields.at("crashes"), "1");
  const std::string message = job(first).unit_records.at(0).error->message, stage = GetParam().second;
  EXPECT_TRUE(message.starts_with("[worker] " + stage + " of class demo/")) << message;
  EXPECT_NE(message.find(" made no progress for "), std::string::npos) << message;
  EXPECT_NE(job(second).state, State::kFailed);
  EXPECT_EQ(redis({"ZCARD", "df:{0}:lease"}).integer, 0);
}
INSTANTIATE_TEST_SUITE_P(Of, WorkerHang,
                         ::testing::Values(Hang("text 1", "encoding the text"), Hang("step 1/1", "the first step"),
                                           Hang("step 1/3", "a step"), Hang("decoded 1", "decoding the image"),
                                           Hang("pixels 1", "encoding the image")));

TEST_F(WorkerService, ACanceledUnitThatHangsEndsTheProcessToo) {
  auto options = service_options();
  options.stuck = 100ms;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  HeldEvent hang(*script_, "step 1/2");
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return hang.reached(); }));
  ASSERT_EQ(*wait(client_->cancel(id, "", soon())), queue::CancelOutcome::kRequested);
  EXPECT_EQ(worker->join(), 1);
  EXPECT_EQ(job(id).state, State::kCanceled);
}

// Of the first unit in the store, on the io thread; of the others on the thread of a stage.
TEST_F(WorkerService, AnExceptionFailsItsUnitAlone) {
  script_->store_throws = true;
  std::atomic<bool> text{true}, step{true};
  script_->on_event = [&](const std::string& event) -> std::optional<Error> {
    if ((event == "text 2" && text.exchange(false)) || (event == "step 3/2" && step.exchange(false)))
      throw std::runtime_error("on purpose");
    return std::nullopt;
  };
  auto worker = start_ready_worker();
  for (const int seed : {1, 2, 3}) {
    const std::string id = ready(spec(seed));
    assign(id, 0, worker->owner());
    ASSERT_TRUE(until([&] { return job(id).unit_records.at(0).error.has_value(); })) << seed;
    EXPECT_NE(job(id).unit_records.at(0).error->message.find("on purpose"), std::string::npos);
    ASSERT_TRUE(until([&] { return reap() >= 0 && redis({"ZCARD", "df:{0}:ready"}).integer == 1; }));
    assign(id, 0, worker->owner());
    EXPECT_TRUE(reaches(id, State::kSucceeded)) << seed;
  }
}

int steps_timed(const std::string& phase) {
  const std::string metrics = telemetry::render_metrics(),
                    name = "ditfleet_step_seconds_count{model=\"demo\",phase=\"" + phase + "\"} ";
  const auto at = metrics.find(name);
  return at == std::string::npos ? 0 : std::stoi(metrics.substr(at + name.size()));
}

TEST_F(WorkerService, FirstAndSteadyStepsAreTimedApart) {
  const int first = steps_timed("first"), steady = steps_timed("steady");
  auto worker = start_ready_worker();
  const std::string id = ready(spec(7));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_EQ(steps_timed("first"), first + 1);
  EXPECT_EQ(steps_timed("steady"), steady + 3);
}

TEST_F(WorkerService, SkippedStepsAreCountedInTheResultAndTimedApart) {
  const int skipped = steps_timed("skipped"), steady = steps_timed("steady");
  auto worker = start_ready_worker();
  auto cached = spec(7);
  cached.fields.set("cache", 0.08);
  const std::string id = ready(cached);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_EQ(results::Manifest::parse(job(id).unit_records.at(0).manifest)->skipped_steps, 2);
  EXPECT_EQ(steps_timed("skipped"), skipped + 2);
  EXPECT_EQ(steps_timed("steady"), steady + 1);
}

TEST_F(WorkerService, HeartbeatsNameWhatItHolds) {
  script_->step_ms = 100;
  auto worker = start_ready_worker();
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  EXPECT_TRUE(until([&] {
    const auto workers = *wait(client_->workers(soon()));
    return workers.size() == 1 && workers[0].units == std::vector<queue::UnitRef>{{id, 0}};
  }));
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_TRUE(until([&] { return wait(client_->workers(soon()))->at(0).units.empty(); }));
}

TEST_F(WorkerService, ReportsTheMemoryOfItsModelsAndAtOnceThatOneCameToTheDevice) {
  script_->memory = {.limits = {{"resident", 1 << 20}, {"block", 4 << 20}},
                     .available_bytes = 12'000'000'000,
                     .bytes = 9'000'000'000,
                     .resident = false,
                     .load_time = 400ms};
  auto options = service_options();
  options.heartbeat = 60s;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  const auto memory = [&] { return wait(client_->workers(soon()))->at(0).memory.at("demo"); };
  queue::ModelMemory expected{.limits = {{"resident", 1 << 20}, {"block", 4 << 20}},
                              .available_bytes = 12'000'000'000,
                              .bytes = 9'000'000'000,
                              .resident = false,
                              .load_us = 400'000};
  EXPECT_EQ(memory(), expected);
  HeldEvent picture(*script_);  // so that the unit does not end, which sends a heartbeat too
  const auto id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return picture.reached(); }));
  expected.resident = true;
  EXPECT_TRUE(until([&] { return memory() == expected; }, 1s)) << "before the first look at adapters, after 2 s";
  picture.release();
  EXPECT_TRUE(reaches(id, State::kSucceeded));
}

TEST_F(WorkerService, AnAttemptThatWasTakenAwayStopsAndLeavesNothing) {
  script_->step_ms = 100;
  auto worker = start_ready_worker();
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 50);
  const std::string id = ready(slow);
  const auto attempt = assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
  ASSERT_TRUE(wait(client_->hand_back(std::span(&attempt, 1), soon())).ok());
  EXPECT_TRUE(until([&] { return logged("stopped 1"); }, 2s));
  EXPECT_EQ(job(id).state, State::kReady);
  EXPECT_EQ(keys_like("df:{0}:blob:*"), 0u);
}

// A worker fails a unit whose result cannot be stored for ten seconds. While Redis is full, no worker could store it.
TEST_F(WorkerService, KeepsAResultWhileRedisIsFull) {
  const auto worker = start_ready_worker();
  const std::string id = ready(spec(5));
  redis({"CONFIG", "SET", "maxmemory", "1"});
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("pixels 5"); }));
  EXPECT_FALSE(
      until([&] { return job(id).state != job::State::kRunning || job(id).unit_records[0].attempt != 1; }, 11s));
  redis({"CONFIG", "SET", "maxmemory", "0"});
  ASSERT_TRUE(reaches(id, job::State::kSucceeded));
  EXPECT_EQ(picture_bytes(id), expected_bytes(5));
  EXPECT_EQ(job(id).unit_records[0].attempt, 1);
}

TEST_F(WorkerService, BytesOfARefusedCompletionAreRemoved) {
  auto worker = start_ready_worker();
  HeldEvent encoding(*script_);
  const std::string id = ready(spec(1));
  const auto attempt = assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return encoding.reached(); }));
  // Behind its back, between two renewals.
  ASSERT_TRUE(wait(client_->hand_back(std::span(&attempt, 1), soon())).ok());
  encoding.release();
  worker->drain();
  EXPECT_EQ(worker->join(), 0);
  EXPECT_EQ(job(id).state, State::kReady);
  EXPECT_EQ(keys_like("df:{0}:blob:*"), 0u);
}

TEST_F(WorkerService, ACompletionThatAnotherLibraryRefusesIsRepeatedUntilItSucceeds) {
  auto worker = start_ready_worker();
  HeldEvent encoding(*script_);
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return encoding.reached(); }));
  const auto listed = redis({"FUNCTION", "LIST", "LIBRARYNAME", "ditfleet_v3", "WITHCODE"});
  std::string text = listed.elements.at(0).elements.at(7).text;
  text.replace(text.find("complete, {keys = 8"), 19, "complete, {keys = 9");
  redis({"FUNCTION", "LOAD", "REPLACE", text});
  encoding.release();
  ASSERT_TRUE(until([&] { return redis({"INFO", "errorstats"}).text.find("errorstat_BADARG") != std::string::npos; }));
  EXPECT_EQ(keys_like("df:{0}:blob:*"), 1u);
  redis({"FUNCTION", "DELETE", "ditfleet_v3"});
  EXPECT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_EQ(job(id).unit_records.at(0).attempt, 1);
}

}  // namespace
}  // namespace ditfleet::testing
