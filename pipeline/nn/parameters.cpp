#include "pipeline/nn/parameters.h"

#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <optional>
#include <utility>

#include "pipeline/device/failure.h"
#include "pipeline/nn/config_file.h"
#include "pipeline/parallel/group.h"
#include "pipeline/region/libraries/fp8.h"
#include "pipeline/region/run/region_host.h"
#include "pipeline/weights/gguf.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

// Element types that weights may come in; what is quantized needs more than a cast.
std::optional<c10::ScalarType> scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kF32: return c10::ScalarType::Float;
    case DType::kF16: return c10::ScalarType::Half;
    case DType::kBF16: return c10::ScalarType::BFloat16;
    case DType::kF64: return c10::ScalarType::Double;
    case DType::kF8E4M3: return c10::ScalarType::Float8_e4m3fn;
    case DType::kF8E5M2: return c10::ScalarType::Float8_e5m2;
    default: return {};
  }
}

constexpr std::int64_t kBlock = 16 << 20;           // bytes that a thread reads at a time on a CPU
constexpr std::int64_t kLeastShared = 4 << 10;      // bytes that ranks read together
constexpr const char* kComfyMarker = "scaled_fp8";  // checked by StoredWeights
constexpr const char* kComfyTokenizer = "spiece_model";
constexpr std::int64_t kNf4Block = 64, kFp8Multiple = 16;

bool is_fp8(const StoredTensor& stored) {
  return stored.entry->dtype == DType::kF8E4M3 || stored.entry->dtype == DType::kF8E5M2;
}

const char* type_name(c10::ScalarType type) { return type == c10::ScalarType::Float ? "fp32" : "bf16"; }

// Joins the parts of a stack into one if all are fp8 of one type, as products with dynamic activations need it.
void join_fp8(std::vector<QuantizedRows>& parts) {
  const c10::ScalarType type = parts.front().codes.scalar_type();
  if (parts.size() == 1 || (type != c10::ScalarType::Float8_e4m3fn && type != c10::ScalarType::Float8_e5m2)) return;
  QuantizedRows all;
  std::vector<at::Tensor> codes, scales;
  for (const QuantizedRows& part : parts) {
    if (part.codes.scalar_type() != type) return;
    codes.push_back(part.codes.view(c10::ScalarType::Byte));
    scales.push_back(part.scales);
    all.rows += part.rows;
  }
  all.codes = at::cat(codes, 0).view(type);
  all.scales = at::cat(scales, 0);
  parts = {all};
}

}  // namespace

at::Tensor copy_to(Placement placement, const TensorView& view) {
  const auto type = scalar_type(view.dtype);
  if (!type)
    fail(Code::kDataCorrupt, "tensor " + std::string(view.name) + " is of type " + std::string(dtype_name(view.dtype)) +
                                 "; weights must be F32, BF16, F16, F64 or F8");
  return at::from_blob(const_cast<std::byte*>(view.bytes.data()), Shape(view.shape.begin(), view.shape.end()), *type)
      .to(placement.device, placement.dtype, /*non_blocking=*/false, /*copy=*/true);
}

Parameters::Parameters(Checkpoint checkpoint, Placement placement, const json::object* config)
    : checkpoint_(std::move(checkpoint)),
      placement_(placement),
      stored_(unwrap(StoredWeights::find(checkpoint_, config))),
      fp8_products_(region::has_fp8_products(placement.real_device())) {}

Checkpoint open_checkpoint(const ComponentFiles& from, Library library) {
  return unwrap(from.file.empty() ? Checkpoint::open(from.dir, library)
                                  : Checkpoint::open_file(from.file, from.prefixes));
}

Parameters Parameters::open(const ComponentFiles& from, Library library, Placement placement) {
  const std::string file = from.dir + "/config.json";
  std::optional<ConfigFile> config;
  if (from.file.empty() && std::filesystem::exists(file)) config = ConfigFile(file).child("quantization_config");
  return Parameters(open_checkpoint(from, library), placement, config ? &config->fields() : nullptr);
}

void Parameters::check_quantize_on_load() const {
  if (!stored_.all_gguf())
    fail(Code::kInvalidArgument, dir() + ": the weights are already quantized; remove `quantize` for this component",
         "quantize");
}

void Parameters::quantize_on_load(const std::string& format, std::function<bool(std::string_view linear)> chosen) {
  check_quantize_on_load();
  quantize_ = format;
  chosen_ = std::move(chosen);
}

