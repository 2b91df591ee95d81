// Attention that writes where it is told, on a GPU: against LibTorch's, and its plans in the kernel cache.
#include "pipeline/region/libraries/direct_attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>

#include "pipeline/region/compile/gpu_module.h"
#include "shared/kernel_cache/cache.h"
#include "tests/parity/region_fixture.h"

namespace ditfleet::region {
namespace {

class RegionParityAttention : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device().is_cpu()) GTEST_SKIP() << "cuDNN needs a GPU";
    arch_ = pipeline::unwrap(gpu_architecture(0));
  }
  std::shared_ptr<const DirectAttention> make(std::shared_ptr<kernel_cache::KernelCache> cache) const {
    return make_direct_attention(0, arch_, AttentionBackend::kCudnn, std::move(cache));
  }
  // Those that this machine has, and the table of all.
  std::vector<std::shared_ptr<const DirectAttention>> all() const {
    std::vector<std::shared_ptr<const DirectAttention>> made{
        make(make_memory_cache()), make_flash_attention(),
        make_direct_attention(0, arch_, AttentionBackend::kAuto, make_memory_cache())};
    if (auto flash3 = open_flash3(); flash3 && arch_.starts_with("sm_90")) made.push_back(*flash3);
    return made;
  }

  // q, k and v as columns of one matrix of rows `apart` elements apart, as a product leaves them.
  struct Operands {
    at::Tensor q, k, v;
  };
  static Operands columns(std::int64_t batch, std::int64_t tokens, std::int64_t heads, std::int64_t size,
                          std::int64_t apart) {
    const at::Tensor all =
        at::randn({batch, tokens, apart}, at::TensorOptions(c10::ScalarType::BFloat16).device(device()));
    const auto part = [&](std::int64_t i) {
      return all.narrow(2, i * heads * size, heads * size).view({batch, tokens, heads, size});
    };
    return {part(0), part(1), part(2)};
  }

  const c10::InferenceMode inference_{true};
  std::string arch_;
};

struct Case {
  std::int64_t batch, tokens, heads, size, beside;
};
constexpr Case kCases[] = {{1, 77, 3, 64, 0}, {2, 333, 2, 128, 64}, {1, 1536, 4, 128, 512}, {1, 16, 1, 32, 8}};

TEST_F(RegionParityAttention, WritesWhereItIsToldAndNowhereElse) {
  const auto libraries = all();
  for (const auto& direct : libraries)
    for (const auto& [batch, tokens, heads, size, beside] : kCases) {
      SCOPED_TRACE(direct->name());
      const auto [q, k, v] = columns(batch, tokens, heads, size, 3 * heads * size + beside);
      const at::Tensor wide = at::full({batch, tokens, beside + heads * size + 8}, 7, q.options());
      const at::Tensor out = wide.narrow(2, beside, heads * size).view({batch, tokens, heads, size});
      ASSERT_TRUE(direct->run(q, k, v, out)) << tokens;
      const auto exact = attend(q.to(c10::ScalarType::Double), k.to(c10::ScalarType::Double),
                                v.to(c10::ScalarType::Double), AttentionBackend::kMath);
      const auto theirs = attend(q, k, v, AttentionBackend::kAuto);
      EXPECT_LE(testing::relative_error(out, exact), 1.1 * testing::relative_error(theirs, exact)) << tokens;
      EXPECT_TRUE(wide.narrow(2, 0, beside).eq(7).all().item<bool>()) << tokens;
      EXPECT_TRUE(wide.narrow(2, beside + heads * size, 8).eq(7).all().item<bool>()) << tokens;
    }
}

// Keys and values of another length than the queries, read where a product left them.
TEST_F(RegionParityAttention, KeysMayHaveAnotherLength) {
  const auto libraries = all();
  for (const auto& direct : libraries)
    for (const auto& [queries, keys] : {std::pair(333, 77), std::pair(64, 512), std::pair(1, 40)}) {
      SCOPED_TRACE(direct->name());
      const auto [q, unused_k, unused_v] = columns(2, queries, 3, 64, 3 * 3 * 64);
      const auto [unused_q, k, v] = columns(2, keys, 3, 64, 3 * 3 * 64);
      const at::Tensor out = at::empty(q.sizes(), q.options());
      ASSERT_TRUE(direct->run(q, k, v, out)) << queries << " on " << keys;
      const auto exact = attend(q.to(c10::ScalarType::Double), k.to(c10::ScalarType::Double),
                                v.to(c10::ScalarType::Double), AttentionBackend::kMath);
      const auto theirs = attend(q, k, v, AttentionBackend::kAuto);
      EXPECT_LE(testing::relative_error(out, exact), 1.1 * testing::relative_error(theirs, exact))
          << queries << " on " << keys;
    }
}

