#include "pipeline/parallel/sequence.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>

#include <numeric>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline::parallel {
namespace {

void check(const Result<void>& done) {
  if (!done) throw Failure(done.error());
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

at::Tensor Sequence::own(const at::Tensor& x) const {
  return x.narrow(1, std::accumulate(tokens_.begin(), tokens_.begin() + me(), std::int64_t{0}), own_tokens());
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
  const auto [all_q, all_k, all_v] = to_heads(q, k, v);
  return to_tokens(attend(all_q, all_k, all_v));
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
