#include "pipeline/models/flux/adapter_columns.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "pipeline/device/failure.h"

namespace ditfleet::pipeline {
namespace {

// Ranks are rounded up to this: products of other widths are slow, and few different widths are few different plans.
constexpr std::int64_t kColumnStep = 16;

}  // namespace

AdapterColumns::AdapterColumns(std::vector<LinearSlot> linears, std::shared_ptr<const region::MatrixCopies> copies) : copies_(std::move(copies)) {
  for (LinearSlot& slot : linears) {
    const at::Tensor none = at::empty({1, 0, slot.weight.size(1)}, slot.weight.options());
    const Operands plain{slot.weight, none};
    linears_.push_back({std::move(slot), {}, 0, plain});
  }
}

std::vector<AdapterColumns::Column> AdapterColumns::columns_of(const Samples& samples, std::int64_t& total) {
  std::vector<Column> columns;
  total = 0;
  for (std::size_t s = 0; s < samples.size(); ++s)
    for (const LowRank& term : *samples[s]) {
      const auto same = std::find_if(columns.begin(), columns.end(), [&](const Column& c) {
        return !c.of_sample[s] && c.term->up.const_data_ptr() == term.up.const_data_ptr() && c.term->first_row == term.first_row;
      });
      if (same != columns.end()) {
        same->of_sample[s] = &term;
        continue;
      }
      columns.push_back({&term, total, std::vector<const LowRank*>(samples.size())});
      columns.back().of_sample[s] = &term;
      total += term.up.size(1);
    }
  return columns;
}

bool AdapterColumns::fits(std::size_t linear, const Samples& samples) const {
  std::int64_t total = 0;
  columns_of(samples, total);
  return total <= linears_[linear].slot.room.columns;
}

void AdapterColumns::place(Linear& linear, const Samples& samples, Copies& zeros, Copies& copies) {
  std::int64_t total = 0;
  const auto columns = columns_of(samples, total);
  const LinearSlot& slot = linear.slot;
  const std::int64_t room = slot.room.columns, in = slot.weight.size(1);
  if (total > room)
    fail(Code::kInvalidArgument, "loras: adapters of rank " + std::to_string(total) + " in all meet at one matrix, which has room for " + std::to_string(room) +
                                     "; use fewer at once, or start the worker with a larger worker.lora.max_rank", "loras");
  const std::int64_t rank = std::min(room, (total + kColumnStep - 1) / kColumnStep * kColumnStep);
  // Next to the weight, on the side where the room is; what stood beyond is overwritten, too.
  const auto beside = [&](std::int64_t n) { return slot.wide.narrow(1, slot.room.before ? room - n : in, n); };
  const bool covered = columns.size() == 1 && columns.front().term->up.size(0) == slot.wide.size(0) && rank == total && rank >= linear.columns;
  if (const std::int64_t old = std::max(rank, linear.columns); old > 0 && !covered) zeros.push_back({beside(old), {}});
  linear.columns = rank;
  linear.operands.weight = slot.wide.narrow(1, slot.room.before ? room - rank : 0, in + rank);
  const bool alone = samples.size() == 1;
  const auto options = slot.weight.options();
  if (alone && rank > 0 && !linear.room_of_a.defined()) linear.room_of_a = at::empty({room, in}, options);
  linear.operands.adapter = rank == 0 ? at::empty({1, 0, in}, options)
                            : alone   ? linear.room_of_a.narrow(0, 0, rank).unsqueeze(0)
                                      : at::empty({static_cast<std::int64_t>(samples.size()), rank, in}, options);
  for (const Column& column : columns) {
    const at::Tensor& up = column.term->up;
    copies.push_back({beside(rank).narrow(0, column.term->first_row, up.size(0)).narrow(1, column.first, up.size(1)), up});
    for (std::size_t s = 0; s < samples.size(); ++s) {
      const LowRank* own = column.of_sample[s];
      copies.push_back({linear.operands.adapter.select(0, static_cast<std::int64_t>(s)).narrow(0, column.first, up.size(1)), own ? own->down : at::Tensor(), own ? own->scale : 0});
    }
  }
  for (std::size_t s = 0; s < samples.size() && rank > total; ++s)
    copies.push_back({linear.operands.adapter.select(0, static_cast<std::int64_t>(s)).narrow(0, total, rank - total), {}});
}

void AdapterColumns::load(const std::vector<Samples>& samples) {
  Copies zeros, copies;
  for (std::size_t i = 0; i < linears_.size(); ++i) place(linears_[i], samples[i], zeros, copies);
  copies_->run(zeros);
  copies_->run(copies);
}

}  // namespace ditfleet::pipeline
