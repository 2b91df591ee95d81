// The names of a shard's keys. All have its hash tag, so that a shard is in one slot of a Redis Cluster.
#pragma once

#include <string>
#include <string_view>

namespace ditfleet::queue {

class Keys {
 public:
  explicit Keys(int shard) : prefix_("df:{" + std::to_string(shard) + "}:") {}

  std::string in() const { return prefix_ + "in"; }              // stream: intake
  std::string jobs() const { return prefix_ + "jobs"; }          // zset: index by creation time
  std::string units() const { return prefix_ + "units"; }        // hash: every unit that has not ended
  std::string open() const { return prefix_ + "open"; }          // hash: every job that has not ended
  std::string specs() const { return prefix_ + "specs"; }        // hash: their specs, once they are admitted
  std::string last() const { return prefix_ + "last"; }          // hash: the newest event of open jobs and units
  std::string events() const { return prefix_ + "events"; }      // stream: the events of a call per entry
  std::string ready() const { return prefix_ + "ready"; }        // zset: units by the time they became ready
  std::string delayed() const { return prefix_ + "delayed"; }    // zset: units by the time they are due
  std::string lease() const { return prefix_ + "lease"; }        // zset: held units by the end of their lease
  std::string deadline() const { return prefix_ + "deadline"; }  // zset: jobs by their deadline
  std::string dead() const { return prefix_ + "dead"; }          // stream: dead letters
  std::string leader() const { return prefix_ + "leader"; }      // string: "<epoch> <coordinator>"
  std::string epoch() const { return prefix_ + "epoch"; }        // counter
  std::string boot() const { return prefix_ + "boot"; }          // string: "<run id> <grace until>"
  std::string tenants() const { return prefix_ + "tenants"; }    // hash: tenant → virtual time
  std::string workers() const { return prefix_ + "workers"; }    // zset: names by heartbeat
  std::string worker(std::string_view name) const { return join("worker:", name); }
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
