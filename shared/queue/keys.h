// The names of a shard's keys. They have the same hash tag, so that a Redis Cluster stores them on one server.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ditfleet::queue {

class Keys {
 public:
  explicit Keys(int shard) : prefix_("df:{" + std::to_string(shard) + "}:") {}

  std::string in() const { return prefix_ + "in"; }              // stream: intake
  std::string jobs() const { return prefix_ + "jobs"; }          // zset: all jobs by creation time
  std::string units() const { return prefix_ + "units"; }        // hash: records of open units
  std::string open() const { return prefix_ + "open"; }          // hash: records of open jobs
  std::string specs() const { return prefix_ + "specs"; }        // hash: specs of admitted open jobs
  std::string last() const { return prefix_ + "last"; }          // hash: newest event of queued jobs and open units
  std::string events() const { return prefix_ + "events"; }      // stream: one entry for all events of a call
  std::string ready() const { return prefix_ + "ready"; }        // zset: units by the time they became ready
  std::string delayed() const { return prefix_ + "delayed"; }    // zset: units in back-off by the time of their retry
  std::string lease() const { return prefix_ + "lease"; }        // zset: assigned and running units by lease end
  std::string deadline() const { return prefix_ + "deadline"; }  // zset: jobs by their deadline
  std::string paused() const { return prefix_ + "paused"; }      // set: paused jobs and their units (journal.lua)
  std::string dead() const { return prefix_ + "dead"; }          // stream: dead letters
  std::string history() const { return prefix_ + "history"; }    // stream: ended jobs, for statistics
  std::string use() const { return prefix_ + "use"; }            // hash: tenant → what its open jobs take (base.lua)
  std::string inputs() const { return prefix_ + "inputs"; }      // zset: "<tenant>:<sha256>" of images by expiry
  std::string input_use() const { return prefix_ + "input_use"; }        // hash: tenant → its images (inputs.lua)
  std::string outbox() const { return prefix_ + "outbox"; }              // stream: changes for webhooks (journal.lua)
  std::string watched() const { return prefix_ + "watched"; }            // set: jobs whose webhooks want their progress
  std::string deliveries() const { return prefix_ + "deliveries"; }      // hash: id → Delivery as JSON
  std::string hook_secrets() const { return prefix_ + "hook_secrets"; }  // hash: tenant → secrets of webhooks
  // hash: tenant → GPU-microseconds of its results in the month "2026-11"
  std::string usage(std::string_view month) const { return join("usage:", month); }
  std::string batch(std::string_view id) const { return join("batch:", id); }  // hash: counts (batch_routes.cpp)
  std::string leader() const { return prefix_ + "leader"; }                    // string: "<epoch> <coordinator>"
  std::string epoch() const { return prefix_ + "epoch"; }                      // string: the latest epoch
  std::string format() const { return prefix_ + "format"; }      // string: the format of the records (base.lua)
  std::string clock() const { return prefix_ + "clock"; }        // hash: ClockMark
  std::string boot() const { return prefix_ + "boot"; }          // string: "<Redis' run id> <end of the leases' grace>"
  std::string tenants() const { return prefix_ + "tenants"; }    // hash: tenant → virtual time
  std::string workers() const { return prefix_ + "workers"; }    // zset: worker names by latest heartbeat
  std::string forecast() const { return prefix_ + "forecast"; }  // string: FleetForecast as JSON, expires
  std::string outlook() const { return prefix_ + "outlook"; }    // string: "<job> <position> <eta>" lines, expires
  // string: where the checkpoint of a unit is stored (shared/results/checkpoint.h)
  std::string checkpoint(std::string_view job, int unit) const {
    return join("checkpoint:", std::string(job) + ":" + std::to_string(unit));
  }
  std::string link_secret(std::int64_t id) const { return join("links:", std::to_string(id)); }  // string
  std::string worker(std::string_view name) const { return join("worker:", name); }
  std::string desired(std::string_view name) const { return join("desired:", name); }  // string: a worker's Desired
  std::string inputs_of(std::string_view tenant) const { return join("inputs:", tenant); }  // hash: sha256 → bytes
  std::string mailbox(std::string_view owner) const { return join("mbox:", owner); }
  std::string job(std::string_view id) const { return join("job:", id); }
  std::string idempotency(std::string_view tenant, std::string_view key) const {
    return join("idem:", tenant) + ':' + std::string(key);
  }
  std::string feed_channel() const { return prefix_ + "feed"; }    // lifecycle events
  std::string steps_channel() const { return prefix_ + "steps"; }  // steps and previews

 private:
  std::string join(std::string_view kind, std::string_view name) const {
    std::string out;
    out.reserve(prefix_.size() + kind.size() + name.size());
    return out.append(prefix_).append(kind).append(name);
  }
  std::string prefix_;
};

}  // namespace ditfleet::queue
