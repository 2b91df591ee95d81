#include "pipeline/parallel/sequence.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <numeric>

#include "pipeline/device/failure.h"
#include "pipeline/parallel/exchange.h"

namespace ditfleet::pipeline::parallel {
namespace {

void check(const Result<void>& done) {
  if (!done) throw Failure(done.error());
}

// Whether the heads of a token [.., heads, head size] are one row of bytes.
bool has_rows(const at::Tensor& t) { return t.stride(3) == 1 && t.stride(2) == t.size(3); }
at::Tensor with_rows(const at::Tensor& t) { return has_rows(t) ? t : t.contiguous(); }

// The rows of t [tokens, heads, head size].
Rows rows_of(const at::Tensor& t) {
  const auto size = [&](std::int64_t elements) { return static_cast<std::size_t>(elements * t.element_size()); };
  return {static_cast<const std::byte*>(t.const_data_ptr()), size(t.stride(0)), size(t.size(1) * t.size(2)),
          static_cast<std::size_t>(t.size(0))};
}

}  // namespace

Team Team::all(std::shared_ptr<Group> group) {
  const int count = group ? group->size() : 1;
  return {std::move(group), 0, count};
}

std::pair<at::Tensor, at::Tensor> Team::both(const Forward& forward) const {
  if (count % 2 != 0) {
    at::Tensor positive = forward(false, *this);
    return {std::move(positive), forward(true, *this)};
  }
  const int half = count / 2;
  const bool second = group->rank() >= first + half;
  const at::Tensor mine = forward(second, {group, second ? first + half : first, half}).contiguous();
  const at::Tensor other = at::empty_like(mine);
  if (!mine.is_meta()) {
    std::vector<at::Tensor> send(static_cast<std::size_t>(group->size())), receive = send;
    const auto partner = static_cast<std::size_t>(group->rank() + (second ? -half : half));
    send[partner] = mine;
    receive[partner] = other;
    check(group->all_to_all(send, receive));
  }
  return second ? std::pair(other, mine) : std::pair(mine, other);
}

void Team::check_heads(std::int64_t heads) const {
  if (heads % count == 0) return;
  std::string fitting;
  for (std::int64_t one = 1; one <= heads; ++one)
    if (heads % one == 0) fitting += (fitting.empty() ? "" : ", ") + std::to_string(one);
  fail(Code::kInvalidArgument,
       std::to_string(count) + " GPUs cannot share the model's " + std::to_string(heads) +
           " attention heads; their number must be one of " + fitting,
       "worker.gpus");
}

Sequence::Sequence(Team team, std::int64_t tokens) : team_(std::move(team)), total_(tokens) {
  for (std::int64_t r = 0; r < team_.count; ++r)
    tokens_.push_back(tokens * (r + 1) / team_.count - tokens * r / team_.count);
}

Sequence::Sequence(const Sequence& first, const Sequence& second)
    : team_(first.team_), tokens_(first.tokens_), total_(first.total_ + second.total_) {
  for (std::size_t r = 0; r < tokens_.size(); ++r) tokens_[r] += second.tokens_[r];
}

void Sequence::exchange(const std::vector<at::Tensor>& send, const std::vector<at::Tensor>& receive) const {
  std::vector<at::Tensor> to(static_cast<std::size_t>(team_.group->size())), from = to;
  std::copy(send.begin(), send.end(), to.begin() + team_.first);
  std::copy(receive.begin(), receive.end(), from.begin() + team_.first);
  check(team_.group->all_to_all(to, from));
}

std::vector<at::Tensor> Sequence::shares(const at::Tensor& t) const { return t.split_with_sizes(tokens_, 0); }

at::Tensor Sequence::own(const at::Tensor& x) const { return x.narrow(1, first_token(me()), own_tokens()); }

std::int64_t Sequence::first_token(std::int64_t rank) const {
  return std::accumulate(tokens_.begin(), tokens_.begin() + rank, std::int64_t{0});
}

std::int64_t Sequence::own_before(std::int64_t count) const {
  return std::clamp<std::int64_t>(count - first_token(me()), 0, own_tokens());
}

at::Tensor Sequence::gather(const at::Tensor& x) const {
  auto sizes = x.sizes().vec();
  sizes[1] = sizes[0];
  sizes[0] = total_;
  const at::Tensor all = at::empty(sizes, x.options());  // [tokens, batch, ..], so that shares are contiguous
  if (!x.is_meta()) exchange(std::vector<at::Tensor>(tokens_.size(), x.transpose(0, 1).contiguous()), shares(all));
  return all.transpose(0, 1);
}

at::Tensor Sequence::attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               const Attend& attend) const {
  if (!q.is_meta()) {
    Exchange* const exchange = team_.group->exchange();
    const std::array<at::Tensor, 3> qkv = {with_rows(q), with_rows(k), with_rows(v)};  // until the rows have been sent
    if (exchange && (exchange->begun() || send_heads(qkv))) return attention_by_exchange(q, attend);
  }
  const auto [all_q, all_k, all_v] = to_heads(q, k, v);
  return to_tokens(attend(all_q, all_k, all_v));
}

