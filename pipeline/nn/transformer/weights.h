// The weights of a diffusion transformer, as a table that its family gives: linears and tensors beside the repeated
// blocks, and those of each block.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/nn/parameters.h"
#include "pipeline/region/ir/builder.h"

namespace ditfleet::pipeline {

struct LinearSpec {
  std::vector<std::string> names;  // in diffusers, in a block without its prefix; their rows are stacked in this order
  std::int64_t in, out;            // out: of each name
  // The name of a block's linear in the block's program. Such a linear has columns for adapters. Empty: no program
  // computes the linear; the weight of a block's linear then leaves the device apart from the other weights.
  std::string input = {};
  bool columns_before = false;               // the columns precede the weight; else they follow it
  std::optional<c10::ScalarType> type = {};  // that the weight always has; else the placement's, or quantized
  bool bias = true;                          // false: the file has none, and it is zeros
};

struct TensorSpec {
  std::string name;  // as LinearSpec::names
  Shape shape;
  std::optional<c10::ScalarType> type = {};  // else the placement's
  std::string input = {};                    // of a block's program; empty: none
};

// Equal blocks that follow each other.
struct BlockSpec {
  using Weight = region::Builder::Weight;

  std::string prefix;  // in diffusers: "blocks."
  std::int64_t count;
  std::vector<LinearSpec> linears;
  std::vector<TensorSpec> tensors;
  std::vector<std::string> given;  // the program's inputs that each call gives, in order
  // Runs apart from the other blocks, by Transformer::run_eagerly() only: it is never compiled.
  bool apart = false;
  // The block's program, without or with adapters. `weights`: of the linears with an input, in order.
  using Recipe =
      std::function<Result<region::Program>(region::ElementType, bool adapters, const std::vector<Weight>& weights)>;
  Recipe program;
  // Other programs of the same block, and what calls give them. An eager one may leave out linears.
  struct Variant {
    std::vector<std::string> given;
    Recipe program;
    bool eager = false;  // never compiled
  };
  std::vector<Variant> variants = {};

  // Variant 0 is `program`, variant i is variants[i − 1].
  const Recipe& recipe(std::size_t variant) const { return variant == 0 ? program : variants[variant - 1].program; }
  const std::vector<std::string>& inputs(std::size_t variant) const {
    return variant == 0 ? given : variants[variant - 1].given;
  }
  bool compiles(std::size_t variant) const { return !apart && (variant == 0 || !variants[variant - 1].eager); }
};

struct TransformerSpec {
  std::string family;  // in messages and metrics
  std::vector<LinearSpec> linears;
  std::vector<TensorSpec> tensors;
  std::vector<BlockSpec> blocks;
  // Maps each parameter to its place in a file with other names. Null: there are no such files.
  std::function<FileNames(const Parameters&)> file_names = nullptr;
};

// In the order of the spec.
struct TransformerBlock {
  std::size_t spec;  // index in TransformerSpec::blocks
  std::vector<LinearSlot> linears;
  std::vector<at::Tensor> tensors;
};
struct TransformerWeights {
  std::vector<LinearSlot> linears;
  std::vector<at::Tensor> tensors;
  std::vector<TransformerBlock> blocks;  // all, in the order in which they run
};

// The weights that can leave the device, with a part for each block.
struct TransformerParts {
  std::shared_ptr<PartSequence> blocks;
  std::shared_ptr<PartSequence> apart;  // of linears that the programs do not compute
};

// Loads the weights. Reserves columns for adapters beside each linear of the blocks' programs: `adapter_rank` for each
// linear that is stacked in it. Adds the weights of each block to `parts`, unless they are null. Throws what Parameters
// and PartSequence::add throw.
TransformerWeights load_weights(const TransformerSpec& spec, Parameters& parameters, std::int64_t adapter_rank = 0,
                                const TransformerParts& parts = {});

// Returns only whether and how each linear is quantized (Parameters::format_of). Reads no weights.
TransformerWeights weight_formats(const TransformerSpec& spec, const Parameters& parameters);

// Every linear by its name in diffusers. The result points into `weights`.
std::vector<NamedLinear> named_linears(const TransformerSpec& spec, TransformerWeights& weights);

// Calls visit(linear, names) for all linears, with their whole names. The order is that of named_linears().
void each_linear(const TransformerSpec& spec,
                 const std::function<void(const LinearSpec& linear, const std::vector<std::string>& names)>& visit);

// The linears that the block's compiled program computes, in order.
std::vector<const LinearSlot*> program_linears(const TransformerSpec& spec, const TransformerBlock& block);

}  // namespace ditfleet::pipeline