// What one has planned, another finds: the same bytes come out, and nothing is made a second time.
TEST_F(RegionParityAttention, PlansAreShared) {
  const std::shared_ptr<kernel_cache::KernelCache> cache = make_memory_cache();
  const auto first = make(cache), second = make(cache);
  const auto [q, k, v] = columns(1, 209, 3, 64, 3 * 3 * 64);
  const at::Tensor a = at::full(q.sizes(), 0, q.options().memory_format(c10::MemoryFormat::Contiguous)),
                   b = at::full_like(a, 1);
  ASSERT_TRUE(first->run(q, k, v, a));
  ASSERT_EQ(cache->counts().compiles, 1u);
  ASSERT_TRUE(second->run(q, k, v, b));
  EXPECT_EQ(cache->counts().compiles, 1u);
  EXPECT_EQ(cache->counts().memory_hits, 1u);
  EXPECT_TRUE(a.equal(b));
}

// A plan that is expected is made once, beside whoever is at work; who needs it meanwhile waits for it, and the bytes
// are the same.
TEST_F(RegionParityAttention, ExpectedPlansAreMadeMeanwhile) {
  const std::shared_ptr<kernel_cache::KernelCache> cache = make_memory_cache();
  const auto direct = make(cache), other = make(make_memory_cache());
  const auto [q, k, v] = columns(1, 311, 3, 64, 3 * 3 * 64);
  const at::Tensor a = at::full(q.sizes(), 0, q.options().memory_format(c10::MemoryFormat::Contiguous)),
                   b = at::full_like(a, 1);
  const AttentionShape shape = attention_shape(q, k, v, a);
  direct->prewarm(shape);  // the library is not open: nothing happens
  const auto [q2, k2, v2] = columns(1, 40, 3, 64, 3 * 3 * 64);
  const at::Tensor small = at::full(q2.sizes(), 0, a.options());
  ASSERT_TRUE(direct->run(q2, k2, v2, small));
  ASSERT_EQ(cache->counts().compiles, 1u);
  direct->prewarm(shape);
  direct->prewarm(shape);
  ASSERT_TRUE(direct->run(q2, k2, v2, small));  // of a shape that is known: waits for nothing
  ASSERT_TRUE(direct->run(q, k, v, a));
  EXPECT_EQ(cache->counts().compiles, 2u);
  ASSERT_TRUE(other->run(q, k, v, b));
  EXPECT_TRUE(a.equal(b));
}

// Rows that begin at odd places, and heads of an odd size: LibTorch's kernels are given copies.
TEST_F(RegionParityAttention, AnyPlaceAndSizeIsRight) {
  for (const auto& [size, apart] : {std::pair(64, 3 * 2 * 64 + 4), {12, 3 * 2 * 12}})
    for (const auto& direct : all()) {
      SCOPED_TRACE(direct->name() + " heads of " + std::to_string(size));
      const auto [q, k, v] = columns(1, 300, 2, size, apart);
      at::Tensor out = at::full(q.sizes(), 7, q.options());
      if (!direct->run(q, k, v, out)) {
        EXPECT_TRUE(out.eq(7).all().item<bool>());
        out = attend(q, k, v, AttentionBackend::kAuto);
      }
      const auto exact = attend(q.to(c10::ScalarType::Double), k.to(c10::ScalarType::Double),
                                v.to(c10::ScalarType::Double), AttentionBackend::kMath);
      EXPECT_LE(testing::relative_error(out, exact), 1e-2);
    }
}

TEST_F(RegionParityAttention, LeavesAloneWhatItCannotDo) {
  const auto [q, k, v] = columns(1, 32, 2, 64, 3 * 2 * 64 + 4);  // rows that begin at odd places
  const at::Tensor exact = at::randn({1, 32, 2, 64}, q.options().dtype(c10::ScalarType::Float));
  const at::Tensor frames = at::randn({1, 5, 32, 2, 64}, q.options());
  for (const auto& direct : all()) {
    SCOPED_TRACE(direct->name());
    const bool copies = direct->name() == "flash" || direct->name() == "auto";
    EXPECT_EQ(direct->run(q, k, v, at::full(q.sizes(), 0, q.options())), copies);
    EXPECT_FALSE(direct->run(exact, exact, exact, at::full_like(exact, 0)));
    EXPECT_FALSE(direct->run(frames, frames, frames, at::full_like(frames, 0)));
  }
  EXPECT_EQ(make_direct_attention(0, arch_, AttentionBackend::kFlash, make_memory_cache()), nullptr);
}

}  // namespace
}  // namespace ditfleet::region
