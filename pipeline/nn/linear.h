// A linear layer's parameters, what adapters add to it, and its application.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ditfleet::pipeline {

// Rows first_row … of the output get + scale · (x Aᵀ) Bᵀ.
struct LowRank {
  at::Tensor down;  // A: [rank, in]
  at::Tensor up;    // B: [rows, rank]
  std::int64_t first_row;
  double scale;
};

// Columns beside a weight for the B of adapters (regions read weight and B as one matrix).
struct Room {
  std::int64_t columns = 0;
  bool before = false;  // in front of the weight
};

struct LinearSlot {
  at::Tensor weight;     // [out, in]; within `wide` where there is room
  at::Tensor bias;       // [out], or undefined
  at::Tensor wide = {};  // [out, in + room.columns], or undefined; what stands in the room is finite
  Room room = {};
  std::vector<LowRank> low_rank = {};  // of one request's own copy of the slot; a model's slots have none
};

// A slot without a bias whose weight is yet to be written; its room holds zeros.
LinearSlot slot_with_room(std::int64_t out, std::int64_t in, Room room, const at::TensorOptions& options);
// The columns beside the weight: [out, room.columns].
at::Tensor room_of(const LinearSlot& slot);

// [..., in] → [..., out]. The product, then each term in turn, rounded where PEFT rounds: after A, B, the scale and the
// sum.
at::Tensor apply_linear(const LinearSlot& slot, const at::Tensor& x);

// A linear as adapters name it (lora/base.h), and the rows of which slot compute it.
struct NamedLinear {
  std::string name;
  LinearSlot* slot;
  std::int64_t first_row, rows;
};

// The linears whose rows lie one after the other in `slot`, all of one height.
void add_stacked(std::vector<NamedLinear>& linears, LinearSlot& slot, const std::vector<std::string>& names);
inline void add_named(std::vector<NamedLinear>& linears, LinearSlot& slot, const std::string& name) {
  add_stacked(linears, slot, {name});
}

}  // namespace ditfleet::pipeline
