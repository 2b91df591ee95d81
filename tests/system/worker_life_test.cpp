// The worker service on a real Redis: how a worker starts and ends, and a Redis that is not there meanwhile; the test
// plays the scheduler.
#include "shared/telemetry/metrics.h"
#include "tests/system/worker_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;

class WorkerLife : public WorkerTest {
 protected:
  // Of the worker w1.
  bool desire(queue::Desired desired) {
    const auto workers = wait(client_->workers(soon()));
    return workers.ok() && workers->size() == 1 && wait(client_->set_desired(workers->at(0), desired, soon())).ok();
  }
};

TEST_F(WorkerLife, AModelThatDoesNotLoadEndsTheProcess) {
  script_->on_event = [](const std::string&) -> std::optional<Error> {
    return Error{Code::kDataCorrupt, "a torn file", {}};
  };
  auto worker = start_worker(service_options());
  EXPECT_EQ(worker->join(), 1);
  EXPECT_EQ(worker_state("w1"), "");
}

TEST_F(WorkerLife, WarmsUpBeforeItIsReady) {
  auto options = service_options();
  options.warmup = true;
  options.models = {"demo"};
  options.adapter_slots = 3;
  script_->step_ms = 200;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "starting"; }));
  const auto starting = wait(client_->workers(soon()))->at(0);
  EXPECT_EQ(starting.models, std::vector<std::string>{"demo"}) << "what it will have is told at once";
  EXPECT_EQ(starting.adapter_slots, 3);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  EXPECT_TRUE(logged("pixels 0")) << "one real picture";
  const auto workers = *wait(client_->workers(soon()));
  EXPECT_EQ(workers.at(0).warm_classes, std::vector<std::string>{"demo/16x16x1/embedded/512/fp32"});
  EXPECT_EQ(workers.at(0).models, std::vector<std::string>{"demo"});
  EXPECT_EQ(workers.at(0).quantized, std::vector<std::string>{"demo/transformer: 1 fp32, 2 nf4"});
  EXPECT_EQ(workers.at(0).pid, ::getpid());
}

TEST_F(WorkerLife, RunsTheConfiguredClassesBeforeItIsReady) {
  auto options = service_options();
  options.warmup = true;
  script_->warmup_classes = {{.width = 64, .height = 32},
                             {.model = "demo", .width = 32, .height = 32, .max_sequence_length = 16, .true_cfg = true},
                             {.model = "other", .width = 32, .height = 32}};
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  EXPECT_EQ(wait(client_->workers(soon()))->at(0).warm_classes,
            (std::vector<std::string>{"demo/16x16x1/embedded/512/fp32", "demo/64x32x1/embedded/512/fp32",
                                      "demo/32x32x1/true_cfg/16/fp32"}));
  EXPECT_TRUE(logged("step 0/2")) << "two steps: what is set up on second use is set up, too";
  const std::string metrics = telemetry::render_metrics();
  for (const char* part : {"text_encoders", "transformer_first_step", "transformer_steady_step", "vae", "encode"})
    EXPECT_NE(metrics.find("ditfleet_warmup_seconds{class=\"demo/64x32x1/embedded/512/fp32\",model=\"demo\",part=\"" +
                           std::string(part) + "\"}"),
              std::string::npos)
        << part << "\n"
        << metrics;
}

TEST_F(WorkerLife, AClassWithTrueCfgGuidesAModelWithOneScale) {
  job::ModelEntry entry{.name = "demo"};
  for (const job::Field field : {job::Field("width"), job::Field("height"), job::Field("num_inference_steps")})
    entry.apply(field).low = 16;
  entry.fields.at("num_inference_steps").low = 1;
  entry.apply("guidance_scale");
  entry.apply("negative_prompt");
  entry.defaults.set("guidance_scale", 0.0);
  entry.guidance = [](const job::FieldValues& fields) {
    return fields.real("guidance_scale").value_or(0) > 0 ? job::GuidanceKind::kTrueCfg : job::GuidanceKind::kNone;
  };
  auto options = service_options();
  options.warmup = true;
  script_->entry = entry;
  script_->warmup_classes = {{.width = 32, .height = 32, .true_cfg = true}};
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  EXPECT_EQ(wait(client_->workers(soon()))->at(0).warm_classes,
            (std::vector<std::string>{"demo/16x16x1/none/512/fp32", "demo/32x32x1/true_cfg/512/fp32"}));
}