void Parameters::check_shape(const std::string& name, const Shape& shape, const Shape& right) const {
  if (shape != right)
    fail(Code::kDataCorrupt, dir() + ": tensor " + name + " has shape " + shape_text(shape) +
                                 ", but config.json requires " + shape_text(right));
}

// On a CPU the page cache is as fast as what the other ranks would send.
void Parameters::set_regions(std::shared_ptr<const region::RegionHost> regions) {
  regions_ = std::move(regions);
  if (regions_ && placement_.device.is_cuda()) ranks_ = regions_->ranks;
}

void Parameters::read_bytes(const StoredTensor& from, std::int64_t begin, std::span<std::byte> bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  at::parallel_for(0, (size + kBlock - 1) / kBlock, 1, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t at = first * kBlock, end = std::min(size, last * kBlock);
    unwrap(
        from.file.read(*from.entry, static_cast<std::uint64_t>(begin + at), {bytes.data() + at, bytes.data() + end}));
  });
}

// Reused, because the kernel clears new memory, which takes longer than reading.
std::byte* Parameters::staging(std::int64_t size) {
  if (staging_.numel() < size) staging_ = at::empty({size}, at::kByte);
  return static_cast<std::byte*>(staging_.mutable_data_ptr());
}

at::Tensor Parameters::upload(const StoredTensor& from, std::int64_t begin, std::int64_t size) {
  const at::Tensor all = at::empty({size}, at::TensorOptions(at::kByte).device(placement_.device));
  if (!upload_) upload_ = std::make_unique<Upload>(placement_.device);
  const auto fill = [&](const at::Tensor& to) {
    upload_->fill(to, [&, first = begin + to.storage_offset()](std::int64_t at, std::span<std::byte> bytes) {
      unwrap(from.file.read(*from.entry, static_cast<std::uint64_t>(first + at), bytes));
    });
  };
  if (!ranks_ || size < kLeastShared) {
    fill(all);
    return all;
  }
  std::vector<at::Tensor> shares;
  for (std::int64_t r = 0, ranks = ranks_->size(); r < ranks; ++r)
    shares.push_back(all.slice(0, size * r / ranks, size * (r + 1) / ranks));
  const at::Tensor& own = shares[static_cast<std::size_t>(ranks_->rank())];
  fill(own);
  if (auto gathered = ranks_->all_gather(own, shares); !gathered) throw Failure(gathered.error());
  return all;
}

at::Tensor Parameters::read(const StoredTensor& from, std::int64_t begin, const Shape& shape, c10::ScalarType stored,
                            c10::ScalarType type) {
  if (placement_.device.is_meta()) return at::empty(shape, at::TensorOptions(type).device(placement_.device));
  const std::int64_t size = c10::multiply_integers(shape) * static_cast<std::int64_t>(c10::elementSize(stored));
  if (!placement_.device.is_cpu()) return upload(from, begin, size).view(stored).view(shape).to(type);
  // Straight into the returned tensor if it is of the file's type.
  const at::Tensor out = type == stored ? at::empty(shape, stored) : at::from_blob(staging(size), shape, stored);
  read_bytes(from, begin, {static_cast<std::byte*>(out.mutable_data_ptr()), static_cast<std::size_t>(size)});
  return type == stored ? out : out.to(type);
}

std::vector<FileRows> Parameters::rows_in_file(const std::string& name, std::int64_t rows) const {
  const auto at = file_names_.find(name);
  if (at == file_names_.end()) return {{name, 0, rows, rows}};
  if (at->second.front().total == 0) return {{at->second.front().name, 0, rows, rows}};
  return at->second;
}

at::Tensor Parameters::tensor(const std::string& name, const Shape& shape, std::optional<c10::ScalarType> type) {
  const at::Tensor out = load(name, shape, type);
  bytes_ += static_cast<std::int64_t>(out.nbytes());
  return out;
}

