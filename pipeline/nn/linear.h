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

// Columns reserved next to a weight for the B of adapters: regions read weight and B as one matrix.
struct LoraColumns {
  std::int64_t count = 0;
  bool before = false;  // in front of the weight, else behind it
};

struct LinearSlot {
  at::Tensor weight;     // [out, in]; part of `wide` if columns are reserved
  at::Tensor bias;       // [out], or undefined
  at::Tensor wide = {};  // [out, in + lora_columns.count], or undefined; all finite
  LoraColumns lora_columns = {};
  std::vector<LowRank> low_rank = {};  // of one request's own copy of the slot; a model's slots have none
};

// A slot without a bias. Its weight is not initialized; its LoRA columns are zeros.
LinearSlot slot_with_lora_columns(std::int64_t out, std::int64_t in, LoraColumns lora_columns,
                                  const at::TensorOptions& options);
// The columns next to the weight: [out, lora_columns.count].
at::Tensor lora_columns_of(const LinearSlot& slot);

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
