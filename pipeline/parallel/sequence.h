// How the ranks of a group share one forward of a transformer. Sequence parallelism after DeepSpeed Ulysses
// (https://arxiv.org/abs/2309.14509): each rank computes some of the tokens, and in attention some of the heads of all
// tokens. Each half of the ranks computes one of the two forwards of a guided step.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "pipeline/parallel/group.h"

namespace ditfleet::pipeline::parallel {

// The ranks of a group that share a forward, with this rank among them. All ranks of the group call the same functions
// in the same order, also those of other teams. The functions throw Failure with the group's errors.
struct Team {
  std::shared_ptr<Group> group;  // null: this process works alone
  int first = 0, count = 1;

  explicit operator bool() const { return count > 1; }
  static Team all(std::shared_ptr<Group> group);  // of its ranks; null: none
  // Both forwards of a guided step, the positive one first. Half of the ranks compute one and half the other, if their
  // number is even; else all share one after the other. `forward(negative, team)` returns a tensor that has the same
  // size for both.
  using Forward = std::function<at::Tensor(bool negative, const Team& team)>;
  std::pair<at::Tensor, at::Tensor> both(const Forward& forward) const;
  // Throws kInvalidArgument unless each rank gets as many heads.
  void check_heads(std::int64_t heads) const;
};

// How the ranks of a team share tokens. The first ranks have one token less if the number is not divisible. On tensors
// without memory nothing is sent.
class Sequence {
 public:
  Sequence(Team team, std::int64_t tokens);
  // The tokens of both, one after another in each rank.
  Sequence(const Sequence& first, const Sequence& second);

  // A view of this rank's tokens of x [batch, tokens, ..].
  at::Tensor own(const at::Tensor& x) const;
  // How many of this rank's tokens are among the first `count` of all.
  std::int64_t own_before(std::int64_t count) const;
  // x [batch, own tokens, ..] of all ranks → [batch, tokens, ..].
  at::Tensor gather(const at::Tensor& x) const;
  // Attention across the ranks. q, k, v and the result: [batch, own tokens, heads, head size]. `attend` gets [batch,
  // all tokens, own heads, head size], with strided rows and the tokens in the order of the ranks, and returns that
  // size. The result may be memory that the next call overwrites, in the order of the current stream.
  using Attend = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
  at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Attend& attend) const;
  // Begins to send q, k and v, if the group has an exchange, so that work that is enqueued before attention() runs
  // meanwhile. attention() must follow with the same tensors, which must not change until then.
  void start(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

 private:
  // By the group's exchange: false if it has none, or none for these sizes; the tensors must have adjacent heads.
  bool send_heads(const std::array<at::Tensor, 3>& qkv) const;
  at::Tensor attention_by_exchange(const at::Tensor& q, const Attend& attend) const;
  std::array<at::Tensor, 3> to_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;
  at::Tensor to_tokens(const at::Tensor& x) const;
  std::int64_t me() const { return team_.group->rank() - team_.first; }
  std::int64_t first_token(std::int64_t rank) const;
  std::int64_t own_tokens() const { return tokens_[static_cast<std::size_t>(me())]; }
  // `send` and `receive`: one for each rank of the team.
  void exchange(const std::vector<at::Tensor>& send, const std::vector<at::Tensor>& receive) const;
  // Views of t [all tokens, ..], one for each rank.
  std::vector<at::Tensor> shares(const at::Tensor& t) const;

  Team team_;
  std::vector<std::int64_t> tokens_;  // of each rank of the team
  std::int64_t total_;
};

// LibTorch's attention of q, k, v [batch, tokens, heads, head size] as [batch, tokens, heads · head size]. `sequence`:
// how ranks share the tokens, of which q, k and v have this rank's; null: one rank.
at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Sequence* sequence);

}  // namespace ditfleet::pipeline::parallel
