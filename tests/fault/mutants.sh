#!/usr/bin/env bash
# Changes one line of the product at a time, and checks that a test of its behaviour fails.
#
#   tests/fault/mutants.sh [FOLDER] [NUMBER…]   all mutants, or only these; FOLDER: a configured build, default build
#
# Changes sources in place and restores them: do not edit or build meanwhile. Runs each test without a change first.
# The last line is "SEEN of ALL seen". The exit status is 0 only if every mutant was seen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# Of each mutant: number, test program, tests of which one must fail; file, what the change breaks; the text, which the
# file contains once; the text that replaces it. Of `histories`: how many seeds, of which one must be broken.
mutants() {
  cat <<'END'
1 queue_assign_test QueueLapse.AUnitWhoseLeaseWasRenewedIsKept
shared/queue/functions/reaper.lua: reaps a lease that was renewed in time
- if kind == 'lease' and not hold and is_due(lease, member, ms) then
+ if kind == 'lease' and not hold then
2 queue_assign_test QueueLapse.LeasesAreHeld*
shared/queue/calls.cpp: leases lapse after an outage of Redis
- return Deadline::Clock::now() < hold_until_;
+ return false;
3 results_test FileStoreTest.AResultWhoseFolderCannotBeSyncedIsNotStored
shared/results/file_store.cpp: a power failure may take a result back
- if (::fsync(opened.get()) != 0) return
+ if (!opened.valid()) return
4 worker_fencing_test WorkerFencing.AStartWhoseAnswerIsLostIsRepeated
worker/units/unit_runner.cpp: takes a lost answer for a refusal
- if (begun.error().code == Code::kConflict || begun.error().code == Code::kNotFound) {
+ if (!begun) {
5 worker_fencing_test WorkerFencing.ACompletionWhoseAnswerIsLostKeepsItsResult
worker/units/unit_runner.cpp: removes the result of a completed unit
- } else if (completed.error().code != Code::kConflict) {
+ } else if (false) {
6 worker_service_test WorkerLife.ReadsItsMailboxAfterRedisHasLostItsEnd
worker/service.cpp: stays deaf after Redis has lost data
-       after = "0";
+
7 results_redis_test ResultsRedis.WritesTheFirstChunkLast
shared/results/redis_store.cpp: a reader finds half of a value
- for (std::size_t i = chunks; i-- > 0;) {
+ for (std::size_t i = 0; i < chunks; ++i) {
8 key_store_test KeyStoreTest.AChangeOfKeysThatAnotherGatewayHasChangedIsRefused
coordinator/gateway/routes/key_store.cpp: ignores the change of another administrator
- if (redis.call('HGET', KEYS[1], '') or '') ~= ARGV[1] then return 0 end
+
9 scheduler_service_test SchedulerServiceTest.a_new_leader_hears_what_happens_while_it_reads_the_state
coordinator/scheduling/service/leader_term.cpp: subscribes after it has read the state
- const auto subscribed = co_await feed_->next(0ms);
+ const Result<void> subscribed;
10 worker_ranks_test WorkerRanks.ARankThatFailsAfterTheLastStepOfRank0IsADeviceFault
worker/ranks/leader.cpp: ignores a rank that failed
- if (own && !there) return rank_fault(there.error().message);
+
11 queue_assign_test QueueLapse.OnlyTheAttemptThatCompletedAUnitMayRepeatTheCall
shared/queue/functions/workers.lua: a stale attempt takes another's result for its own
- return held_state(ended, nonce) == 'succeeded' and 1 or 0
+ return ended and 1 or 0
12 queue_assign_test QueueAssign.AnotherEpochThanTheLeadersChangesNothing
shared/queue/functions/register.lua: an earlier leader goes on leading
- if not leader or string.match(leader, '^(%d+) ') ~= args[1] then
+ if not leader then
13 queue_intake_test QueueIntake.OneIdempotencyKeyIsOneJobHoweverItComes
shared/queue/functions/base.lua: an idempotency key names a job of another body
- return first, string.sub(old, -32) == string.sub(sha256, 1, 32)
+ return first, true
14 queue_assign_test QueueLapse.TheThirdErrorOfAUnitIsItsLast
shared/queue/functions/workers.lua: tries a unit once too often
- tonumber(record.errors) < tonumber(max_attempts)
+ tonumber(record.errors) <= tonumber(max_attempts)
15 queue_intake_test QueueQuota.CountsUnitsAndBytesOfOpenJobsOfEachTenant
shared/queue/functions/base.lua: a refused job counts against the quota
-   give_back(intake, tenant, use)
+
16 queue_assign_test QueueAssign.AJobWithAFailedUnitFails
shared/queue/functions/journal.lua: a job that lacks an image succeeds
- return seen.failed and 'failed' or seen.expired
+ return seen.expired
17 queue_life_test QueueLife.OnlyItsOwnTenantCancelsAJob
shared/queue/functions/producers.lua: a tenant cancels the jobs of others
- if not job or (tenant ~= '' and tenant ~= job.tenant) then return reply
+ if not job then return reply
18 worker_test UnitTableTest.RefusesUnitsOverItsCapacityAndDuplicates
worker/units/unit_table.cpp: runs a unit twice whose entry it reads again
- if (find(attempt.nonce)) return Admission::kDuplicate;
+
19 results_test FileStoreTest.AStoreOpenedOverAnOldFolderSweepsByItself
shared/results/file_store.cpp: removes results before their jobs
- options.retention_ms + kExtraRetentionMs
+ options.retention_ms
20 scheduler_service_test SchedulerServiceTest.a_new_leader_gives_workers_time_to_renew
coordinator/scheduling/service/leader_term.cpp: a new leader takes units away at once
- if (std::any_of(open->begin(), open->end(), held)) context_.client->hold_leases();
+
21 histories 2000
shared/queue/functions/base.lua: an outdated attempt acts for the unit
- return unit and unit.nonce == nonce and unit.state
+ return unit and unit.state
22 histories 100
shared/queue/functions/scheduler.lua: an assigned unit stays ready
-     rc('ZREM', ready, unpack(assigned))
+
23 histories 100
shared/queue/functions/scheduler.lua: an assignment has no lease
-     rc('ZADD', lease, unpack(leases))
+
24 histories 100
shared/queue/functions/workers.lua: a retry never comes due
-     rc('ZADD', delayed, due_at, member)
+
25 histories 600
shared/queue/functions/workers.lua: renewals do not extend the lease
-   if #leases > 0 then redis.call('ZADD', lease, unpack(leases)) end
+
26 histories 100
shared/queue/functions/journal.lua: an ended job counts against the quota
- then give_back(journal.keys.events, job.tenant, job.use) end
+ then end
27 histories 100
shared/queue/functions/journal.lua: an ended unit keeps its last event
-   if #removed > 0 then rc('HDEL', keys.last, unpack(removed)) end
+
28 histories 100
shared/queue/functions/journal.lua: an ended job stays open
-     rc('HDEL', keys.open, unpack(journal.closed))
+
29 histories 300
shared/queue/functions/journal.lua: an ended job keeps its deadline
-   if record.deadline ~= '0' then rc('ZREM', keys.deadline, id) end
+
30 histories 100
shared/queue/functions/journal.lua: a job of several images ends with the first
- rc('HINCRBY', job_key, 'done', '1') < tonumber(record.units)
+ rc('HINCRBY', job_key, 'done', '1') < 1
31 histories 100
shared/queue/functions/journal.lua: the events of a job are not linked
-   local before = first and {} or rc('HMGET', keys.last, unpack(journal.after))
+   local before = {}
32 histories 2000
shared/queue/functions/scheduler.lua: a job is admitted twice
- if job.units == '0' and not seen[id] then
+ if not seen[id] then
33 histories 2000
shared/queue/functions/scheduler.lua: a unit is assigned that is not ready
- not left and record.state == 'ready' and not assigned[member] then
+ not left and not assigned[member] then
34 histories 600
shared/queue/functions/scheduler.lua: a coordinator takes the leadership of another
-     if name ~= coordinator then return 0 end
+
35 histories 600
shared/queue/functions/scheduler.lua: an epoch is given twice
- math.max((tonumber(rc('GET', counter)) or 0) + 1, (now()))
+ 1
36 histories 100
shared/queue/functions/scheduler.lua: an entry that was admitted stays in the intake
-   forget_entries(in_key, entries)
+
37 histories 2000
shared/queue/functions/scheduler.lua: a job by XADD is made twice
-     if known then return same_body(known, tenant, sha256) and 'existed ' .. id or 'taken' end
+
38 histories 300
shared/queue/functions/reaper.lua: no lease lapses
- if kind == 'lease' and not hold and is_due
+ if kind == 'lease' and false and is_due
39 histories 300
shared/queue/functions/reaper.lua: a deadline ends nothing
- elseif kind == 'deadline' and is_due(deadline, id, ms) then
+ elseif kind == 'deadline' and false then
40 histories 2000
shared/queue/functions/producers.lua: a repeated submission becomes another job
-     if other then return (same and 'existed ' or 'mismatch ') .. other end
+
41 histories 600
coordinator/scheduling/service/scheduler_service.cpp: a coordinator that is cut off goes on leading
-       apply(leadership_.on_tick(monotonic_us()));
+
42 histories 300
worker/service.cpp: nobody watches work that hangs
-   tasks_.spawn("watchdog", watch_progress(), Vital::kForever);
+
43 histories 2000
coordinator/scheduling/recovery.cpp: an audit leaves what has ended
-     jobs_.end(unit, now_us);
+
44 histories 600
shared/redis/session.cpp: the connection to a server that is silent stays
-     ++silent_timeouts_;
+
45 histories 2000
shared/redis/session.cpp: a late reply goes to the next command
-     it->abandoned = true;
+     in_flight_.erase(it);
46 scheduling_test SchedulerTest.a_unit_whose_end_redis_has_lost_runs_again
coordinator/scheduling/recovery.cpp: a unit whose end Redis has lost is forgotten
-     if (unit != nullptr && unit->where == Where::kEnded) jobs_.reopen(*unit);  // Redis lost its end
+     if (unit != nullptr && unit->where == Where::kEnded) continue;
47 scheduling_test SchedulerTest.a_held_unit_that_is_admitted_again_is_assigned_again
coordinator/scheduling/scheduler.cpp: a unit that Redis admits again counts as held
- if (!admitted || (unit.where != Where::kHeld && !aside)) jobs_.touch(unit, now_us);
+ jobs_.touch(unit, now_us);
48 scheduling_test SchedulerTest.an_audit_does_not_answer_a_request_that_came_while_it_was_read
coordinator/scheduling/recovery.cpp: a request for an audit is lost while one is read
-   std::unordered_set<const Unit*> stored;
+   std::unordered_set<const Unit*> stored; wanted_ = false;
49 histories 300
shared/queue/functions/workers.lua: an error that may be retried ends the unit
-   if left and (crash == '1' or retryable == '1') then
+   if left and crash == '1' then
50 histories 2000
shared/queue/functions/scheduler.lua: a worker that has left gets units
- not illegible and not left and record.state
+ not illegible and record.state
51 histories 600
shared/queue/functions/journal.lua: a checkpoint outlives its unit
-   drop_checkpoint(keys.events, id, unit)
+
52 scheduling_test SchedulerTest.an_audit_ignores_units_that_changed_after_it_was_requested
coordinator/scheduling/job_table.h: an audit takes back what came while it was read
- return unit.audit == audit_;
+ return false;
END
}

folder=build
case ${1:-} in
  -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  '' | [0-9]*) ;;
  *) folder=$1; shift ;;
esac
[ -f "$folder/build.ninja" ] ||
  { echo "mutants: $folder/ is not configured; run deploy/setup.sh --tests --target tests_mutants" >&2; exit 2; }

chosen=() targets=()
declare -A target filter file broken old new
while IFS= read -r who && IFS= read -r where && IFS= read -r minus && IFS= read -r plus; do
  n=${who%% *}
  [ $# -eq 0 ] || [[ " $* " = *" $n "* ]] || continue
  read -r _ "target[$n]" "filter[$n]" <<<"$who"
  file[$n]=${where%%: *} broken[$n]=${where#*: } old[$n]=${minus:2} new[$n]=${plus:2}
  chosen+=("$n") targets+=("${target[$n]}")
  git diff --quiet HEAD -- "${file[$n]}" ||
    { echo "mutants: ${file[$n]} has changes; commit them, or run: git checkout HEAD ${file[$n]}" >&2; exit 2; }
done < <(mutants)
[ ${#chosen[@]} -gt 0 ] || { echo "mutants: no mutant has the number $*" >&2; exit 2; }

log=$(mktemp) changed=
restore() { [ -z "$changed" ] || git checkout -q HEAD -- "$changed"; changed=; }
trap 'restore; rm -f "$log"' EXIT
trap 'exit 130' INT TERM HUP
build() { cmake --build "$folder" -j "${JOBS:-$(nproc)}" --target "$@" >"$log" 2>&1; }
passes() {
  if [ "${target[$1]}" = histories ]; then
    { timeout -k 5 600 "$folder/tests/histories" --count "${filter[$1]}" --stop; } >"$log" 2>&1
  else
    { timeout -k 5 120 "$folder/tests/${target[$1]}" --gtest_filter="${filter[$1]}"; } >"$log" 2>&1
  fi
}
# apply NUMBER: false if the file does not contain the old text exactly once.
apply() {
  local text rest
  text=$(<"${file[$1]}")
  rest=${text//"${old[$1]}"/}
  [ $((${#text} - ${#rest})) = ${#old[$1]} ] || return 1
  changed=${file[$1]}
  printf '%s\n' "${text/"${old[$1]}"/"${new[$1]}"}" >"$changed"
}

build "${targets[@]}" || { tail -n 25 "$log" >&2; echo "mutants: the build failed without a change" >&2; exit 1; }
whole=0
for n in "${chosen[@]}"; do
  if [ "${target[$n]}" = histories ]; then  # the same seeds serve many mutants
    [ "${filter[$n]}" -gt "$whole" ] || continue
    whole=${filter[$n]}
    if passes "$n"; then continue; fi
  elif passes "$n" && grep -q '^\[       OK \]' "$log"; then
    continue
  fi
  tail -n 25 "$log" >&2
  echo "mutants: ${target[$n]} ${filter[$n]} does not pass without a change" >&2
  exit 1
done

seen=0
for n in "${chosen[@]}"; do
  if ! apply "$n"; then verdict='does not apply'
  elif ! build "${target[$n]}"; then verdict='does not build'
  elif passes "$n"; then verdict=SURVIVED
  else verdict=seen seen=$((seen + 1))
  fi
  restore
  echo "$n $verdict  ${file[$n]}: ${broken[$n]}"
done
build "${targets[@]}" || true  # without a change
echo "$seen of ${#chosen[@]} seen"
[ "$seen" = ${#chosen[@]} ]
