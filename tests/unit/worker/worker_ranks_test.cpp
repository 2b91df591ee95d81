// What ranks tell each other, and which requests one GPU gets.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include "worker/ranks/degrees.h"
#include "worker/ranks/messages.h"
#include "worker/ranks/pulse.h"

namespace ditfleet::worker {
namespace {

// Through a socket, as between processes.
Message sent(const Message& message) {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const UniqueFd first(ends[0]), second(ends[1]);
  EXPECT_TRUE(send_message(first.get(), message));
  auto received = receive_message(second.get());
  EXPECT_TRUE(received);
  return received ? std::move(*received) : Message();
}

TEST(RankMessages, CarryRequestsWithAllTheirBits) {
  pipeline::GenerationRequest request;
  request.prompt = std::string("zero \0 and \xff are bytes", 22);
  request.seed = std::numeric_limits<std::int64_t>::min();
  request.fields.set("width", std::int64_t{64});
  request.fields.set("guidance_scale", 0.1 + 0.2);
  request.fields.set("flow_shift", std::nextafter(1.0, 2.0));
  request.fields.set("negative_prompt", std::string("ärger"));
  request.loras = {{"/a/b.safetensors", -1.0 / 3, "id", job::Expert::kLow, "name"}};
  request.alone = true;
  pipeline::Media image{2, 1, 1, 0.1, {0, 255, 10, 13, 34, 92}};
  request.images = {std::make_shared<const pipeline::Media>(image), std::make_shared<const pipeline::Media>()};
  request.mask = request.images[0];
  request.number = 3;
  std::optional<pipeline::GenerationRequest> read(std::in_place);
  const Message message = sent({Call::kEncode, 2, 3, packed(request), 4});
  EXPECT_EQ(message.call, Call::kEncode);
  EXPECT_EQ(message.model, 2);
  EXPECT_EQ(message.generation, 3);
  EXPECT_EQ(message.id, 4);
  ASSERT_TRUE(unpack(message.bytes, *read));
  EXPECT_EQ(read->alone, true);
  EXPECT_EQ(read->prompt, request.prompt);
  EXPECT_EQ(read->seed, request.seed);
  EXPECT_EQ(read->fields, request.fields);
  ASSERT_EQ(read->loras.size(), 1u);
  EXPECT_EQ(read->loras[0].path, "/a/b.safetensors");
  EXPECT_EQ(read->loras[0].scale, -1.0 / 3);
  EXPECT_EQ(read->loras[0].expert, job::Expert::kLow);
  EXPECT_EQ(read->number, 3);
  ASSERT_EQ(read->images.size(), 2u);
  EXPECT_EQ(read->images[0]->rgb, image.rgb);
  EXPECT_EQ(read->images[0]->frame_rate, 0.1);
  EXPECT_TRUE(read->images[1]->rgb.empty());
  ASSERT_TRUE(read->mask);
  EXPECT_EQ(read->mask->rgb, image.rgb);
}

TEST(RankMessages, CarrySourcesDropsAndErrors) {
  const pipeline::ModelSource source{
      "m", "/d", {{"transformer", "/f"}}, {{"transformer", "nf4"}, {"text_encoder", "nf4"}}, "fp32", "fp8"};
  pipeline::ModelSource read;
  ASSERT_TRUE(unpack(packed(source), read));
  EXPECT_EQ(read.dir, source.dir);
  EXPECT_EQ(read.quantize, source.quantize);
  EXPECT_EQ(read.vae_dtype, source.vae_dtype);
  EXPECT_EQ(read.attention, source.attention);
  const pipeline::AdapterDrops drops{{"a", "b"}, {"c"}};
  std::vector<pipeline::LoraRequest> loras;
  pipeline::AdapterDrops read_drops;
  ASSERT_TRUE(unpack(packed(std::vector<pipeline::LoraRequest>(2), drops), loras, read_drops));
  EXPECT_EQ(loras.size(), 2u);
  EXPECT_EQ(read_drops.from_host, drops.from_host);
  EXPECT_EQ(read_drops.from_slots, drops.from_slots);
  std::optional<Error> error;
  ASSERT_TRUE(unpack(packed(std::optional(invalid_argument("wrong", "loras"))), error));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code, Code::kInvalidArgument);
  EXPECT_EQ(error->param, "loras");
  std::set<std::string> ids;
  ASSERT_TRUE(unpack(packed(std::set<std::string>{"x", ""}), ids));
  EXPECT_EQ(ids, (std::set<std::string>{"x", ""}));
}

TEST(RankMessages, ThatAreCutOffAreNoticed) {
  pipeline::GenerationRequest request;
  request.prompt = "a";
  request.loras = {{"/a"}};
  const std::string bytes = packed(request);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    pipeline::GenerationRequest read;
    EXPECT_FALSE(unpack(std::string_view(bytes).substr(0, size), read)) << size;
  }
}

