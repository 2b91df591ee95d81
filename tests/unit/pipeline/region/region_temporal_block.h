// A block of no model, for tests: attention over the frames of each place of a video. Symbols: batch, frames, places:
// one program serves any number of frames. Activation video [batch, frames, places, D]; tables rope f32 [frames,
// head_dim], shift, scale, gate [batch, 1, 1, D]; parameters qkv, norm_q, norm_k, out. Output: video.
#pragma once

#include "pipeline/families/flux/block_programs.h"
#include "pipeline/region/ir/builder.h"

namespace ditfleet::region {

inline Result<Program> temporal_block(const BlockShape& s) {
  using Ref = Builder::Ref;
  constexpr double kEps = 1e-6;
  Builder b("temporal", s.type);
  const std::int64_t d = s.width();
  const Dim batch = Dim::symbol("batch"), frames = Dim::symbol("frames"), places = Dim::symbol("places");
  const Ref x = b.activation("video", {batch, frames, places, d});
  const Ref rope =
      b.reshape("rope.rows", b.table("rope", ElementType::kF32, {frames, s.head_dim}), {1, 1, frames, 1, s.head_dim});
  const Ref shift = b.table("shift", s.type, {batch, 1, 1, d}), scale = b.table("scale", s.type, {batch, 1, 1, d}),
            gate = b.table("gate", s.type, {batch, 1, 1, d});
  const auto qkv_slots = b.linear_slots("qkv", d, 3 * d), out = b.linear_slots("out", d, d);
  const Ref norm_q = b.parameter("norm_q", {s.head_dim}), norm_k = b.parameter("norm_k", {s.head_dim});

  const Ref normed = b.modulate("modulated", b.layer_norm("normed", x, kEps), scale, shift);
  const Ref qkv = b.linear("qkv_out", normed, qkv_slots);
  // Tokens of one place, in the order of the frames: [batch, places, frames, heads, head_dim].
  const auto over_frames = [&](const std::string& name, int part) {
    const Ref flat = b.slice(name + ".flat", qkv, 3, part * d, d);
    return b.permute(name, b.reshape(name + ".heads", flat, {batch, frames, places, s.heads, s.head_dim}),
                     {0, 2, 1, 3, 4});
  };
  const Ref q = b.rope("q", b.rms_norm("q.normed", over_frames("q_in", 0), norm_q, kEps), rope);
  const Ref k = b.rope("k", b.rms_norm("k.normed", over_frames("k_in", 1), norm_k, kEps), rope);
  const Ref attended = b.attention("attended", q, k, over_frames("v", 2));
  const Ref back =
      b.reshape("attended.flat", b.permute("attended.frames", attended, {0, 2, 1, 3, 4}), {batch, frames, places, d});
  return b.finish({b.gate_residual("after", x, gate, b.linear("branch", back, out))});
}

}  // namespace ditfleet::region
