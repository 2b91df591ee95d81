#include "pipeline/nn/adapter_columns.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

// Ranks are rounded up to this: products of other widths are slow, and few different widths are few different plans. On
// a GPU so that rows of [x | x·Aᵀ] stay whole lines of 128 bytes: with 16 columns a step took longer than with 64.
std::int64_t column_step(c10::Device device) { return device.is_cpu() ? 16 : 64; }

std::int64_t rank_of(const std::vector<LowRank>& terms) {
  std::int64_t total = 0;
  for (const LowRank& term : terms) total += term.up.size(1);
  return total;
}

}  // namespace

AdapterColumns::AdapterColumns(std::vector<std::vector<LinearSlot>> blocks,
                               std::shared_ptr<const region::MatrixCopies> copies,
                               std::shared_ptr<PartSequence> weights)
    : copies_(std::move(copies)), weights_(std::move(weights)), side_stream_(blocks.back().back().wide.device()) {
  for (std::vector<LinearSlot>& block : blocks) {
    for (LinearSlot& slot : block) {
      const at::Tensor a = at::zeros({slot.lora_columns.count, slot.in()}, slot.wide.options());
      linears_.push_back({std::move(slot), a});
    }
    ends_.push_back(linears_.size());
  }
  if (!weights_) return;
  weights_->on_arrival([this](std::size_t block) {
    if (loaded_) write(loaded_.get(), block);
  });
  // Host memory gets no adapter.
  weights_->on_first_departure([this](std::size_t block) { write(nullptr, block); });
}

std::string AdapterColumns::problem(const AdapterColumns* columns, const Terms& terms) {
  if (!columns) {
    const bool any = std::any_of(terms.begin(), terms.end(), [](const auto* of_linear) { return !of_linear->empty(); });
    return any ? "the model was loaded without adapter columns; set worker.lora.slots above 0" : "";
  }
  for (std::size_t i = 0; i < terms.size(); ++i) {
    const std::int64_t total = rank_of(*terms[i]), room = columns->linears_[i].slot.lora_columns.count;
    if (total > room)
      return "adapters of rank " + std::to_string(total) + " (combined) change one matrix, which has columns for " +
             std::to_string(room) + "; use fewer adapters or raise worker.lora.together_rank";
  }
  return {};
}

AdapterColumns::Operands AdapterColumns::place(const Linear& linear, const std::vector<LowRank>& terms,
                                               Copies& copies) const {
  const LinearSlot& slot = linear.slot;
  const std::int64_t total = rank_of(terms), room = slot.lora_columns.count, in = slot.in(), out = slot.out();
  if (total > room)
    fail(Code::kInternal, "adapters of rank " + std::to_string(total) + " (combined) do not fit the columns");
  const std::int64_t step = column_step(slot.wide.device());
  const std::int64_t rank = std::min(room, (total + step - 1) / step * step);
  // B lies next to the weight, on the side where the room is. As far as the rank was rounded up A is zeros, and beside
  // them anything finite does for B: what was there before, which is zeros or another adapter's B, and those are finite
  // (PackedAdapter).
  const at::Tensor beside = lora_columns_of(slot);
  auto& to_beside = slot.quantized ? copies.terms : copies.beside;
  const std::int64_t begin = slot.lora_columns.before && !slot.quantized ? room - rank : 0;
  const auto zeros = [&](std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t n) {
    if (rows > 0 && n > 0) to_beside.push_back({beside.narrow(0, row, rows).narrow(1, column, n), {}});
  };
  std::int64_t first = 0;
  for (const LowRank& term : terms) {
    const std::int64_t n = term.up.size(1), row = term.first_row, rows = term.up.size(0);
    zeros(0, row, begin + first, n);
    to_beside.push_back({beside.narrow(0, row, rows).narrow(1, begin + first, n), term.up});
    zeros(row + rows, out - row - rows, begin + first, n);
    copies.terms.push_back({linear.a.narrow(0, first, n), term.down, term.scale});
    first += n;
  }
  if (rank > total) copies.rounding.push_back({linear.a.narrow(0, total, rank - total), {}});
  return {slot.wide.narrow(1, begin, slot.quantized ? rank : in + rank), linear.a.narrow(0, 0, rank).unsqueeze(0),
          total};
}