void Sequence::start(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  if (!q.is_meta() && team_.group->exchange() && has_rows(q) && has_rows(k) && has_rows(v)) send_heads({q, k, v});
}

// Slots have the layouts of to_heads() and to_tokens(), so the same kernels run on the same bytes.
bool Sequence::send_heads(const std::array<at::Tensor, 3>& qkv) const {
  Exchange& exchange = *team_.group->exchange();
  const at::Tensor& q = qkv[0];
  const std::int64_t batch = q.size(0), heads = q.size(2) / team_.count;
  const auto row = static_cast<std::size_t>(heads * q.size(3) * q.element_size());
  const auto rows = [&](std::int64_t tokens) { return static_cast<std::size_t>(tokens * batch) * row; };
  if (!unwrap(
          exchange.begin(team_.first, team_.count,
                         {3 * rows(total_), rows(*std::max_element(tokens_.begin(), tokens_.end()) * team_.count)})))
    return false;
  for (std::int64_t i = 1; i <= team_.count; ++i) {
    const std::int64_t r = (me() + i) % team_.count;  // each rank begins with another one
    const int to = team_.first + static_cast<int>(r);
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::size_t part = 0; part < 3; ++part)
        check(exchange.send(to, rows_of(qkv[part].select(0, b).narrow(1, r * heads, heads)),
                            3 * rows(first_token(me())) + (static_cast<std::size_t>(b) * 3 + part) * row,
                            static_cast<std::size_t>(batch) * 3 * row));
    if (r != me()) check(exchange.raise(to));
  }
  return true;
}

at::Tensor Sequence::attention_by_exchange(const at::Tensor& q, const Attend& attend) const {
  Exchange& exchange = *team_.group->exchange();
  const std::int64_t batch = q.size(0), heads = q.size(2) / team_.count, size = q.size(3);
  const at::Tensor all =
      at::from_blob(unwrap(exchange.wait()), {total_, batch, 3, heads, size}, q.options()).transpose(0, 1);
  const at::Tensor made = with_rows(attend(all.select(2, 0), all.select(2, 1), all.select(2, 2)));
  check(exchange.turn());
  const auto row = static_cast<std::size_t>(heads * size * q.element_size());
  for (std::int64_t i = 1; i <= team_.count; ++i) {
    const std::int64_t r = (me() + i) % team_.count;
    const int to = team_.first + static_cast<int>(r);
    for (std::int64_t b = 0; b < batch; ++b)
      check(exchange.send(
          to, rows_of(made.select(0, b).narrow(0, first_token(r), tokens_[static_cast<std::size_t>(r)])),
          static_cast<std::size_t>(b * team_.count + me()) * row, static_cast<std::size_t>(batch * team_.count) * row));
    if (r != me()) check(exchange.raise(to));
  }
  return at::from_blob(unwrap(exchange.wait()), {own_tokens(), batch, q.size(2), size}, q.options()).transpose(0, 1);
}

std::array<at::Tensor, 3> Sequence::to_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  const std::int64_t heads = q.size(2) / team_.count;
  // [tokens, batch, 3, heads, head size]: one exchange for all three, and received shares are in their place.
  const at::Tensor all = at::empty({total_, q.size(0), 3, heads, q.size(3)}, q.options());
  const std::vector<at::Tensor> receive = shares(all);
  std::vector<at::Tensor> send;
  for (std::int64_t r = 0; r < team_.count; ++r) {
    const auto part = [&](const at::Tensor& t) { return t.narrow(2, r * heads, heads).transpose(0, 1); };
    send.push_back(r == me() ? receive[static_cast<std::size_t>(r)]
                             : at::empty({own_tokens(), q.size(0), 3, heads, q.size(3)}, q.options()));
    at::stack_out(send.back(), {part(q), part(k), part(v)}, 2);
  }
  if (!q.is_meta()) exchange(send, receive);
  const auto one = [&](std::int64_t i) { return all.select(2, i).transpose(0, 1); };
  return {one(0), one(1), one(2)};
}

at::Tensor Sequence::to_tokens(const at::Tensor& x) const {
  const std::vector<at::Tensor> send = shares(x.transpose(0, 1).contiguous());
  std::vector<at::Tensor> received;
  for (std::int64_t r = 0; r < team_.count; ++r)
    received.push_back(r == me() ? send[static_cast<std::size_t>(r)]
                                 : at::empty({own_tokens(), x.size(0), x.size(2), x.size(3)}, x.options()));
  if (!x.is_meta()) exchange(send, received);
  return at::cat(received, 2).transpose(0, 1);
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Sequence* sequence) {
  const auto of = [](const at::Tensor& a, const at::Tensor& b, const at::Tensor& c) {
    return at::scaled_dot_product_attention(a.transpose(1, 2), b.transpose(1, 2), c.transpose(1, 2)).transpose(1, 2);
  };
  return (sequence ? sequence->attention(q, k, v, of) : of(q, k, v)).flatten(2);
}

}  // namespace ditfleet::pipeline::parallel