at::Tensor Parameters::load(const std::string& name, const Shape& shape, std::optional<c10::ScalarType> wanted) {
  const auto dot = name.rfind('.');
  const std::string suffix = dot == std::string::npos || file_names_.contains(name) ? "" : name.substr(dot);
  std::vector<at::Tensor> parts;
  for (const FileRows& rows : rows_in_file(suffix.empty() ? name : name.substr(0, dot), shape[0])) {
    const std::string stored = rows.name + suffix;
    if (const StoredWeight* weight = stored_.find(rows.name); suffix == ".weight" && weight && !weight->scales.empty())
      fail(Code::kDataCorrupt, dir() + ": tensor " + stored + " is quantized; in this model only linears can be");
    const auto [file, entry] = unwrap(checkpoint_.tensor(stored));
    Shape part = shape, whole = shape;
    part[0] = rows.rows;
    whole[0] = rows.total;
    Shape found = entry->shape;  // a linear may be a convolution of 1×1 in a file with other names
    while (!file_names_.empty() && found.size() > whole.size() && found.back() == 1) found.pop_back();
    check_shape(stored, found, whole);
    const std::int64_t bytes = static_cast<std::int64_t>(entry->end - entry->begin);
    taken_.insert(stored);
    if (entry->blocks != 0) {
      const std::int64_t row = rows.total > 0 ? bytes / rows.total : 0;
      parts.push_back(
          blocks_as({file, entry}, row * rows.first_row, row * rows.rows, part, wanted.value_or(placement_.dtype)));
      continue;
    }
    const auto type = scalar_type(entry->dtype);
    if (!type)
      fail(Code::kDataCorrupt, dir() + ": tensor " + stored + " is of type " + std::string(dtype_name(entry->dtype)) +
                                   "; weights must be F32, BF16, F16, F64 or F8");
    parts.push_back(read({file, entry}, rows.total > 0 ? bytes / rows.total * rows.first_row : 0, part, *type,
                         wanted.value_or(placement_.dtype)));
  }
  return parts.size() == 1 ? parts.front() : at::cat(parts, 0);
}

at::Tensor Parameters::blocks_as(const StoredTensor& from, std::int64_t begin, std::int64_t size, const Shape& shape,
                                 c10::ScalarType type) {
  if (placement_.device.is_meta()) return at::empty(shape, at::TensorOptions(type).device(placement_.device));
  const at::Tensor codes = at::empty({size}, at::kByte);
  read_bytes(from, begin, {static_cast<std::byte*>(codes.mutable_data_ptr()), static_cast<std::size_t>(size)});
  return gguf_tensor(from.entry->blocks, codes).view(shape).to(placement_.device, type);
}

std::vector<std::string> Parameters::unused(std::string_view prefix) const {
  std::vector<std::string> left;
  for (const std::string& name : names())
    if (name.starts_with(prefix) && !taken_.contains(name) && name != kComfyMarker && name != kComfyTokenizer)
      left.push_back(name);
  return left;
}

void Parameters::skip(std::string_view prefix) {
  for (const std::string& name : names())
    if (name.starts_with(prefix)) taken_.insert(name);
}

c10::ScalarType Parameters::nf4_type() const {
  const std::string& stored = stored_.nf4_compute();
  if (stored.empty()) return placement_.dtype;
  return stored == "bfloat16" ? c10::ScalarType::BFloat16 : c10::ScalarType::Float;
}

void Parameters::finish(std::string_view prefix) const {
  const auto left = unused(prefix);
  for (const std::string& name : left)
    if (is_quantization_tensor(name))
      fail(Code::kDataCorrupt, dir() + ": tensor " + excerpt(name, 120) +
                                   " belongs to a quantization format, but to no quantized linear of this model");
  if (!left.empty())
    spdlog::warn("{}: {} weights are not used, such as {}; config.json describes a smaller model", dir(), left.size(),
                 excerpt(left.front(), 120));
  if (!ragged_.empty())
    spdlog::info("{}: {} linears stay in {} because a dimension is no multiple of 16, such as {}", dir(),
                 ragged_.size(), type_name(placement_.dtype), ragged_.front());
  if (linears_.size() == linears_.count(type_name(placement_.dtype))) return;  // none is quantized
  std::string counts;
  for (const auto& [format, count] : linears_)
    counts += (counts.empty() ? "" : ", ") + std::to_string(count) + " in " + format;
  if (!placement_.device.is_meta()) spdlog::info("{}: linears: {}", dir(), counts);
  const std::string& compute = stored_.nf4_compute();
  if (compute.empty() || !linears_.contains("nf4") || nf4_type() == placement_.dtype) return;
  spdlog::info("{}: NF4 linears compute in {}, because bnb_4bit_compute_dtype is {}{}", dir(), type_name(nf4_type()),
               compute,
               nf4_type() == c10::ScalarType::Float
                   ? "; with bfloat16 in config.json their products are several times as fast on a GPU"
                   : "");
}

