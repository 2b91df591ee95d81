// Which attention library runs: measured once for a range of lengths, shared through the kernel cache, and the next one
// if the chosen one cannot. With libraries and a clock that the test provides.
#include "pipeline/region/libraries/attention_table.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <fstream>

#include "pipeline/region/compile/cached.h"
#include "tests/system/temporary_folder.h"

namespace ditfleet::region {
namespace {

struct Calls {
  int run = 0, prewarmed = 0;
};

class Fake : public DirectAttention {
 public:
  Fake(std::string name, Calls* calls, bool able) : name_(std::move(name)), calls_(calls), able_(able) {}
  std::string name() const override { return name_; }
  bool run(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
           const at::Tensor&) const override {
    if (able_) ++calls_->run;
    return able_;
  }
  void prewarm(const AttentionShape&) const override { ++calls_->prewarmed; }

 private:
  const std::string name_;
  Calls* const calls_;
  const bool able_;
};

class AttentionTableTest : public ::testing::Test {
 protected:
  // `wins`: the index that the clock finds fastest.
  std::unique_ptr<AttentionTable> table(std::size_t wins, std::vector<bool> able = {true, true},
                                        std::vector<std::string> names = {"a", "b"}, GpuIdentity gpu = {"G", 1, 1}) {
    AttentionTable::Libraries all;
    for (std::size_t i = 0; i < able.size(); ++i)
      all.push_back(std::make_shared<const Fake>(names[i], &calls_[i], able[i]));
    return std::make_unique<AttentionTable>(
        gpu, "sm_90a", cache_, [all] { return all; },
        AttentionTimer{.room = [this](std::uint64_t) { return room_; },
                       .fastest =
                           [this, wins](std::size_t candidates, const auto& start) {
                             for (std::size_t i = 0; i < candidates; ++i) start(i);
                             ++timed_;
                             return std::optional(wins);
                           }});
  }
  // The library that runs a call of these lengths after any measurement.
  int runs(const AttentionTable& table, std::int64_t tokens, std::int64_t keys) {
    const at::Tensor q = at::empty({1, tokens, 2, 8}), k = at::empty({1, keys, 2, 8});
    if (!table.run(q, k, k, q, {})) return -1;
    const std::array<int, 2> before{calls_[0].run, calls_[1].run};
    table.run(q, k, k, q, {});
    return calls_[1].run > before[1] ? 1 : calls_[0].run > before[0] ? 0 : -1;
  }

  const std::shared_ptr<kernel_cache::KernelCache> cache_ = make_memory_cache();
  std::array<Calls, 2> calls_;
  int timed_ = 0;
  bool room_ = true;
};

TEST_F(AttentionTableTest, ChoosesTheFastestOncePerRangeOfLengths) {
  const auto one = table(1);
  EXPECT_EQ(runs(*one, 300, 300), 1);
  EXPECT_EQ(timed_, 1);
  EXPECT_EQ(runs(*one, 511, 256), 1);
  EXPECT_EQ(timed_, 1) << "the same powers of two";
  EXPECT_EQ(runs(*one, 512, 300), 1);
  EXPECT_EQ(timed_, 2);
  EXPECT_EQ(runs(*one, 300, 600), 1);
  EXPECT_EQ(timed_, 3);
}

TEST_F(AttentionTableTest, EqualGpusShareAChoiceAndOthersDoNot) {
  EXPECT_EQ(runs(*table(1), 300, 300), 1);
  EXPECT_EQ(runs(*table(0), 300, 300), 1) << "found in the cache";
  EXPECT_EQ(timed_, 1);
  EXPECT_EQ(runs(*table(0, {true, true}, {"a", "b"}, {"G", 2, 1}), 300, 300), 0) << "another GPU";
  EXPECT_EQ(runs(*table(0, {true, true}, {"a", "b 2"}), 300, 300), 0) << "another version";
  EXPECT_EQ(timed_, 3);
}

TEST_F(AttentionTableTest, TheNextLibraryRunsIfTheChosenOneCannot) {
  EXPECT_EQ(runs(*table(1), 300, 300), 1);
  EXPECT_EQ(runs(*table(1, {true, false}), 300, 300), 0);
  EXPECT_EQ(runs(*table(0, {false, true}), 300, 600), 1) << "only one can: nothing to time";
  EXPECT_EQ(timed_, 1);
  EXPECT_EQ(runs(*table(0, {false, false}), 300, 300), -1);
}

TEST_F(AttentionTableTest, ShortLengthsAndNoMemoryTakeTheFirstOne) {
  const auto one = table(1);
  EXPECT_EQ(runs(*one, 255, 4096), 0);
  room_ = false;
  EXPECT_EQ(runs(*one, 300, 300), 0);
  EXPECT_EQ(timed_, 0);
  room_ = true;
  EXPECT_EQ(runs(*table(1), 300, 300), 1);
  room_ = false;
  EXPECT_EQ(runs(*table(0), 300, 300), 1) << "found in the cache, which needs no memory";
}

TEST_F(AttentionTableTest, PrewarmsTheChosenLibraryOnly) {
  AttentionShape shape{.batch = 1, .tokens = 300, .key_tokens = 300, .heads = 2, .head_dim = 8};
  auto one = table(1);
  one->prewarm(shape);
  one.reset();  // waits
  EXPECT_EQ(calls_[0].prewarmed, 1);
  EXPECT_EQ(calls_[1].prewarmed, 1);
  one = table(1);
  runs(*one, 300, 300);
  one = table(1);
  one->prewarm(shape);  // found in the cache
  one.reset();
  EXPECT_EQ(calls_[0].prewarmed, 1);
  EXPECT_EQ(calls_[1].prewarmed, 2);
}

TEST(Flash3, AnotherFileIsRefusedBeforeItIsLoaded) {
  const ditfleet::testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/_C.abi3.so";
  ::setenv("DITFLEET_FA3", path.c_str(), 1);
  const auto missing = open_flash3();
  std::ofstream(path) << "not a library";
  const auto other = open_flash3();
  ::unsetenv("DITFLEET_FA3");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kUnavailable);
  EXPECT_NE(missing.error().message.find(path), std::string::npos) << missing.error().message;
  EXPECT_NE(missing.error().message.find("ditfleet-worker-setup --fa3"), std::string::npos);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Code::kUnavailable);
  EXPECT_NE(other.error().message.find("has SHA-256"), std::string::npos) << other.error().message;
}

}  // namespace
}  // namespace ditfleet::region
