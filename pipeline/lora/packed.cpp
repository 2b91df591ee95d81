#include "pipeline/lora/packed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>

#include "pipeline/device/failure.h"
#include "pipeline/lora/file.h"
#include "pipeline/lora/finite.h"
#include "pipeline/nn/parameters.h"
#include "shared/core/excerpt.h"

namespace ditfleet::pipeline {
namespace {

std::int64_t aligned(std::int64_t elements) {
  return (elements + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

// A tensor of the file on the host, in the model's element type. A finite number of a wider type may become infinite.
at::Tensor cast(const LoraFile& file, const TensorView& view, c10::ScalarType type) {
  at::Tensor out = copy_to({c10::Device(c10::DeviceType::CPU), type}, view);
  const DType to = type == c10::ScalarType::BFloat16 ? DType::kBF16 : DType::kF32;
  if (view.dtype != to &&
      !all_finite(to, {static_cast<const std::byte*>(out.const_data_ptr()), out.nbytes()}).value_or(false))
    fail(Code::kInvalidArgument,
         "[lora] " + file.file.path() + ": " + excerpt(view.name, 120) + " has values that overflow " +
             std::string(dtype_name(to)) +
             ", the model's type (at most 3.4e38); every weight must be finite in that type",
         "loras");
  return out;
}

}  // namespace

std::shared_ptr<const PackedAdapter> read_packed_adapter(const std::string& path, const LoraNames& names,
                                                         std::int64_t max_rank, Placement placement) {
  const LoraFile file = unwrap(read_lora_file(path, names, max_rank));
  auto made = std::make_shared<PackedAdapter>();
  std::int64_t end = 0;
  const auto take = [&](std::int64_t elements) { return std::exchange(end, end + aligned(elements)); };
  for (const LoraTerm& term : file.terms) {
    made->changes_text |= names.base().components[term.target->component].encodes_text;
    for (std::int64_t block = 0; block < term.blocks; ++block) {
      const std::int64_t down_at = take(term.rank * term.target->in);  // one A for all pieces
      for (const LoraPiece& piece : term.pieces(block))
        made->terms.push_back({term.target->component, piece.slot, down_at, take(term.rank * piece.rows), term.rank,
                               term.target->in, piece.rows, piece.first_row, term.scale});
    }
  }
  for (const LoraBias& bias : file.biases)
    for (const LoraPiece& piece : bias.target->pieces)
      made->biases.push_back({bias.target->component, piece.slot, take(piece.rows), piece.rows, piece.first_row});
  if (const std::size_t count = file.unused.size(); count > 0)
    made->unused = std::to_string(count) + (count == 1 ? " tensor: " : " tensors: ") + list_text(file.unused);
  made->values = at::empty({end}, at::TensorOptions(placement.dtype).pinned_memory(!placement.device.is_cpu()));
  auto at = made->terms.cbegin();
  const auto place = [&](std::int64_t begin, const at::Tensor& matrix) {
    made->values.narrow(0, begin, matrix.numel()).view(matrix.sizes()).copy_(matrix);
  };
  for (const LoraTerm& term : file.terms) {
    const at::Tensor down = cast(file, term.down, placement.dtype);
    const at::Tensor up = term.identity ? at::eye(term.rank, down.options()) : cast(file, term.up, placement.dtype);
    std::int64_t row = 0;
    for (std::int64_t block = 0; block < term.blocks; ++block) {
      place(at->down_at, down.narrow(0, block * term.rank, term.rank));
      for (std::size_t piece = 0; piece < term.pieces(block).size(); ++piece, ++at) {
        place(at->up_at, up.narrow(0, row, at->rows).narrow(1, block * term.rank, term.rank));
        row += at->rows;
      }
    }
  }
  auto to = made->biases.cbegin();
  for (const LoraBias& bias : file.biases) {
    const at::Tensor values = cast(file, bias.values, placement.dtype);
    for (std::int64_t row = 0; row < values.size(0); row += to++->rows) place(to->at, values.narrow(0, row, to->rows));
  }
  return made;
}

std::int64_t most_packed_elements(const LoraBase& base, std::int64_t max_rank) {
  std::int64_t elements = 0;
  for (const LoraComponent& component : base.components)
    for (const BaseLinear& linear : component.linears)  // an alias may split B into two pieces
      elements += aligned(max_rank * linear.in) + aligned(max_rank * linear.out) + kPackedAlignment +
                  (base.differences ? aligned(linear.out) : 0);
  return elements;
}

}  // namespace ditfleet::pipeline
