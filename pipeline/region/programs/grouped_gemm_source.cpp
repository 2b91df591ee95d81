#include "pipeline/region/programs/grouped_gemm_source.h"

namespace ditfleet::region {
namespace {

// Instructions and layouts: PTX ISA 9.0, "Asynchronous Warpgroup Level Matrix Instructions" and "cp.async.bulk.tensor";
// CUDA driver API, cuTensorMapEncodeTiled, for the swizzles.
constexpr int kConsumers = 3;  // warpgroups that multiply, 64 rows each; one more loads
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kStages = 4;       // steps in shared memory
constexpr int kOutBytes = 4096;  // a buffer of 64 x 32 results; each consumer has two

constexpr int kStageBytes = 2 * kGroupedGemmTile * kGroupedGemmStep * 2;
constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kConsumers * 2 * kOutBytes + 2 * kStages * 8;
static_assert(kSharedBytes <= 227 * 1024);

// d += a · bᵀ, 64 x 192 x 16, both from shared memory; with `add` 0 d = a · bᵀ.
std::string multiply() {
  constexpr int kRegisters = kGroupedGemmTile / 2;
  std::string names, operands;
  for (int i = 0; i < kRegisters; ++i) {
    names += (i ? ", %" : "%") + std::to_string(i);
    operands += (i ? ", \"+f\"(d[" : "\"+f\"(d[") + std::to_string(i) + "])";
  }
  const auto at = [](int i) { return "%" + std::to_string(kRegisters + i); };
  return "__device__ __forceinline__ void multiply(float (&d)[" + std::to_string(kRegisters) +
         "], u64 a, u64 b, int add) {\n  asm volatile(\"{\\n.reg .pred p;\\nsetp.ne.b32 p, " + at(2) +
         ", 0;\\nwgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" + names + "}, " + at(0) + ", " + at(1) +
         ", p, 1, 1, 0, 0;\\n}\\n\" : " + operands + " : \"l\"(a), \"l\"(b), \"r\"(add));\n}\n";
}

constexpr const char* kHead = R"(typedef unsigned long long u64;
typedef long long i64;
typedef unsigned u32;
struct __align__(64) Map { u64 words[16]; };
struct Args { Map x, weight, out; u64 bias; i64 rows, columns, steps, groups, own_steps, unused[2]; };
)";

// The barriers: full[s] when step s is in shared memory, empty[s] when the consumers of both blocks have read it, as a
// block's loads go to both. Arriving at the other block's barrier must not be a release at the scope of the cluster:
// that is a fence of all memory, which halves the speed. What it would order is ordered otherwise: the products have
// ended (wait_group) before.
constexpr const char* kText = R"(
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" :: "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ bool ready(u32 barrier, u32 parity) {  // the same answer in all of a warp
  u32 r;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n" : "=r"(r) : "r"(barrier), "r"(parity) : "memory");
  return __shfl_sync(0xffffffffu, r, 0);
}
__device__ __forceinline__ void arrive(u32 barrier, u32 block) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}\n" :: "r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void meet_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory"); }
// Rows of 128 bytes, swizzled, eight of them 1024 bytes.
__device__ __forceinline__ u64 matrix(u32 address) { return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)64 << 32) | ((u64)1 << 62); }
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// A cluster's tile: a pair of tiles one above the other, and which columns. In bands of kBand pairs, so that what runs at once shares rows and columns.
struct Tile { int pair, column; };
__device__ __forceinline__ Tile tile_of(int index, int pairs, int columns) {
  const int in_band = kBand * columns, band = index / in_band, rest = index - band * in_band, height = min(kBand, pairs - band * kBand), column = rest / height;
  return {band * kBand + rest - column * height, column};
}
// The steps behind the shared ones that a tile's outputs read.
struct Own { int first, count; };
__device__ __forceinline__ Own own_steps(const Args& a, int column) {
  const int run = (int)(a.columns / a.groups), each = (int)a.own_steps;
  const int first = column * kTile / run, last = min((column * kTile + kTile - 1) / run, (int)a.groups - 1);
  return {(int)a.steps + first * each, (last - first + 1) * each};
}

