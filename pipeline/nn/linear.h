// A linear layer: its parameters, the low-rank terms of adapters, and the computation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/memory/part_sequence.h"
#include "pipeline/nn/quantized.h"

namespace ditfleet::pipeline {

// Adds scale · (x Aᵀ) Bᵀ to the rows of the output from first_row.
struct LowRank {
  at::Tensor down;  // A: [rank, in]
  at::Tensor up;    // B: [rows, rank]
  std::int64_t first_row;
  double scale;
};

// Adds scale · values to the rows of the bias from first_row.
struct BiasChange {
  at::Tensor values;  // [rows]
  std::int64_t first_row;
  double scale;
};

// Columns reserved next to a weight for the B of adapters. Regions read weight and B as one matrix.
struct LoraColumns {
  std::int64_t count = 0;
  bool before = false;  // true: before the weight; false: after it
};

struct LinearSlot {
  at::Tensor weight;  // [out, in]; part of `wide` if columns are reserved; undefined if `quantized`
  at::Tensor bias;    // [out], or undefined
  // [out, in + lora_columns.count], or undefined; all finite. With `quantized` [out, lora_columns.count].
  at::Tensor wide = {};
  LoraColumns lora_columns = {};
  // Of adapters: set only in a request's copy; empty in the model itself.
  std::vector<LowRank> low_rank = {};
  std::vector<BiasChange> bias_changes = {};
  std::shared_ptr<const QuantizedWeight> quantized = nullptr;

  bool defined() const { return quantized || weight.defined(); }  // false: the model does without this linear
  std::int64_t in() const { return quantized ? quantized->in : weight.size(1); }
  std::int64_t out() const { return quantized ? quantized->out : weight.size(0); }
};

// Allocates a linear without a bias. Its weight is not initialized; its LoRA columns are zeros.
LinearSlot slot_with_lora_columns(std::int64_t out, std::int64_t in, LoraColumns lora_columns,
                                  const at::TensorOptions& options);
// The columns next to the weight: [out, lora_columns.count].
at::Tensor lora_columns_of(const LinearSlot& slot);

// Adds these parameters as the next part of `parts`. The columns beside a quantized weight stay on the device. Throws
// what PartSequence::add throws.
void add_part(PartSequence& parts, const std::vector<const LinearSlot*>& linears,
              const std::vector<at::Tensor>& tensors = {});

// The bias with its changes, added in fp32 and rounded once: [out], or undefined.
at::Tensor bias_of(const LinearSlot& slot);

// Converts [..., in] to [..., out]. Computes the product and then adds the terms in order. Rounds like PEFT: after A,
// B, the scale and the sum.
at::Tensor apply_linear(const LinearSlot& slot, const at::Tensor& x);

// A linear by its name in lora/base.h, and the rows of the LinearSlot that compute it.
struct NamedLinear {
  std::string name;
  LinearSlot* slot;
  std::int64_t first_row, rows;
};

// Adds the linears that are stacked in `slot`, all with the same number of rows.
void add_stacked(std::vector<NamedLinear>& linears, LinearSlot& slot, const std::vector<std::string>& names);
inline void add_named(std::vector<NamedLinear>& linears, LinearSlot& slot, const std::string& name) {
  add_stacked(linears, slot, {name});
}

}  // namespace ditfleet::pipeline
