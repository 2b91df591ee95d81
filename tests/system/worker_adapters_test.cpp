// LoRA adapters in the worker's service, on a real Redis and registry; the test plays the scheduler.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "shared/loras/upload.h"
#include "shared/telemetry/metrics.h"
#include "tests/system/temporary_folder.h"
#include "tests/system/worker_fixture.h"

namespace ditfleet::testing {
namespace {

using job::State;
namespace fs = std::filesystem;

class WorkerAdapters : public WorkerTest {
 protected:
  WorkerAdapters() {
    adapters_.cache_dir = folder_.path() + "/cache";
    adapters_.cache_bytes = 64 << 20;
    adapters_.folders = {folder_.path() + "/models"};
    script_->adapters.slots = 2;
    script_->adapters.host_bytes = 1 << 20;
    fs::create_directories(adapters_.folders[0]);
  }

  // Registered as `name`; its digest. `content` in Redis, or a file that holds it.
  std::string add(const std::string& name, const std::string& content, const std::string& path = {},
                  const std::string& tenant = "default") {
    loras::Adapter record;
    record.tenant = tenant;
    record.name = name;
    record.sha256 = sha256_hex(content);
    record.bytes = static_cast<std::int64_t>(content.size());
    record.path = path;
    loras::Upload upload(registry_);
    if (path.empty()) {
      EXPECT_TRUE(wait(upload.write(content, soon())).ok());
      EXPECT_TRUE(wait(upload.finish(soon())).ok());
    }
    auto done = wait(registry_.put(record, path.empty() ? upload.id() : std::string(), loras::Condition::kAny, soon()));
    EXPECT_TRUE(done.ok()) << (done ? "" : done.error().message);
    return record.sha256;
  }
  std::string add_file(const std::string& name, const fs::path& path, const std::string& content) {
    std::ofstream(path) << content;
    return add(name, content, path);
  }
  static job::JobSpec with(job::JobSpec spec, const std::string& name, const std::string& sha256, double scale = 1.0) {
    spec.loras.push_back({name, scale, sha256});
    return spec;
  }
  queue::WorkerInfo told() {
    auto workers = wait(client_->workers(soon()));
    return workers && !workers->empty() ? workers->front() : queue::WorkerInfo();
  }
  // The unit that failed, for good and at its first attempt.
  queue::UnitRecord failed(const std::string& id) {
    EXPECT_TRUE(reaches(id, State::kFailed));
    const auto record = job(id);
    EXPECT_EQ(record.unit_records.at(0).attempt, 1) << "tried again";
    EXPECT_TRUE(record.unit_records.at(0).error.has_value());
    return record.unit_records.at(0);
  }
  // Until it is released; a test that fails meanwhile must not leave the worker waiting.
  struct AtEnd {
    std::atomic<bool>& flag;
    ~AtEnd() { flag = true; }
  };
  void hold_prefetch(std::atomic<bool>& released) {
    script_->on_event = [&released](const std::string& event) -> std::optional<Error> {
      while (event.starts_with("prefetch") && !released) std::this_thread::sleep_for(1ms);
      return std::nullopt;
    };
  }
  std::size_t files() const {
    std::error_code ec;
    return static_cast<std::size_t>(
        std::distance(fs::directory_iterator(adapters_.cache_dir, ec), fs::directory_iterator()));
  }