extern "C" __global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kThreads, 1) grouped_gemm(const __grid_constant__ Args a) {
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u, buffers = base + kStages * kStageBytes;
  const u32 full = buffers + kConsumers * 2 * kOutBytes, empty = full + 8 * kStages;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int group = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * s), "r"(kPair * kConsumers));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet_cluster();
  const int pairs = ((int)a.rows + kPair * kTile - 1) / (kPair * kTile), columns = ((int)a.columns + kTile - 1) / kTile;
  const int tiles = pairs * columns, clusters = gridDim.x / kPair;
  int stage = 0;
  u32 phase = 0;
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x == 0)
      for (int t = blockIdx.x / kPair; t < tiles; t += clusters) {
        const Tile tile = tile_of(t, pairs, columns);
        const Own own = own_steps(a, tile.column);
        for (int i = 0; i < (int)a.steps + own.count; ++i) {
          const int at = (i < (int)a.steps ? i : own.first + i - (int)a.steps) * kStep;
          wait(empty + 8 * stage, phase ^ 1);
          const u32 barrier = full + 8 * stage, x = base + stage * kStageBytes, weight = x + kTile * kStep * 2 + rank * (kTile / kPair * kStep * 2);
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(kStageBytes) : "memory");
          asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
            :: "r"(weight), "l"(&a.weight), "r"(at), "r"(tile.column * kTile + (int)rank * (kTile / kPair)), "r"(barrier), "h"((unsigned short)((1 << kPair) - 1)) : "memory");
          asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            :: "r"(x), "l"(&a.x), "r"(at), "r"((tile.pair * kPair + (int)rank) * kTile), "r"(barrier) : "memory");
          if (++stage == kStages) { stage = 0; phase ^= 1; }
        }
      }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    const int part = group - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const u32 own_buffers = buffers + part * 2 * kOutBytes, own_row = warp * 16 + (lane / 8 & 1) * 8 + lane % 8;
    float d[kTile / 2];
    for (int t = blockIdx.x / kPair; t < tiles; t += clusters) {
      const Tile tile = tile_of(t, pairs, columns);
      const int steps = (int)a.steps + own_steps(a, tile.column).count;
      int before = -1;  // the stage whose products may still run
      for (int i = 0; i < steps; ++i) {
        if (!ready(full + 8 * stage, phase)) {
          // Nothing to compute with: what has been read is given back at once, not a step later.
          asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
          if (before >= 0 && thread < kPair) arrive(empty + 8 * before, thread);
          before = -1;
          wait(full + 8 * stage, phase);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 x = matrix(base + stage * kStageBytes + part * 64 * kStep * 2), weight = matrix(base + stage * kStageBytes + kTile * kStep * 2);
#pragma unroll
        for (int k = 0; k < kStep / 16; ++k) multiply(d, x + 2 * k, weight + 2 * k, i > 0 || k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (before >= 0 && thread < kPair) arrive(empty + 8 * before, thread);
        before = stage;
        if (++stage == kStages) { stage = 0; phase ^= 1; }
      }
      u32 bias[kTile / 8];  // two columns each
#pragma unroll
      for (int b = 0; b < kTile / 8; ++b) {
        const int column = tile.column * kTile + b * 8 + lane % 4 * 2;
        bias[b] = 0;
        if (a.bias && column < (int)a.columns) asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(bias[b]) : "l"(a.bias + 2 * column));
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      if (thread < kPair) arrive(empty + 8 * before, thread);
      const int row = (tile.pair * kPair + (int)rank) * kTile + part * 64;
#pragma unroll
      for (int c = 0; c < kTile / 32; ++c) {
        const u32 buffer = own_buffers + (c & 1) * kOutBytes;
        if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          u32 r[4];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int b = c * 4 + j + h;
            const float low = __uint_as_float(bias[b] << 16), high = __uint_as_float(bias[b] & 0xffff0000u);
            r[2 * h] = pack(d[4 * b] + low, d[4 * b + 1] + high);
            r[2 * h + 1] = pack(d[4 * b + 2] + low, d[4 * b + 3] + high);
          }
          const u32 at = buffer + own_row * 64 + ((j + lane / 16 ^ (own_row >> 1 & 3)) << 4);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" :: "r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");
        if (thread == 0) {
          if (row < (int)a.rows)
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" :: "l"(&a.out), "r"(tile.column * kTile + c * 32), "r"(row), "r"(buffer) : "memory");
          asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
      }
    }
    if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  meet_cluster();  // nobody leaves while the other block may arrive at its barriers
}
)";

}  // namespace

FixedProgram grouped_gemm_program() {
  FixedProgram program{"grouped_gemm", {kHead, {}}};
  std::string& text = program.source.text;
  const auto constant = [&](const char* name, int value) {
    text += "constexpr int " + std::string(name) + " = " + std::to_string(value) + ";\n";
  };
  constant("kTile", kGroupedGemmTile);
  constant("kStep", kGroupedGemmStep);
  constant("kPair", kGroupedGemmPair);
  constant("kConsumers", kConsumers);
  constant("kThreads", kThreads);
  constant("kStages", kStages);
  constant("kStageBytes", kStageBytes);
  constant("kOutBytes", kOutBytes);
  constant("kBand", 6);
  text += multiply() + kText;
  program.source.kernels.push_back({.name = "grouped_gemm",
                                    .variants = false,
                                    .threads = kThreads,
                                    .rows_per_block = 1,
                                    .vector = 1,
                                    .argument_words = sizeof(GroupedGemmArgument) / 8,
                                    .shared_bytes = kSharedBytes});
  return program;
}

}  // namespace ditfleet::region
