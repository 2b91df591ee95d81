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
# file contains once; the text that replaces it.
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
- if not job or (tenant ~= '' and tenant ~= job.tenant) then return
+ if not job then return
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
passes() { { timeout -k 5 120 "$folder/tests/${target[$1]}" --gtest_filter="${filter[$1]}"; } >"$log" 2>&1; }
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
for n in "${chosen[@]}"; do
  if passes "$n" && grep -q '^\[       OK \]' "$log"; then continue; fi
  tail -n 25 "$log" >&2
  echo "mutants: ${target[$n]} --gtest_filter=${filter[$n]} does not pass without a change" >&2
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
