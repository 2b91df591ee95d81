#include "pipeline/lora/packed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/kron.h>

#include "pipeline/device/failure.h"
#include "pipeline/lora/file.h"
#include "pipeline/nn/parameters.h"
#include "shared/core/excerpt.h"
#include "shared/safetensors/values.h"

namespace ditfleet::pipeline {
namespace {

std::int64_t aligned(std::int64_t elements) {
  return (elements + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

// Values of the file on the host, in the model's element type. A finite number of a wider type may become infinite.
at::Tensor cast(const LoraFile& file, const TensorView& view, const at::Tensor& values, c10::ScalarType type) {
  at::Tensor out = values.to(type).contiguous();
  const DType to = type == c10::ScalarType::BFloat16 ? DType::kBF16 : DType::kF32;
  if (!safetensors::all_finite(to, {static_cast<const std::byte*>(out.const_data_ptr()), out.nbytes()}).value_or(false))
    fail(Code::kInvalidArgument,
         "[lora] " + file.file.path() + ": " + excerpt(view.name, 120) + " has values that overflow " +
             std::string(dtype_name(to)) +
             ", the model's type (at most 3.4e38); every weight must be finite in that type",
         "loras");
  return out;
}

at::Tensor on_host(const TensorView& view, c10::ScalarType type = c10::ScalarType::Float) {
  return copy_to({c10::Device(c10::DeviceType::CPU), type}, view);
}

// A and B of a term: the difference is B · A, and both have its rank.
std::pair<at::Tensor, at::Tensor> matrices(const LoraFile& file, const LoraTerm& term, c10::ScalarType type) {
  if (term.form == LoraTerm::Form::kPair || term.form == LoraTerm::Form::kDifference) {
    const at::Tensor down = cast(file, term.down, on_host(term.down, type), type);
    if (term.form == LoraTerm::Form::kDifference) return {down, at::eye(term.rank, down.options())};
    return {down, cast(file, term.up, on_host(term.up, type), type)};
  }
  // A factor [a, b] is a product, or itself and an identity.
  const auto factor = [](const TensorView& up, const TensorView& down) {
    const at::Tensor whole = on_host(up);
    if (!down.bytes.empty()) return std::pair(whole, on_host(down));
    const at::Tensor one = at::eye(std::min(whole.size(0), whole.size(1)), whole.options());
    return whole.size(1) <= whole.size(0) ? std::pair(whole, one) : std::pair(one, whole);
  };
  const auto [b1, a1] = factor(term.up, term.down);
  const auto [b2, a2] = factor(term.up2, term.down2);
  at::Tensor a, b;
  if (term.form == LoraTerm::Form::kKronecker) {  // (B₁A₁) ⊗ (B₂A₂) = (B₁ ⊗ B₂)(A₁ ⊗ A₂)
    a = at::kron(a1, a2);
    b = at::kron(b1, b2);
  } else {  // the same product row by row and column by column
    a = (a1.unsqueeze(1) * a2.unsqueeze(0)).flatten(0, 1);
    b = (b1.unsqueeze(2) * b2.unsqueeze(1)).flatten(1, 2);
  }
  return {cast(file, term.up, a, type), cast(file, term.up, b, type)};
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
      made->biases.push_back(
          {bias.target->component, piece.slot, take(piece.rows), piece.rows, piece.first_row, bias.scale});
  if (const std::size_t count = file.unused.size(); count > 0)
    made->unused = std::to_string(count) + (count == 1 ? " tensor: " : " tensors: ") + list_text(file.unused);
  made->values = at::empty({end}, at::TensorOptions(placement.dtype).pinned_memory(!placement.device.is_cpu()));
  auto at = made->terms.cbegin();
  const auto place = [&](std::int64_t begin, const at::Tensor& matrix) {
    made->values.narrow(0, begin, matrix.numel()).view(matrix.sizes()).copy_(matrix);
  };
  for (const LoraTerm& term : file.terms) {
    const auto [down, up] = matrices(file, term, placement.dtype);
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
    const at::Tensor values = cast(file, bias.values, on_host(bias.values, placement.dtype), placement.dtype);
    for (std::int64_t row = 0; row < values.size(0); row += to++->rows) place(to->at, values.narrow(0, row, to->rows));
  }
  return made;
}

std::int64_t PackedAdapter::rank() const {
  std::int64_t most = 0;
  for (const Term& term : terms) most = std::max(most, term.rank);
  return most;
}

std::int64_t most_packed_elements(const LoraBase& base, std::int64_t max_rank) {
  std::int64_t elements = 0;
  for (const LoraComponent& component : base.components)
    for (const BaseLinear& linear : component.linears)  // an alias may split B into two pieces
      elements +=
          aligned(max_rank * linear.in) + aligned(max_rank * linear.out) + kPackedAlignment + aligned(linear.out);
  return elements;
}

}  // namespace ditfleet::pipeline