bool Parameters::quantizes(const std::string& linear, std::int64_t in, std::int64_t out) const {
  return chosen_ && chosen_(linear) && (quantize_ != "fp8" || (in % kFp8Multiple == 0 && out % kFp8Multiple == 0));
}

bool Parameters::stores_quantized(const std::string& linear, std::int64_t out) const {
  bool any = false;
  for (const FileRows& rows : rows_in_file(linear, out)) {
    const std::string weight = rows.name + ".weight";
    if (stored_.find(rows.name))
      any = true;
    else if (stored_.has_scales() && checkpoint_.contains(weight) && is_fp8(unwrap(checkpoint_.tensor(weight))))
      fail(Code::kDataCorrupt, dir() + ": tensor " + weight + " is fp8 and has no scale, unlike others in this file");
  }
  return any;
}

QuantizedRows Parameters::stored_rows(const FileRows& rows, const StoredWeight& stored, std::int64_t in) {
  check_shape(stored.codes, stored.shape, {rows.total, in});
  const StoredTensor from = unwrap(checkpoint_.tensor(stored.codes));
  taken_.insert(stored.tensors.begin(), stored.tensors.end());
  if (stored.blocks != 0) {
    const GgufBlocks& blocks = gguf_blocks(stored.blocks);
    const std::int64_t row = in / blocks.values * blocks.bytes;
    return {read(from, row * rows.first_row, {row * rows.rows}, c10::ScalarType::Byte, c10::ScalarType::Byte),
            {},
            rows.rows,
            stored.blocks};
  }
  const std::vector<float> scales = stored.scales.empty() || placement_.device.is_meta()
                                        ? std::vector<float>(static_cast<std::size_t>(rows.total), 1.0F)
                                        : unwrap(StoredWeights::scales(checkpoint_, stored));
  const auto on_device = [&](std::int64_t first, std::int64_t count) {
    if (placement_.device.is_meta())
      return at::empty({count}, at::TensorOptions(c10::ScalarType::Float).device(placement_.device));
    return at::from_blob(const_cast<float*>(scales.data()) + first, {count}, c10::ScalarType::Float)
        .to(placement_.device, c10::ScalarType::Float, /*non_blocking=*/false, /*copy=*/true);
  };
  if (!stored.nf4) {
    const c10::ScalarType type = *scalar_type(from.entry->dtype);
    return {read(from, rows.first_row * in, {rows.rows, in}, type, type), on_device(rows.first_row, rows.rows),
            rows.rows};
  }
  const std::int64_t first = rows.first_row * in, count = rows.rows * in;
  const bool to_the_end = rows.first_row + rows.rows == rows.total;
  if (first % kNf4Block != 0 || (count % kNf4Block != 0 && !to_the_end))
    fail(Code::kDataCorrupt, dir() + ": tensor " + stored.codes +
                                 " holds several linears, and a block of NF4 belongs to "
                                 "two of them, which is not supported; use a folder in diffusers' layout");
  return {read(from, first / 2, {(count + 1) / 2}, c10::ScalarType::Byte, c10::ScalarType::Byte),
          on_device(first / kNf4Block, (count + kNf4Block - 1) / kNf4Block), rows.rows};
}

std::shared_ptr<QuantizedWeight> Parameters::format_of(const std::vector<std::string>& linears, std::int64_t in,
                                                       const Shape& outs) const {
  auto made = std::make_shared<QuantizedWeight>();
  made->out = std::accumulate(outs.begin(), outs.end(), std::int64_t{0});
  made->in = in;
  made->compute = placement_.dtype;
  made->dynamic = fp8_products_;
  bool any = false;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const std::string& linear = linears[i];
    const bool on_load = quantizes(linear, in, outs[i]), stored = !on_load && stores_quantized(linear, outs[i]);
    any = any || on_load || stored;
    made->dynamic = made->dynamic && ((on_load && quantize_ == "fp8") || stored);
    if (!stored) continue;
    for (const FileRows& rows : rows_in_file(linear, outs[i])) {
      made->dynamic = made->dynamic && stored_.find(rows.name)->dynamic;
      if (stored_.find(rows.name)->nf4) made->compute = nf4_type();
    }
  }
  return any ? made : nullptr;
}

