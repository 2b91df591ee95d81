// Rank 0 of a worker that owns several GPUs: an engine whose models run in all ranks.
#pragma once

#include <functional>
#include <memory>

#include "pipeline/engine.h"

namespace ditfleet::worker {

// Called in each rank, with its place among them.
using EngineFactory = std::function<Result<std::unique_ptr<pipeline::Engine>>(const pipeline::RankOptions& ranks)>;

// Ranks 1 … size − 1: processes that this one has forked. Thread-safe.
class RankProcesses {
 public:
  // Call it before the process has threads. The children are copies of it: they ignore the signals that stop it, serve
  // it (follower.h) with engines that `create` makes, and end when it ends or destroys the result. `options`: `size`
  // and `wait` of all ranks. `memory`: from Engine::create_rank_memory(). Errors: kUnavailable (no process).
  static Result<std::shared_ptr<RankProcesses>> start(pipeline::RankOptions options, UniqueFd memory,
                                                      const EngineFactory& create);
  virtual ~RankProcesses() = default;
  // When a rank has ended or is silent (pulse.h), all are killed and `broken` is called once, on a thread of its own.
  // An empty function undoes it.
  virtual void on_broken(std::function<void(const Error&)> broken) = 0;
  // Creates the engines of all ranks. The models of the result run each request in all of them: encode() and denoise()
  // in all, decode() in this one; adapters are loaded in all. If a rank ends, or fails alone while it denoises, they
  // return kDeviceFault. The engine must not outlive this object. Errors: those of the factory in any rank.
  // abort_ranks() of the engine kills the other ranks and does not block.
  virtual Result<std::unique_ptr<pipeline::Engine>> create_engine() = 0;
  // Kills the other ranks and waits until they have ended, for 5 s at most: then their devices' memory is free.
  virtual void kill() = 0;
};

}  // namespace ditfleet::worker
