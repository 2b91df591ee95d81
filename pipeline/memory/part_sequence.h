// Weights in the order of their use. Some parts stay on the device, the others are copied there ahead of their use.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/memory/weight_part.h"

namespace ditfleet::pipeline {

class PartSequence {
 public:
  // `name`: identifies the weights within placement.host_key. `repeats`: passes follow each other, so the last part's
  // end fetches the first part.
  PartSequence(const Placement& placement, const std::string& name, bool repeats);
  ~PartSequence();
  PartSequence(const PartSequence&) = delete;
  PartSequence& operator=(const PartSequence&) = delete;

  // Adds a part that is on the device. Moves it to the host if the placement says so; else packs it if the device is a
  // GPU. Not thread-safe. Call it before the first pass.
  void add(std::unique_ptr<WeightPart> part);
  c10::Device device() const { return device_; }
  std::size_t size() const { return parts_.size(); }
  std::int64_t bytes() const { return bytes_; }            // of all parts
  std::int64_t kept_bytes() const { return kept_bytes_; }  // of the parts kept on the device
  // The most bytes of other parts that are on the device at a time. A CPU copies no part ahead.
  std::int64_t ahead_bytes() const { return std::min(bytes_, (copies_ahead_ ? 2 : 1) * largest_); }
  bool all_stay() const { return kept_bytes_ == bytes_; }
  // The number of parts that keep() has moved so far. Addresses of kept parts are valid until it changes.
  std::int64_t moves() const { return moves_; }

  // Keeps as many parts on the device as fit into `bytes`, spread evenly over the sequence, and moves the others to the
  // host. Waits for a pass in progress and for the device; with `wait` false the copies to the device run in the
  // background, and begin() waits for them. Throws what WeightPart::enter() and leave() throw; after an error of
  // enter() no part is kept. Thread-safe.
  void keep(std::int64_t bytes, bool wait = true);
  // `call` runs on the copying stream after each copy of a part to the device. It may write to the part's tensors.
  void on_arrival(std::function<void(std::size_t part)> call) { arrived_ = std::move(call); }
  // `call` runs on the current stream before a part is copied to the host. That happens once for each part.
  void on_first_departure(std::function<void(std::size_t part)> call) { departs_ = std::move(call); }

  // One use of the parts in order. Only one pass at a time: the constructor waits for others.
  class Pass {
   public:
    explicit Pass(PartSequence* sequence);  // null: nothing to do
    ~Pass();
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    // Enqueue work that reads part i on the current stream between these calls. begin() blocks only on a CPU. It throws
    // what WeightPart::enter() throws.
    void begin(std::size_t i);
    void end(std::size_t i);
    void finish();  // as PartSequence::finish()

   private:
    PartSequence* const sequence_;
    const int exceptions_;
    std::unique_lock<std::mutex> lock_;
  };

  // Measures the next pass: the time from begin() to end() of all parts, without the waits for copies.
  void measure();
  // Of the last measured pass; waits for its end.
  double measured_s();

  // Frees parts that were copied ahead. Call it after the last pass of a request. The memory belongs to the copying
  // stream, so a part keeps it until its copy has finished.
  void finish();

 private:
  struct Streams;
  struct Entry;

  void begin(std::size_t i);
  void end(std::size_t i);
  void fetch(std::size_t i, bool to_stay = false);
  std::vector<std::size_t> spread(std::int64_t bytes) const;

  const c10::Device device_;
  const std::string key_;  // of shared host memory; empty: not shared
  const bool repeats_, on_host_, copies_ahead_;
  std::unique_ptr<Streams> streams_;  // null on a CPU
  std::vector<std::unique_ptr<Entry>> parts_;
  std::int64_t bytes_ = 0, largest_ = 0;
  std::atomic<std::int64_t> kept_bytes_ = 0, moves_ = 0;
  std::function<void(std::size_t)> arrived_, departs_;
  bool measuring_ = false;
  std::mutex mutex_;  // held during a pass
};

}  // namespace ditfleet::pipeline