TEST_F(WorkerLife, AClassThatItsModelDoesNotTakeEndsTheProcess) {
  auto options = service_options();
  options.warmup = true;
  script_->warmup_classes = {{.width = 65, .height = 32}};
  auto worker = start_worker(options);
  EXPECT_EQ(worker->join(), 1);
  EXPECT_FALSE(logged("text 0")) << "nothing is drawn before all classes were looked at";
}

TEST_F(WorkerLife, DrainFinishesWhatRunsAndHandsBackTheRest) {
  script_->step_ms = 200;
  auto worker = start_ready_worker();
  const std::string first = ready(spec(1)), second = ready(spec(2)), third = ready(spec(3));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/1"); }));
  worker->drain();
  ASSERT_TRUE(reaches(second, State::kReady));
  // Its heartbeat may come after what it hands back.
  EXPECT_TRUE(until([&] { return worker_state("w1") == "draining"; }));
  assign(third, 0, worker->owner());
  EXPECT_EQ(worker->join(), 0);
  EXPECT_EQ(job(first).state, State::kSucceeded);
  EXPECT_EQ(job(third).state, State::kReady) << "assigned while it drained";
  EXPECT_EQ(worker_state("w1"), "");
}

// What /readyz says, and when an init system learns that the worker is ready.
TEST_F(WorkerLife, IsReadyOnlyWhileUnitsCanCome) {
  script_->load_ms = 300;
  auto worker = start_worker(service_options());
  const auto becomes = [&](const std::string& why) { return until([&] { return worker->why_not_ready() == why; }); };
  EXPECT_EQ(worker->why_not_ready(), "loading the models");
  EXPECT_EQ(script_->readies, 0);
  ASSERT_TRUE(becomes(""));
  EXPECT_EQ(worker_state("w1"), "ready");
  server_.kill();
  EXPECT_TRUE(becomes("Redis does not answer"));
  server_.restart();
  EXPECT_TRUE(becomes(""));
  ASSERT_TRUE(until([&] { return desire(queue::Desired::kDraining); }));
  EXPECT_TRUE(becomes("drained by an administrator"));
  ASSERT_TRUE(desire(queue::Desired::kReady));
  EXPECT_TRUE(becomes(""));
  EXPECT_EQ(script_->readies, 1);
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 50);
  const std::string id = ready(slow);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/1"); }));
  worker->drain();
  EXPECT_TRUE(becomes("draining"));
}

TEST_F(WorkerLife, ModelsThatDoNotLoadInTimeEndTheProcess) {
  script_->load_ms = 1500;
  auto options = service_options();
  options.stuck = 5ms;
  auto worker = start_worker(options);
  EXPECT_EQ(worker->join(), 1);
  EXPECT_TRUE(worker->busy()) << "the program then ends without waiting for the thread";
}

TEST_F(WorkerLife, AnAdministratorDrainsAndResumesIt) {
  script_->step_ms = 100;
  auto options = service_options();
  options.drain = 100ms;  // bounds signals only
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 5);
  const std::string first = ready(slow), second = ready(spec(2));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/1"); }));
  ASSERT_TRUE(desire(queue::Desired::kDraining));
  ASSERT_TRUE(reaches(second, State::kReady));
  EXPECT_TRUE(until([&] { return worker_state("w1") == "draining"; }));
  EXPECT_TRUE(reaches(first, State::kSucceeded)) << "however long it takes";
  EXPECT_EQ(job(second).unit_records.at(0).attempt, 0) << "a unit that was handed back counts no attempt";
  EXPECT_EQ(worker_state("w1"), "draining") << "it does not end";

  ASSERT_TRUE(desire(queue::Desired::kReady));
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  assign(second, 0, worker->owner());
  EXPECT_TRUE(reaches(second, State::kSucceeded));
}