std::shared_ptr<const region::Dequantizer> Parameters::dequantizer(bool gguf) {
  auto& one = dequantizers_[gguf];
  if (!one) one = regions_ ? region::make_dequantizer(*regions_, gguf) : nullptr;
  return *one;
}

std::shared_ptr<const QuantizedWeight> Parameters::quantized_weight(const std::vector<std::string>& linears,
                                                                    std::int64_t in, const Shape& outs) {
  auto made = format_of(linears, in, outs);
  if (!made) return nullptr;
  for (std::size_t i = 0; i < linears.size(); ++i) {
    const std::string& linear = linears[i];
    const std::int64_t out = outs[i];
    std::string format = std::string(type_name(placement_.dtype));
    if (quantizes(linear, in, out)) {
      const at::Tensor weight = load(linear + ".weight", {out, in});
      made->parts.push_back(quantize_ == "nf4" ? quantize_nf4(weight) : quantize_fp8(weight));
      format = quantize_;
    } else if (stores_quantized(linear, out)) {
      for (const FileRows& rows : rows_in_file(linear, out)) {
        const StoredWeight& stored = *stored_.find(rows.name);
        made->parts.push_back(stored_rows(rows, stored, in));
        format = stored.blocks != 0 ? gguf_blocks(stored.blocks).name : stored.nf4 ? "nf4" : "fp8";
      }
    } else {
      made->parts.push_back({load(linear + ".weight", {out, in}), {}, out});
    }
    ++linears_[format == "fp8" && made->dynamic ? std::string(made->format()) : format];
  }
  const bool gguf =
      std::any_of(made->parts.begin(), made->parts.end(), [](const auto& part) { return part.blocks != 0; });
  if (!made->dynamic) made->program = dequantizer(gguf);
  computes_in_other_type_ = computes_in_other_type_ || made->compute != placement_.dtype;
  join_fp8(made->parts);
  bytes_ += made->bytes();
  return made;
}

LinearSlot Parameters::linear(const std::string& prefix, std::int64_t in, std::int64_t out, bool bias,
                              LoraColumns lora_columns) {
  return stacked_linear({prefix}, in, out, bias, lora_columns);
}

LinearSlot Parameters::stacked_linear(const std::vector<std::string>& prefixes, std::int64_t in, const Shape& outs,
                                      bool bias, LoraColumns lora_columns) {
  const auto weight_in_parts = quantized_weight(prefixes, in, outs);
  const bool quantized = weight_in_parts != nullptr;
  LinearSlot slot;
  if (lora_columns.count > 0) {
    slot = slot_with_lora_columns(std::accumulate(outs.begin(), outs.end(), std::int64_t{0}), quantized ? 0 : in,
                                  lora_columns, at::TensorOptions(placement_.dtype).device(placement_.device));
    bytes_ += static_cast<std::int64_t>(lora_columns_of(slot).nbytes());
  }
  if (quantized) {
    slot.weight = at::Tensor();
    slot.quantized = weight_in_parts;
  }
  std::vector<at::Tensor> weights, biases;
  std::int64_t first_row = 0;
  for (std::size_t i = 0; i < prefixes.size(); first_row += outs[i++]) {
    const std::string& prefix = prefixes[i];
    if (!quantized) {
      ++linears_[type_name(placement_.dtype)];
      if (chosen_ && chosen_(prefix)) ragged_.push_back(prefix);
      const at::Tensor weight = tensor(prefix + ".weight", {outs[i], in});
      if (slot.wide.defined())
        slot.weight.narrow(0, first_row, outs[i]).copy_(weight);
      else
        weights.push_back(weight);
    }
    if (bias) biases.push_back(tensor(prefix + ".bias", {outs[i]}));
  }
  if (!quantized && !slot.wide.defined()) slot.weight = weights.size() == 1 ? weights.front() : at::cat(weights, 0);
  if (bias) slot.bias = biases.size() == 1 ? biases.front() : at::cat(biases, 0);
  return slot;
}

NormSlot Parameters::norm(const std::string& prefix, std::int64_t channels) {
  return {tensor(prefix + ".weight", {channels}), tensor(prefix + ".bias", {channels})};
}

ConvSlot Parameters::conv(const std::string& prefix, std::int64_t in, std::int64_t out, std::int64_t kernel) {
  return {tensor(prefix + ".weight", {out, in, kernel, kernel}), tensor(prefix + ".bias", {out})};
}

}  // namespace ditfleet::pipeline
