// An adapter in memory, ready to be added to a model's linears.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/engine.h"
#include "pipeline/lora/names.h"
#include "pipeline/models/linear.h"

namespace ditfleet::pipeline {

struct Adapter {
  struct Term {
    LoraPart part;
    std::size_t slot;  // as in the LoraBase
    LowRank low_rank;  // with the file's scale; strength 1
  };
  std::uint64_t id;  // of this content: another after the file has changed
  std::vector<Term> terms;
  std::int64_t bytes;
  bool changes_text;  // has terms for CLIP or T5
};

// Reads adapters' files for one model and keeps the last few. Thread safe; loads one at a time.
class AdapterStore {
 public:
  // max_rank: of one module.
  AdapterStore(const LoraBase& base, Placement placement, std::int64_t max_rank) : names_(base), placement_(placement), max_rank_(max_rank) {}

  // In the pipeline's element type on its device. A file that has changed (size, time, inode) is read again. Blocks.
  // Throws Failure as read_lora_file() fails, and LibTorch's own exceptions when memory runs out.
  std::shared_ptr<const Adapter> get(const LoraRequest& request);
  void forget(const std::string& id);
  AdapterHoldings holdings() const;

 private:
  struct Kept {
    std::string identity, id;
    std::shared_ptr<const Adapter> adapter;
  };
  std::shared_ptr<const Adapter> load(const std::string& path);

  const LoraNames names_;
  const Placement placement_;
  const std::int64_t max_rank_;
  mutable std::mutex mutex_;
  std::list<Kept> kept_;  // most recently used first
  std::uint64_t next_id_ = 1;
};

}  // namespace ditfleet::pipeline
