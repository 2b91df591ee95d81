// Loads the parameters of a model from its checkpoint into plain structs of tensors. The functions that compute a block
// receive these structs as arguments, so the N copies of a block share one function or compiled program.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/device/device.h"
#include "pipeline/device/upload.h"
#include "pipeline/nn/linear.h"
#include "pipeline/weights/checkpoint.h"
#include "pipeline/weights/stored_weights.h"

namespace ditfleet::region {
struct RegionHost;
}

namespace ditfleet::pipeline::parallel {
class Group;
}

namespace ditfleet::pipeline {

struct NormSlot {
  at::Tensor weight, bias;  // [channels]
};

struct ConvSlot {
  at::Tensor weight;  // [out, in, k, k]
  at::Tensor bias;    // [out]
};

using Shape = std::vector<std::int64_t>;

// Rows of a tensor in a file.
struct FileRows {
  std::string name;                                 // of a linear, or of a tensor
  std::int64_t first_row = 0, rows = 0, total = 0;  // total: rows of the tensor in the file; 0: all of them are meant
};
// Maps a linear ("a.proj", both weight and bias) or a tensor ("a.weight") to its rows, in order, in a file with other
// names.
using FileNames = std::map<std::string, std::vector<FileRows>, std::less<>>;

// Returns a contiguous copy of a tensor in memory, on the placement's device and in its element type. Throws Failure
// (kDataCorrupt) for an element type that weights cannot have.
at::Tensor copy_to(Placement placement, const TensorView& view);

// Where a component is.
struct ComponentFiles {
  ComponentFiles(std::string dir, std::string file = {}, std::vector<std::string_view> prefixes = {})
      : dir(std::move(dir)), file(std::move(file)), prefixes(std::move(prefixes)) {}
  ComponentFiles(const char* dir) : dir(dir) {}
  std::string dir;                         // with config.json, and the weights if `file` is empty
  std::string file;                        // safetensors or GGUF, perhaps with other components
  std::vector<std::string_view> prefixes;  // of its tensors in `file`: see Checkpoint::open_file()
};
// Throws the errors of Checkpoint as Failure.
Checkpoint open_checkpoint(const ComponentFiles& from, Library library);

// Copies tensors from a checkpoint to the placement's device. Linears that the checkpoint stores quantized stay
// quantized; a GPU without fp8 products computes fp8 weights in the placement's type. Converts all other tensors to the
// placement's element type. The caller owns the returned tensors, which are contiguous. All members throw
// Failure: kNotFound (a missing tensor), kDataCorrupt (a wrong shape or type, with the right one in the message, or a
// file that became shorter) or kUnavailable (it cannot be read). They throw LibTorch's exceptions when memory runs out.
// Not thread-safe.
class Parameters {
 public:
  // `config`: quantization_config of config.json, or null.
  Parameters(Checkpoint checkpoint, Placement placement, const json::object* config = nullptr);
  // A component's folder, with its quantization_config, or its file.
  static Parameters open(const ComponentFiles& from, Library library, Placement placement);

  // Quantizes the linears that `chosen` accepts while they are loaded, to "nf4" or "fp8" (with dynamic activations).
  // fp8 leaves linears with a dimension that is no multiple of 16 as they are. Throws Failure (kInvalidArgument) if the
  // checkpoint stores quantized linears of another format than GGUF.
  void quantize_on_load(const std::string& format, std::function<bool(std::string_view linear)> chosen);
  void check_quantize_on_load() const;  // throws what quantize_on_load() throws
  bool has_quantized() const { return !stored_.empty(); }
  bool has_gguf() const { return has_quantized() && stored_.all_gguf(); }
  // The host of the program that computes the values of quantized weights on a GPU. Null: LibTorch computes them.
  // Its ranks, which load the same parameters in the same order, read them together on GPUs.
  void set_regions(std::shared_ptr<const region::RegionHost> regions);
  // Whether products with fp8 weights are computed in fp8 or in the placement's type. By default the placement's device
  // decides.
  void set_fp8_products(bool allowed) { fp8_products_ = allowed; }
  void set_file_names(FileNames names) { file_names_ = std::move(names); }

  bool contains(const std::string& name) const { return checkpoint_.contains(name); }
  std::vector<std::string> names() const { return checkpoint_.names(); }
  const std::string& dir() const { return checkpoint_.dir(); }

