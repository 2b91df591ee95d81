#include "shared/core/ids.h"

#include <pthread.h>
#include <sodium.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>

#include "shared/core/bytes.h"

namespace ditfleet {

namespace {

// The last id's milliseconds and its 16 random digits of five bits, most significant first.
struct LastId {
  std::mutex mutex;
  std::int64_t ms = 0;
  std::array<unsigned char, 16> digits{};
};

// Grows in a forked process.
std::atomic<unsigned> forks = 0;
[[maybe_unused]] const int kForksCounted = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });

// Random bytes for ids and nonces. They are read from the system in large blocks, because a call costs as much as an
// id. Used bytes are wiped. A forked process, such as a rank, does not use the bytes of the process it came from.
void random_bytes(std::span<unsigned char> out) {
  static thread_local std::array<unsigned char, 1024> pool;
  static thread_local std::size_t used = pool.size();
  static thread_local unsigned filled_after = 0;
  if (pool.size() - used < out.size() || filled_after != forks) {
    randombytes_buf(pool.data(), pool.size());
    used = 0;
    filled_after = forks;
  }
  std::copy_n(pool.begin() + static_cast<std::ptrdiff_t>(used), out.size(), out.begin());
  sodium_memzero(pool.data() + used, out.size());
  used += out.size();
}

// Advances the digits within one millisecond by an unpredictable step: 40 random bits plus 1. The upper half of the
// first digit starts free, which leaves room for 2³⁹ steps.
void step_up(std::array<unsigned char, 16>& digits) {
  std::array<unsigned char, 8> step{};
  random_bytes(step);
  unsigned carry = 1;
  for (std::size_t i = 16; i-- > 0;) {
    const unsigned sum = digits[i] + carry + (i >= 8 ? step[i - 8] & 31U : 0U);
    digits[i] = static_cast<unsigned char>(sum & 31);
    carry = sum >> 5;
  }
}

}  // namespace

std::string new_id() {
  static constexpr char kAlphabet[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
  static auto& last = *new LastId;
  const auto now =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count();
  const std::lock_guard lock(last.mutex);
  if (now > last.ms) {
    last.ms = now;
    random_bytes(last.digits);
    for (auto& digit : last.digits) digit &= 31;
    last.digits[0] &= 15;
  } else {  // the same millisecond, or the clock went back
    step_up(last.digits);
  }
  std::string id(26, '0');
  auto time = static_cast<std::uint64_t>(last.ms);
  for (int i = 9; i >= 0; --i, time >>= 5) id[static_cast<std::size_t>(i)] = kAlphabet[time & 31];
  for (std::size_t i = 0; i < 16; ++i) id[10 + i] = kAlphabet[last.digits[i]];
  return id;
}

std::string new_nonce() {
  std::array<unsigned char, 16> random{};
  random_bytes(random);
  return to_hex(random);
}

double random_fraction() {
  constexpr std::uint32_t kSteps = 1 << 24;
  return static_cast<double>(randombytes_uniform(kSteps)) / kSteps;
}

bool is_valid_id(std::string_view id) {
  if (id.empty() || id.size() > 64) return false;
  for (char c : id) {
    const bool ok =
        (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' || c == '-';
    if (!ok) return false;
  }
  return true;
}

}  // namespace ditfleet
