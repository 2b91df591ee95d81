// A diffusion transformer: its weights, its compiled blocks, and the adapters of a request. Families derive from it and
// add what their blocks compute.
#pragma once

#include <chrono>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pipeline/nn/adapter_columns.h"
#include "pipeline/nn/transformer/weights.h"
#include "pipeline/parallel/sequence.h"
#include "pipeline/region/options.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline {

class BlockRegions;

// Where a transformer's weights come from, and how it computes.
struct TransformerSource {
  ComponentFiles files;
  std::string quantize = {};         // "fp8" (the linears of the blocks' programs), "nf4" (all linears) or empty
  std::string name = "transformer";  // of its weights in Placement::host_key
  std::int64_t adapter_rank = 0;     // columns beside each linear of compiled blocks
  bool f8_attention = false;         // in compiled blocks: see region::with_f8_attention()
  std::shared_ptr<region::RegionHost> regions = nullptr;
};

// Immutable after compile(), except that adapt() changes a copy. Copies share the weights. Call the functions on any
// thread.
class Transformer {
 public:
  virtual ~Transformer() = default;

  // The programs of the blocks, without and with adapters, that compile() uses after load() with the same arguments.
  // Reads headers only. `fp8_products`: see Parameters::set_fp8_products. Throws what load() throws.
  static std::vector<region::Program> programs(const TransformerSpec& spec, const TransformerSource& source,
                                               Placement placement, bool fp8_products);
  // Compiles the blocks of a model's transformers. Equal blocks share programs. Does nothing if the host is null or
  // runs transformers eagerly. Throws what BlockRegions and RegionHost::fall_back throw.
  static void compile(const std::vector<Transformer*>& experts, const std::shared_ptr<region::RegionHost>& host);
  // Replaces the weights by a copy with terms of adapters. The blocks run eagerly from now on if their columns are too
  // few. Throws what RegionHost::fall_back throws.
  void adapt(TransformerWeights weights);

  // Copies the adapters of a request to where compiled blocks read them. Call it on a copy with adapters, before its
  // blocks run, on the same stream, and for one request at a time.
  void load_adapters() const;
  // Overwrites what load_adapters() copied with zeros. Call it while no request with adapters runs.
  void clear_adapters() const;

  const TransformerWeights& weights() const { return weights_; }
  // Every linear of `weights` by its name in diffusers; the result points into them.
  std::vector<NamedLinear> named_linears(TransformerWeights& weights) const {
    return pipeline::named_linears(*spec_, weights);
  }
  const TransformerParts& parts() const { return parts_; }
  const parallel::Team& team() const { return team_; }  // all ranks of the region host
  std::int64_t bytes() const { return bytes_; }
  const std::map<std::string, int>& linears() const { return linears_; }  // as Parameters::linears()
  Placement placement() const { return placement_; }

 protected:
  Transformer(TransformerSpec spec, Placement placement);

  // Loads the weights. `heads`: of attention; each rank must get as many. Throws what Parameters and Team throw.
  void load(const TransformerSource& source, std::int64_t heads);
  // Programs with 8-bit attention from now on. Call it before load() or compile().
  void use_f8_attention();
  // Uses weights that are already loaded.
  void use(TransformerWeights weights) { weights_ = std::move(weights); }
  // compile() calls it when the blocks are compiled.
  virtual void compiled_blocks() {}
  // Loads GPU libraries: runs the operators that a request needs beside its blocks, on tiny tensors. compile() calls it
  // on another thread, before compiled_blocks().
  virtual void open_libraries(const region::RegionHost&) const {}

  const TransformerSpec& spec() const { return *spec_; }
  bool compiled() const { return regions_ != nullptr; }
  // How blocks run with this number of tokens and frames; kNone: eagerly.
  region::Mode mode_for(std::int64_t tokens, std::int64_t frames) const;
  // See BlockRegions::prewarm(). Does nothing if blocks run eagerly.
  void prewarm(std::span<const region::Sizes> sizes, bool adapters, std::size_t variant = 0) const;
  // Runs compiled block `index`; see BlockRegions::run().
  void run_block(std::size_t index, std::initializer_list<const at::Tensor*> given, std::vector<at::Tensor>& outputs,
                 const parallel::Sequence* sequence) const;
  // Runs block `index`, compiled, or eagerly with kNone. Its results replace `tokens`, in order, whose memory no other
  // code may read. `variant`: see BlockSpec::recipe().
  void run_block(region::Mode mode, std::size_t index, std::initializer_list<const at::Tensor*> given,
                 std::initializer_list<at::Tensor*> tokens, const parallel::Sequence* sequence,
                 std::size_t variant = 0) const;
  // Runs block `index` with LibTorch's operators, of its program without adapters, and each linear by apply_linear().
  // Returns the outputs. Thread-safe.
  std::vector<at::Tensor> run_eagerly(std::size_t index, std::initializer_list<const at::Tensor*> given,
                                      const parallel::Sequence* sequence, std::size_t variant = 0) const;
  // The adapters that compiled blocks read; null: none, or they are added eagerly.
  const AdapterColumns::Layout* adapters() const { return adapters_.get(); }
  // Makes the current stream wait for the copies of load_adapters(). run_block() does so itself.
  void join_adapters() const;

 private:
  std::shared_ptr<const TransformerSpec> spec_;
  TransformerWeights weights_;
  TransformerParts parts_;
  Placement placement_;
  parallel::Team team_;
  std::int64_t bytes_ = 0;
  std::map<std::string, int> linears_;
  bool computes_in_other_type_ = false;          // as in Parameters
  std::shared_ptr<const BlockRegions> regions_;  // of all experts; null: blocks run eagerly
  std::size_t expert_ = 0;                       // in regions_
  std::shared_ptr<const AdapterColumns::Layout> adapters_;
};

}  // namespace ditfleet::pipeline