// Of rank 16 three rows of A in four are there for the rounding alone: they are overwritten only where an adapter of a
// larger rank was before.
void AdapterColumns::copy(const Layout& layout) {
  bool behind = false;
  for (std::size_t i = 0; i < linears_.size(); ++i) {
    const Operands& operands = layout.operands[i];
    behind = behind || (linears_[i].used > operands.used && operands.adapter.size(1) > operands.used);
    linears_[i].used = std::max(linears_[i].used, operands.used);
  }
  const auto copy = [&](const Part& part) {
    copies_->run(*part.terms);
    if (behind) copies_->run(*part.rounding);
  };
  if (!weights_ || (weights_->all_stay() && weights_->moves() == layout.moves)) {
    copy(layout.first);
    side_stream_.start([&] { copy(layout.rest); });
  } else {
    for (std::size_t i = 0; i < linears_.size(); ++i) {
      region::run_copies(layout.copies[i].terms);
      if (is_on_device(linears_[i].slot.wide)) region::run_copies(layout.copies[i].beside);
      if (behind) region::run_copies(layout.copies[i].rounding);
    }
  }
  for (std::size_t i = 0; i < linears_.size(); ++i)
    if (linears_[i].used <= layout.operands[i].adapter.size(1)) linears_[i].used = layout.operands[i].used;
}

void AdapterColumns::load(std::shared_ptr<const Layout> layout) {
  if (layout == loaded_) return;
  PartSequence::Pass nothing_moves(weights_.get());
  nothing_moves.finish();                               // a block that is being copied would overwrite its columns
  const auto before = std::exchange(loaded_, nullptr);  // until all is in place; what was on its way is kept as long
  copy(*layout);
  loaded_ = std::move(layout);
}

void AdapterColumns::write(const Layout* layout, std::size_t block) const {
  for (std::size_t i = block > 0 ? ends_[block - 1] : 0; i < ends_[block]; ++i) {
    if (linears_[i].slot.quantized) continue;
    lora_columns_of(linears_[i].slot).zero_();
    if (layout) region::run_copies(layout->copies[i].beside);
  }
}

void AdapterColumns::clear() {
  const PartSequence::Pass nothing_moves(weights_.get());
  loaded_ = nullptr;
  join();
  if (weights_) synchronize(weights_->device());  // blocks on their way bring what was loaded
  for (Linear& linear : linears_) {
    if (is_on_device(linear.slot.wide)) lora_columns_of(linear.slot).zero_();
    linear.a.zero_();
    linear.used = 0;
  }
  if (weights_) synchronize_current(weights_->device());
}

std::shared_ptr<const AdapterColumns::Layout> AdapterColumns::plan(const Terms& terms) const {
  auto made = std::make_shared<Layout>();
  Layout& layout = *made;
  if (weights_) layout.moves = weights_->all_stay() ? weights_->moves() : -1;
  std::size_t i = 0;
  const auto part = [&](std::size_t end) {
    std::vector<region::TensorCopy> all, rounding;
    for (; i < end; ++i) {
      Copies copies;
      layout.operands.push_back(place(linears_[i], *terms[i], copies));
      all.insert(all.end(), copies.terms.begin(), copies.terms.end());
      all.insert(all.end(), copies.beside.begin(), copies.beside.end());
      rounding.insert(rounding.end(), copies.rounding.begin(), copies.rounding.end());
      if (weights_) layout.copies.push_back(std::move(copies));
    }
    return layout.moves < 0 ? Part{} : Part{copies_->prepare(std::move(all)), copies_->prepare(std::move(rounding))};
  };
  layout.first = part(ends_.front());
  layout.rest = part(linears_.size());
  return made;
}

}  // namespace ditfleet::pipeline
