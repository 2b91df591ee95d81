// Ranks as forked processes and what they do, for tests of pipeline/parallel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/parallel/group.h"

namespace ditfleet::pipeline::parallel::testing {

// What a rank does; returns what went wrong, or nothing.
using RankBody = std::function<std::string(int rank)>;

// A child process that runs `body` and exits with 0, or prints what went wrong and exits with 1.
inline pid_t fork_rank(int rank, const RankBody& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::string problem;
  try {
    problem = body(rank);
  } catch (const std::exception& e) {
    problem = e.what();
  }
  if (!problem.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, problem.c_str());
  ::_exit(problem.empty() ? 0 : 1);
}

inline void expect_exit(pid_t child, int wanted = 0) {
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == wanted) << "status " << status;
}

inline void run_processes(int size, const RankBody& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) children.push_back(fork_rank(rank, body));
  for (const pid_t child : children) expect_exit(child);
}

// The driver's number of GPUs. Asked in a child, since CUDA does not survive a fork.
inline int gpus() {
  const pid_t child = ::fork();
  if (child == 0) {
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW);
    auto init = driver ? reinterpret_cast<int (*)(unsigned)>(::dlsym(driver, "cuInit")) : nullptr;
    auto count = driver ? reinterpret_cast<int (*)(int*)>(::dlsym(driver, "cuDeviceGetCount")) : nullptr;
    int n = 0;
    ::_exit(init && count && init(0) == 0 && count(&n) == 0 ? n : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

// Bytes that only this message has.
inline at::Tensor message(std::int64_t bytes, unsigned seed) {
  at::Tensor t = at::empty({bytes}, at::kByte);
  std::minstd_rand random(seed + 1);
  for (std::int64_t i = 0; i < bytes; ++i) t.data_ptr<std::uint8_t>()[i] = static_cast<std::uint8_t>(random() >> 8);
  return t;
}

inline at::Tensor blank(std::int64_t bytes) {
  at::Tensor t = at::empty({bytes}, at::kByte);
  if (bytes) std::memset(t.data_ptr(), 0xa5, bytes);
  return t;
}

inline bool equal(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && (a.nbytes() == 0 || std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0);
}

// Waits until all ranks have called it; on a GPU, until the current stream has done its work.
inline Result<void> meet(Group& group, c10::Device device = at::kCPU) {
  std::vector<at::Tensor> tokens(static_cast<std::size_t>(group.size()));
  for (at::Tensor& token : tokens) token = blank(1).to(device);
  auto met = group.all_gather(tokens[static_cast<std::size_t>(group.rank())], tokens);
  if (met) synchronize(device);
  return met;
}

// `rounds` collectives of random kinds and sizes, of which each rank knows all sizes and contents. Returns
// what went wrong.
inline std::string play(Group& group, unsigned seed, int rounds, int largest, c10::Device device = at::kCPU) {
  std::minstd_rand random(seed + 1);
  const int n = group.size(), me = group.rank();
  for (int round = 0; round < rounds; ++round) {
    const auto seed_of = [&](int from, int to) { return static_cast<unsigned>((round * 64 + from) * 64 + to); };
    const auto size = [&] { return random() % 4 == 0 ? 0 : static_cast<std::int64_t>(random() % largest); };
    const unsigned kind = random() % 4;
    std::vector<std::int64_t> sizes(n * n);  // from row to column
    for (auto& s : sizes) s = size();
    std::vector<at::Tensor> send, receive, expected;
    Result<void> done;
    if (kind == 0) {
      for (int r = 0; r < n; ++r) {
        send.push_back(message(sizes[me * n + r], seed_of(me, r)).to(device));
        expected.push_back(message(sizes[r * n + me], seed_of(r, me)));
        receive.push_back(blank(sizes[r * n + me]).to(device));
      }
      done = group.all_to_all(send, receive);
    } else if (kind == 1) {
      for (int r = 0; r < n; ++r) {
        expected.push_back(message(sizes[r], seed_of(r, 0)));
        receive.push_back(blank(sizes[r]).to(device));
      }
      done = group.all_gather(message(sizes[me], seed_of(me, 0)).to(device), receive);
    } else if (kind == 2) {
      const int root = static_cast<int>(random() % n);
      expected.push_back(message(sizes[0], seed_of(root, 0)));
      receive.push_back((root == me ? expected[0].clone() : blank(sizes[0])).to(device));
      done = group.broadcast(receive[0], root);
    } else {
      done = meet(group, device);
    }
    if (!done) return done.error().message;
    for (std::size_t i = 0; i < expected.size(); ++i)
      if (!equal(receive[i].cpu(), expected[i]))
        return "collective " + std::to_string(round) + " of kind " + std::to_string(kind) + ": wrong tensor " +
               std::to_string(i);
  }
  return {};
}

}  // namespace ditfleet::pipeline::parallel::testing