TEST(RankMessages, EndWithTheOtherEnd) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const UniqueFd first(ends[0]);
  UniqueFd(ends[1]).reset();
  EXPECT_EQ(receive_message(first.get()).error().code, Code::kUnavailable);
  EXPECT_EQ(send_message(first.get(), {}).error().code, Code::kUnavailable);
}

pipeline::RequestSize size_with(int side, int gpus, int forwards = 1) {
  return {.width = side, .height = side, .text_tokens = 512, .forwards = forwards, .gpus = gpus};
}

TEST(Degrees, PickWhatWasFaster) {
  Degrees degrees;
  EXPECT_FALSE(degrees.one_is_faster(size_with(512, 2))) << "nothing is known, so all GPUs run";
  degrees.observe(size_with(512, 2), 0.10);
  degrees.observe(size_with(512, 1), 0.08);
  EXPECT_TRUE(degrees.one_is_faster(size_with(512, 2)));
  EXPECT_TRUE(degrees.one_is_faster(size_with(256, 2))) << "a smaller one gains even less from several GPUs";
  EXPECT_FALSE(degrees.one_is_faster(size_with(1024, 2)));
  degrees.observe(size_with(512, 2), 0.07);
  EXPECT_FALSE(degrees.one_is_faster(size_with(512, 2))) << "the shortest step counts";
}

TEST(Degrees, TellForwardsApart) {
  Degrees degrees;
  degrees.observe(size_with(512, 2, 1), 0.10);
  degrees.observe(size_with(512, 1, 1), 0.08);
  degrees.observe(size_with(512, 2, 2), 0.10);
  degrees.observe(size_with(512, 1, 2), 0.16);
  EXPECT_TRUE(degrees.one_is_faster(size_with(512, 2, 1)));
  EXPECT_FALSE(degrees.one_is_faster(size_with(512, 2, 2)));
  pipeline::RequestSize more_steps = size_with(512, 2, 2);
  more_steps.steps = 50;
  EXPECT_FALSE(degrees.one_is_faster(more_steps)) << "the number of steps does not matter to one step";
}

// As rank 0 of three sees them. `counts`: each rank's.
class Silence : public testing::Test {
 protected:
  // Ticks of rank 0, in each of which these ranks count too. The rank that was found first.
  std::optional<int> tick(int ticks, std::set<int> alive) {
    std::optional<int> found;
    for (; ticks > 0 && !found; --ticks) {
      ++counts_[0];
      for (const int rank : alive) ++counts_[static_cast<std::size_t>(rank)];
      found = ranks_.check(counts_);
    }
    return found;
  }
  static constexpr int kLimit = kSilent / kTick;
  std::array<TickCount, 3> counts_ = {};
  SilentRanks ranks_{0, 3};
};

TEST_F(Silence, ARankIsSilentWhenAnotherCountsWithoutIt) {
  EXPECT_EQ(tick(100, {1, 2}), std::nullopt);
  EXPECT_EQ(tick(kLimit - 1, {1}), std::nullopt);
  EXPECT_EQ(tick(1, {1, 2}), std::nullopt) << "just in time";
  EXPECT_EQ(tick(kLimit, {1}), 2);
  ranks_.forgive(2);
  EXPECT_EQ(tick(kLimit - 1, {1}), std::nullopt);
  EXPECT_EQ(tick(1, {1}), 2);
}

TEST_F(Silence, ARankThatHasNotBegunIsNotSilent) {
  EXPECT_EQ(tick(1000, {1}), std::nullopt);
  EXPECT_EQ(tick(1, {1, 2}), std::nullopt);
  EXPECT_EQ(tick(kLimit, {1}), 2);
}

}  // namespace
}  // namespace ditfleet::worker