  // `type`: the tensor's type on the device if it is not the placement's.
  at::Tensor tensor(const std::string& name, const Shape& shape, std::optional<c10::ScalarType> type = {});
  LinearSlot linear(const std::string& prefix, std::int64_t in, std::int64_t out, bool bias = true,
                    LoraColumns lora_columns = {});
  // The format that stacked_linear() would choose: its result's `quantized` without parts; null: not quantized. Reads
  // no weights.
  std::shared_ptr<QuantizedWeight> format_of(const std::vector<std::string>& linears, std::int64_t in,
                                             const Shape& outs) const;
  // Stacks the rows of several linears with the same input. `outs`: the rows of each.
  LinearSlot stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in, const Shape& outs,
                            bool bias = true, LoraColumns lora_columns = {});
  LinearSlot stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in, std::int64_t out_of_each,
                            bool bias = true, LoraColumns lora_columns = {}) {
    return stacked_linear(prefixes, in, Shape(prefixes.size(), out_of_each), bias, lora_columns);
  }
  NormSlot norm(const std::string& prefix, std::int64_t channels);
  ConvSlot conv(const std::string& prefix, std::int64_t in, std::int64_t out, std::int64_t kernel);

  // The tensors with this prefix that were not requested, sorted by name. If there are any, config.json describes a
  // smaller model than the weights belong to.
  std::vector<std::string> unused(std::string_view prefix) const;
  // The model does without the tensors with this prefix: unused() leaves them out.
  void skip(std::string_view prefix);
  // Call it when all parameters are loaded. Logs a warning if there are such tensors, as diffusers does, and the number
  // of linears in each format if any is quantized. Throws Failure (kDataCorrupt) if one of the unused tensors belongs
  // to a quantization format: without it the weights would be wrong.
  void finish(std::string_view prefix) const;

  std::int64_t bytes() const { return bytes_; }  // device memory of all tensors that were returned
  // Number of linears of the checkpoint by format: "nf4", "fp8", …; those that are not quantized by the placement's
  // type, "bf16" or "fp32".
  const std::map<std::string, int>& linears() const { return linears_; }
  // Whether products with a quantized weight are computed in another type than the placement's.
  bool computes_in_other_type() const { return computes_in_other_type_; }
  Placement placement() const { return placement_; }

 private:
  std::vector<FileRows> rows_in_file(const std::string& linear, std::int64_t rows) const;
  bool quantizes(const std::string& linear, std::int64_t in, std::int64_t out) const;
  bool stores_quantized(const std::string& linear, std::int64_t out) const;
  c10::ScalarType nf4_type() const;  // that stored NF4 weights compute in
  at::Tensor load(const std::string& name, const Shape& shape, std::optional<c10::ScalarType> type = {});
  // The values of GGUF's blocks in these bytes of a tensor.
  at::Tensor blocks_as(const StoredTensor& from, std::int64_t begin, std::int64_t size, const Shape& shape,
                       c10::ScalarType type);
  std::shared_ptr<const region::Dequantizer> dequantizer(bool gguf);
  // Null: not quantized.
  std::shared_ptr<const QuantizedWeight> quantized_weight(const std::vector<std::string>& linears, std::int64_t in,
                                                          const Shape& outs);
  QuantizedRows stored_rows(const FileRows& rows, const StoredWeight& stored, std::int64_t in);
  // Reads bytes of a tensor from `begin` on as `shape` of type `stored`, on the device as `type`.
  at::Tensor read(const StoredTensor& from, std::int64_t begin, const Shape& shape, c10::ScalarType stored,
                  c10::ScalarType type);
  // Reads bytes of a tensor from `begin` on into `bytes`.
  static void read_bytes(const StoredTensor& from, std::int64_t begin, std::span<std::byte> bytes);
  // Reads bytes into memory of a GPU. Each rank reads a part and gets the rest from the others.
  at::Tensor upload(const StoredTensor& from, std::int64_t begin, std::int64_t size);
  std::byte* staging(std::int64_t size);
  void check_shape(const std::string& name, const Shape& shape, const Shape& right) const;

  Checkpoint checkpoint_;
  Placement placement_;
  StoredWeights stored_;
  FileNames file_names_;
  std::string quantize_;  // "nf4", "fp8" or empty
  std::function<bool(std::string_view linear)> chosen_;
  std::shared_ptr<const region::RegionHost> regions_;
  std::shared_ptr<parallel::Group> ranks_;  // null: one process, or a CPU
  std::array<std::optional<std::shared_ptr<const region::Dequantizer>>, 2> dequantizers_;  // of GGUF: the second
  bool fp8_products_;
  bool computes_in_other_type_ = false;
  at::Tensor staging_;               // bytes on the way to another element type
  std::unique_ptr<Upload> upload_;   // on a GPU
  std::vector<std::string> ragged_;  // linears that fp8 cannot take
  std::set<std::string> taken_;
  std::int64_t bytes_ = 0;
  std::map<std::string, int> linears_;
};

}  // namespace ditfleet::pipeline