  TemporaryFolder folder_;
  loras::Registry registry_{connection_};
};

TEST_F(WorkerAdapters, AreBroughtWhileAnotherUnitDenoises) {
  // The device is busy with the first until the second is ready for it; not for ever, should that never be.
  script_->on_event = [script = script_.get(), until = std::chrono::steady_clock::now() +
                                                       20s](const std::string& event) -> std::optional<Error> {
    while (event == "step 1/1" && script->index_of("text 2") < 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(1ms);
    return std::nullopt;
  };
  const std::string style = add("style", "STYLE" + std::string(2'500'000, 's'));
  auto worker = start_ready_worker();
  EXPECT_EQ(told().adapter_slots, 2);
  EXPECT_EQ(told().host_adapter_bytes, 1 << 20);
  const std::string first = ready(spec(1)), second = ready(with(spec(2), "style", style, 0.5));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(reaches(second, State::kSucceeded));
  EXPECT_EQ(job(first).state, State::kSucceeded);
  const std::string prefetch = "prefetch STYLE" + std::string(35, 's');
  ASSERT_TRUE(logged(prefetch));
  EXPECT_LT(script_->index_of(prefetch), script_->index_of("step 1/2"));
  EXPECT_LT(script_->index_of(prefetch), script_->index_of("text 2"));
  EXPECT_LT(script_->index_of("text 2"), script_->index_of("step 1/2"));
  EXPECT_TRUE(job(second).unit_records.at(0).phases_us.contains("adapter"));
  EXPECT_FALSE(job(first).unit_records.at(0).phases_us.contains("adapter"));
  // What the router is told.
  EXPECT_TRUE(until([&] { return told().adapters == std::vector{style}; }));
  EXPECT_EQ(told().host_adapters, std::vector{style});
  EXPECT_GT(told().adapter_load_bytes_per_s, 0);
  EXPECT_EQ(files(), 1u);
}

// In the model, which copies it to the device. Only the unit that needs it is charged an attempt.
TEST_F(WorkerAdapters, OneThatHangsEndsTheProcess) {
  const std::string style = add("style", "STYLE");
  auto options = service_options();
  options.stuck = 100ms;
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  HeldEvent hang(*script_, "prefetch STYLE");
  const std::string first = ready(with(spec(1), "style", style)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  ASSERT_TRUE(until([&] { return hang.reached(); }));
  assign(second, 0, worker->owner());
  EXPECT_EQ(worker->join(), 1);
  EXPECT_TRUE(worker->busy()) << "the process must not wait for the thread";
  const auto events = wait(client_->events(first, "0", 100, soon()));
  EXPECT_EQ(events->back().type, "ready");
  EXPECT_EQ(events->back().fields.at("crashes"), "1");
  EXPECT_THAT(job(first).unit_records.at(0).error->message,
              ::testing::AllOf(::testing::StartsWith("[worker] loading the adapters of class demo/"),
                               ::testing::HasSubstr(" made no progress for ")));
  EXPECT_NE(job(second).state, State::kFailed);
  EXPECT_EQ(redis({"ZCARD", "df:{0}:lease"}).integer, 0);
}

TEST_F(WorkerAdapters, ResidenceIsToldAsSoonAsItChanges) {
  auto options = service_options();
  options.heartbeat = 60s;
  const std::string style = add("style", "a style");
  auto worker = start_worker(options);
  ASSERT_TRUE(until([&] { return worker_state("w1") == "ready"; }));
  const std::string id = ready(with(spec(1), "style", style));
  assign(id, 0, worker->owner());
  EXPECT_TRUE(until([&] { return told().adapters == std::vector{style}; }));
}

TEST_F(WorkerAdapters, TheSchedulersHintsReachTheModel) {
  const std::string style = add("style", "a style");
  auto worker = start_ready_worker();
  const std::string id = ready(with(spec(1), "style", style));
  const queue::AssignRequest request{{id, 0}, new_nonce(), "warm", {"h1", "h2"}, {"s1", "h1"}};
  ASSERT_TRUE(wait(client_->assign(epoch_, worker->owner(), std::span(&request, 1), soon())).ok());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_TRUE(logged("prefetch a style drop from host h1 h2 drop from slots s1 h1"));
}

TEST_F(WorkerAdapters, TheModelIsToldWhatIsPinned) {
  const std::string style = add("style", "a style"), other = add("other", "another style");
  auto worker = start_ready_worker();
  const auto pinned = [&] {
    const std::lock_guard lock(script_->mutex);
    return script_->pinned;
  };
  ASSERT_TRUE(wait(registry_.set_pinned("default", "style", true, soon())).ok());
  for (const auto& [seed, name, sha256] : {std::tuple(1, "style", style), std::tuple(2, "other", other)}) {
    const std::string id = ready(with(spec(seed), name, sha256));
    assign(id, 0, worker->owner());
    ASSERT_TRUE(reaches(id, State::kSucceeded));
    EXPECT_EQ(pinned(), std::set<std::string>{style}) << name;
  }
  // Also while nobody uses them.
  ASSERT_TRUE(wait(registry_.set_pinned("default", "other", true, soon())).ok());
  ASSERT_TRUE(wait(registry_.set_pinned("default", "style", false, soon())).ok());
  EXPECT_TRUE(until([&] { return pinned() == std::set<std::string>{other}; }));
}

TEST_F(WorkerAdapters, AUnitThatWaitsForItsAdapterIsPassed) {
  std::atomic<bool> released{false};
  hold_prefetch(released);
  const std::string slow = add("slow", "a large one");
  auto worker = start_ready_worker();
  const AtEnd release{released};
  const std::string first = ready(with(spec(1), "slow", slow)), second = ready(spec(2));
  assign(first, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("prefetch a large one"); }));
  assign(second, 0, worker->owner());
  EXPECT_TRUE(reaches(second, State::kSucceeded)) << "its text is encoded on another thread than adapters are read on";
  EXPECT_EQ(job(first).state, State::kAssigned);
  released = true;
  EXPECT_TRUE(reaches(first, State::kSucceeded));
}

TEST_F(WorkerAdapters, ARevokedUnitsAdapterIsLoadedForNobody) {
  std::atomic<bool> released{false};
  hold_prefetch(released);
  const std::string style = add("style", "a style");
  auto worker = start_ready_worker();
  const AtEnd release{released};
  const std::string id = ready(with(spec(1), "style", style));
  const auto attempt = assign(id, 0, worker->owner());
  ASSERT_TRUE(until([&] { return logged("prefetch a style"); }));
  ASSERT_TRUE(wait(client_->revoke(epoch_, std::span(&attempt, 1), soon())).ok());
  EXPECT_TRUE(until([&] { return told().units.empty(); }));
  released = true;
  EXPECT_TRUE(until([&] { return told().adapters == std::vector{style}; }))
      << "it is there now, for whoever comes next";
  EXPECT_FALSE(logged("text 1"));
  EXPECT_EQ(job(id).state, State::kReady);
}

TEST_F(WorkerAdapters, OneThatWasDeletedFailsItsOwnJobAlone) {
  script_->step_ms = 50;
  const std::string gone = add("gone", "it was here"), style = add("style", "a style");
  auto worker = start_ready_worker();
  // Once it was used: the copies on the way must not be drawn with.
  const std::string before = ready(with(spec(1), "gone", gone));
  assign(before, 0, worker->owner());
  ASSERT_TRUE(reaches(before, State::kSucceeded));
  const std::string queued = ready(with(spec(2), "gone", gone)), other = ready(with(spec(3), "style", style));
  ASSERT_TRUE(wait(registry_.remove("default", "gone", soon())).ok());
  assign(other, 0, worker->owner());
  assign(queued, 0, worker->owner());
  const auto unit = failed(queued);
  EXPECT_EQ(unit.error->code, Code::kNotFound);
  EXPECT_EQ(unit.error->param, "loras");
  EXPECT_THAT(unit.error->message, ::testing::HasSubstr("'gone': it was deleted after the job was submitted"));
  EXPECT_TRUE(reaches(other, State::kSucceeded));
  EXPECT_TRUE(logged("forget " + gone));
  EXPECT_TRUE(until([&] { return files() == 1; })) << "its copy stays on the disk";
}

TEST_F(WorkerAdapters, WhatIsDeletedIsForgottenWithoutBeingAskedFor) {
  const std::string gone = add("gone", "it was here");
  auto worker = start_ready_worker();
  const std::string id = ready(with(spec(1), "gone", gone));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  ASSERT_TRUE(until([&] { return told().adapters == std::vector{gone}; }));
  ASSERT_TRUE(wait(registry_.remove("default", "gone", soon())).ok());
  EXPECT_TRUE(until([&] { return told().adapters.empty() && files() == 0; }));
}

TEST_F(WorkerAdapters, CopiesThatAProcessBeforeLeftGoWithTheirNames) {
  const std::string kept = add("kept", "still there");
  fs::create_directories(adapters_.cache_dir);
  for (const auto& sha256 : {kept, sha256_hex("deleted long ago")})
    std::ofstream(fs::path(adapters_.cache_dir) / (sha256 + ".safetensors")) << "still there";
  auto worker = start_ready_worker();
  EXPECT_TRUE(until([&] { return files() == 1; }));
  EXPECT_TRUE(fs::exists(fs::path(adapters_.cache_dir) / (kept + ".safetensors")));
}

TEST_F(WorkerAdapters, ARegisteredFileIsReadWhereItLies) {
  const std::string style = add_file("style", adapters_.folders[0] + "/style.safetensors", "a file's style");
  auto worker = start_ready_worker();
  const std::string id = ready(with(spec(1), "style", style));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_TRUE(logged("prefetch a file's style"));
}

TEST_F(WorkerAdapters, AFileThatChangedIsRefused) {
  const fs::path path = adapters_.folders[0] + "/style.safetensors";
  const std::string style = add_file("style", path, "a file's style");
  std::ofstream(path) << "another  style";  // of the same length
  auto worker = start_ready_worker();
  const std::string id = ready(with(spec(1), "style", style)), other = ready(spec(2));
  assign(id, 0, worker->owner());
  assign(other, 0, worker->owner());
  const auto unit = failed(id);
  EXPECT_EQ(unit.error->code, Code::kDataCorrupt);
  EXPECT_THAT(unit.error->message,
              ::testing::AllOf(::testing::HasSubstr("has changed since it was registered"),
                               ::testing::HasSubstr(sha256_hex("another  style")), ::testing::HasSubstr(style)));
  EXPECT_TRUE(reaches(other, State::kSucceeded));
  EXPECT_EQ(files(), 0u);
}

TEST_F(WorkerAdapters, AMessageNamesNoOtherTenantsAdapterOrFile) {
  const std::string path = adapters_.folders[0] + "/plan-b.safetensors", style = add_file("plan-b", path, "a style");
  fs::remove(path);
  add("mine", "a style", adapters_.folders[0] + "/mine.safetensors", "bob");
  auto worker = start_ready_worker();
  // Both wait for one fetch.
  const std::string first = ready(with(spec(1), "plan-b", style)), second = ready(with(spec(2), "mine", style));
  const queue::AssignRequest requests[] = {{{first, 0}, new_nonce(), "warm", {}, {}},
                                           {{second, 0}, new_nonce(), "warm", {}, {}}};
  ASSERT_TRUE(wait(client_->assign(epoch_, worker->owner(), requests, soon())).ok());
  EXPECT_THAT(failed(first).error->message,
              ::testing::HasSubstr("'plan-b': its file cannot be read on this worker: No such file"));
  EXPECT_THAT(failed(second).error->message,
              ::testing::HasSubstr("'mine': its file cannot be read on this worker: No such file"));
}

TEST_F(WorkerAdapters, AFileOutsideTheFoldersIsRefusedHoweverItIsReached) {
  const fs::path outside = folder_.path() + "/secret.safetensors", link = adapters_.folders[0] + "/link.safetensors",
                 dotted = adapters_.folders[0] + "/../secret.safetensors", beside = adapters_.folders[0] + "-2";
  fs::create_directories(beside);
  auto worker = start_ready_worker();
  std::int64_t seed = 0;
  fs::create_symlink(outside, link);
  for (const fs::path& path : {outside, link, dotted, beside / "near.safetensors"}) {
    std::ofstream(path) << "one secret";
    const std::string sha256 = add("it", "one secret", path);
    const std::string id = ready(with(spec(++seed), "it", sha256));
    assign(id, 0, worker->owner());
    const auto unit = failed(id);
    EXPECT_EQ(unit.error->code, Code::kPermissionDenied) << path << ": " << unit.error->message;
    EXPECT_THAT(unit.error->message, ::testing::HasSubstr("outside the folders that this worker reads adapters from: " +
                                                          adapters_.folders[0]));
  }
  EXPECT_EQ(files(), 0u);
}

TEST_F(WorkerAdapters, WhatTheEngineRefusesEndsThatUnitForGood) {
  script_->step_ms = 20;
  const std::string wide = add("wide", "wide"), style = add("style", "a style");
  script_->on_event = [](const std::string& event) -> std::optional<Error> {
    if (event == "prefetch wide")
      return invalid_argument("'PATH': transformer_blocks.0.attn.to_q has rank 300; a slot takes 64", "loras");
    if (event == "text 3") return Error{Code::kDataCorrupt, "the adapter holds NaN", "loras"};
    return std::nullopt;
  };
  auto worker = start_ready_worker();
  const std::string other = ready(spec(1)), bad = ready(with(spec(2), "wide", wide));
  assign(other, 0, worker->owner());
  assign(bad, 0, worker->owner());
  const auto unit = failed(bad);
  EXPECT_EQ(unit.error->message, "'wide': transformer_blocks.0.attn.to_q has rank 300; a slot takes 64");
  EXPECT_EQ(unit.error->param, "loras");
  EXPECT_TRUE(reaches(other, State::kSucceeded));
  const std::string late = ready(with(spec(3), "style", style));
  assign(late, 0, worker->owner());
  EXPECT_EQ(failed(late).error->message, "the adapter holds NaN");
}

TEST_F(WorkerAdapters, TwoUnitsThatNeedOneAdapterFetchItOnce) {
  const auto fetched = [] {
    const std::string metrics = telemetry::render_metrics(),
                      name = "ditfleet_lora_fetched_bytes_total{source=\"redis\"} ";
    const auto at = metrics.find(name);
    return at == std::string::npos ? 0.0 : std::stod(metrics.substr(at + name.size()));
  };
  const double before = fetched();
  const std::string style = add("style", std::string(3'000'000, 's'));
  auto worker = start_ready_worker();
  const std::string first = ready(with(spec(1), "style", style)), second = ready(with(spec(2), "style", style));
  assign(first, 0, worker->owner());
  assign(second, 0, worker->owner());
  ASSERT_TRUE(reaches(first, State::kSucceeded));
  ASSERT_TRUE(reaches(second, State::kSucceeded));
  EXPECT_EQ(fetched() - before, 3'000'000);
}

TEST_F(WorkerAdapters, OneThatARequestNamesTwiceIsLoadedOnce) {
  const auto loads = [](const std::string& tier) {
    const std::string metrics = telemetry::render_metrics(),
                      name = "ditfleet_lora_loads_total{result=\"ok\",tier=\"" + tier + "\"} ";
    const auto at = metrics.find(name);
    return at == std::string::npos ? 0.0 : std::stod(metrics.substr(at + name.size()));
  };
  const double disk = loads("disk"), source = loads("source"), slot = loads("slot");
  const std::string style = add("style", std::string(3'000'000, 't'));
  auto worker = start_ready_worker();
  const std::string id = ready(with(with(spec(1), "style", style), "style", style, 0.5));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_EQ(loads("source") - source, 1);
  EXPECT_EQ(loads("disk") - disk, 0);
  EXPECT_EQ(loads("slot") - slot, 1);
}

TEST_F(WorkerAdapters, ACopyThatWasDamagedIsFetchedAgain) {
  const std::string style = add("style", "a style");
  fs::create_directories(adapters_.cache_dir);
  std::ofstream(fs::path(adapters_.cache_dir) / (style + ".safetensors")) << "a trick";
  auto worker = start_ready_worker();
  const std::string id = ready(with(spec(1), "style", style));
  assign(id, 0, worker->owner());
  ASSERT_TRUE(reaches(id, State::kSucceeded));
  EXPECT_TRUE(logged("prefetch a style"));
  EXPECT_FALSE(logged("prefetch a trick"));
}

TEST_F(WorkerAdapters, BytesInRedisThatAreNotWhatWasUploadedAreRefused) {
  const std::string style = add("style", "a style");
  const auto keys = redis({"KEYS", "df:{lora}:chunk:*"});
  ASSERT_EQ(keys.elements.size(), 1u);
  redis({"SET", keys.elements[0].text, "a trick"});
  auto worker = start_ready_worker();
  const std::string id = ready(with(spec(1), "style", style));
  assign(id, 0, worker->owner());
  const auto unit = failed(id);
  EXPECT_EQ(unit.error->code, Code::kDataCorrupt);
  EXPECT_THAT(unit.error->message, ::testing::HasSubstr("Redis does not have the bytes that were uploaded"));
}

TEST_F(WorkerAdapters, ASpecWithoutDigestsIsRefused) {
  auto worker = start_ready_worker();
  auto bare = spec(1);
  bare.loras.push_back({"style", 1.0, {}});
  const std::string id = ready(bare);
  assign(id, 0, worker->owner());
  EXPECT_EQ(failed(id).error->code, Code::kInvalidArgument);
}

}  // namespace
}  // namespace ditfleet::testing