TEST_F(WorkerLife, ADrainedWorkerStaysDrainedAfterARestart) {
  {
    auto worker = start_ready_worker();
    ASSERT_TRUE(desire(queue::Desired::kDraining));
    ASSERT_TRUE(until([&] { return worker_state("w1") == "draining"; }));
    worker->drain();  // as by SIGTERM
    EXPECT_EQ(worker->join(), 0);
  }
  EXPECT_GT(redis({"TTL", keys_.desired("w1")}).integer, 6 * 86'400);
  auto worker = start_worker(service_options());
  ASSERT_TRUE(until([&] { return worker_state("w1") == "draining"; }));
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  EXPECT_TRUE(until([&] { return event_types(id).ends_with("assigned:0 ready:0"); })) << event_types(id);
  ASSERT_TRUE(desire(queue::Desired::kReady));
  EXPECT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
}

TEST_F(WorkerLife, AnAdministratorStopsOneRunOfIt) {
  {
    auto worker = start_ready_worker();
    ASSERT_TRUE(desire(queue::Desired::kStopped));
    EXPECT_EQ(worker->join(), 0);
    EXPECT_EQ(worker_state("w1"), "");
  }
  auto worker = start_ready_worker();  // the next run is not concerned
  std::this_thread::sleep_for(300ms);
  EXPECT_EQ(worker_state("w1"), "ready");
}

TEST_F(WorkerLife, DrainOutOfTimeHandsBackWhatRuns) {
  script_->step_ms = 50;
  auto options = service_options();
  options.drain = 200ms;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 150);
  const std::string id = ready(slow);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/1"); }));
  worker->drain();
  EXPECT_EQ(worker->join(), 0);
  EXPECT_EQ(job(id).state, State::kReady);
  EXPECT_TRUE(logged("stopped 1"));
  EXPECT_EQ(event_types(id).find("failed"), std::string::npos);
}

TEST_F(WorkerLife, AnIdleWorkerDrainsAtOnce) {
  auto worker = start_ready_worker();
  const auto begun = std::chrono::steady_clock::now();
  worker->drain();
  EXPECT_EQ(worker->join(), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 2500ms);
}

TEST_F(WorkerLife, SurvivesARedisThatRestartsWhileItDenoises) {
  script_->step_ms = 100;
  auto worker = start_ready_worker();
  auto slow = spec(1);
  slow.fields.set("num_inference_steps", 15);
  const std::string id = ready(slow);
  assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("step 1/2"); }));
  server_.kill();
  server_.restart();
  ASSERT_TRUE(until([&] {
    auto record = wait(client_->job(id, "", soon()));
    return record.ok() && record->state == State::kSucceeded;
  }));
  EXPECT_EQ(picture_bytes(id), expected_bytes(1));
  EXPECT_FALSE(logged("stopped 1"));
  EXPECT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  // And it hears of new work.
  const std::string next = ready(spec(2));
  assign(next, 0, worker->owner());
  EXPECT_TRUE(reaches(next, State::kSucceeded));
}

// New entries may then have lower ids than those that the worker has read.
TEST_F(WorkerLife, ReadsItsMailboxAfterRedisHasLostItsEnd) {
  auto worker = start_ready_worker();
  const std::string mailbox = keys_.mailbox(worker->owner());
  redis({"XADD", mailbox, "99999999999999-1", "m", "revoke nothing 0 nonce"});
  ASSERT_TRUE(until([&] { return redis({"XLEN", mailbox}).integer == 0; })) << "it has read the entry";
  redis({"DEL", mailbox});
  server_.kill();
  server_.restart();
  ASSERT_TRUE(until([&] { return wait(client_->load_library(soon())).ok() && worker_state("w1") == "ready"; }));
  const std::string id = ready(spec(1));
  assign(id, 0, worker->owner());
  EXPECT_TRUE(reaches(id, State::kSucceeded));
}

TEST_F(WorkerLife, StartsWithoutARedisAndRegistersOnceItIsThere) {
  server_.kill();
  auto worker = start_worker(service_options());
  ASSERT_TRUE(until([&] { return logged("load"); }));
  std::this_thread::sleep_for(300ms);
  server_.restart();
  EXPECT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
}

}  // namespace
}  // namespace ditfleet::testing
