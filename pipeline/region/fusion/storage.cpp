#include "pipeline/region/fusion/storage.h"

#include <algorithm>

namespace ditfleet::region {
namespace {

bool writes(const Unit& unit, int value) {
  return std::find(unit.writes.begin(), unit.writes.end(), value) != unit.writes.end();
}
bool is_chain(const Unit& unit) { return !unit.kernel.nodes.empty(); }

}  // namespace

Storage::Storage(Plan& plan, const std::vector<Group>& groups)
    : plan_(plan), groups_(groups), producer_(producers(plan.program)) {
  for (int input : plan.program.inputs()) {
    const Value& v = value(input);
    placed_[input] = whole_buffer(add_buffer(BufferKind::kInput, v, input), v.shape);
  }
}

const Op* Storage::producer(int v) const {
  const int op = producer_[static_cast<std::size_t>(v)];
  return op < 0 ? nullptr : &plan_.program.ops[static_cast<std::size_t>(op)];
}

int Storage::add_buffer(BufferKind kind, const Value& like, int of) {
  plan_.buffers.push_back({kind, like.type, like.shape, of});
  return static_cast<int>(plan_.buffers.size()) - 1;
}

const Op* Storage::split_join(const Op& linear) const {
  const Op* join = producer(linear.inputs[0]);
  // In bf16 adding the parts would round once more, so they go into one buffer.
  if (!join || join->code != OpCode::kJoin || value(join->output).type != ElementType::kF32) return nullptr;
  if (join->axis != static_cast<int>(value(join->output).shape.size()) - 1) return nullptr;
  int readers = 0;
  for (const Op& op : plan_.program.ops)
    readers += static_cast<int>(std::count(op.inputs.begin(), op.inputs.end(), join->output));
  return readers == 1 ? join : nullptr;
}

std::optional<View> Storage::settled(int v) const {
  if (const auto at = placed_.find(v); at != placed_.end()) return at->second;
  const Op* op = producer(v);
  if (!op) return {};
  if (op->code == OpCode::kJoin) {
    std::vector<View> parts;
    for (int input : op->inputs) {
      auto part = settled(input);
      if (!part) return {};
      parts.push_back(*part);
    }
    return joined(parts, op->axis);
  }
  if (!is_view(op->code)) return {};
  auto source = settled(op->inputs[0]);
  if (!source) return {};
  if (op->code == OpCode::kSlice) return sliced(*source, op->axis, op->start, op->length);
  if (op->code == OpCode::kPermute) return permuted(*source, op->order);
  return reshaped(*source, value(v).shape);
}

View Storage::view_of(int v) {
  if (auto view = settled(v)) return *view;
  const Op* op = producer(v);
  const auto copy_to = [&](const View& from, const View& to) {
    if (!same_place(from, to)) plan_.steps.push_back(CopyStep{from, to, value(v).name});
  };
  if (op->code == OpCode::kJoin) {
    const View whole = home_of_join(*op);
    Dim start = 0;
    for (int input : op->inputs) {
      const Dim& length = value(input).shape[static_cast<std::size_t>(op->axis)];
      copy_to(view_of(input), sliced(whole, op->axis, start, length));
      start = start + length;
    }
    return placed_[v] = whole;
  }
  const View source = view_of(op->inputs[0]);
  if (op->code == OpCode::kSlice) return sliced(source, op->axis, op->start, op->length);
  if (op->code == OpCode::kPermute) return permuted(source, op->order);
  // A reshape whose elements must move.
  const View moved = whole_buffer(add_buffer(BufferKind::kWorkspace, value(op->inputs[0])), value(op->inputs[0]).shape);
  copy_to(source, moved);
  return placed_[v] = *reshaped(moved, value(v).shape);
}

std::optional<int> Storage::output_home(int v) const {
  const auto& outputs = plan_.program.outputs;
  for (std::size_t o = 0; o < outputs.size(); ++o)
    if (outputs[o] == v) return static_cast<int>(o);
  // A residual may be kept in an output's memory if a later chain adds to it to make that output, and nothing reads it
  // afterwards. Only the first operand counts, so that no two values claim one output.
  int last_reader = -1;
  const Unit* reader = nullptr;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (const Unit& unit : groups_[g])
      for (int read : unit.reads) {
        std::vector<int> roots;
        add_roots(plan_.program, producer_, read, roots);
        if (std::find(roots.begin(), roots.end(), v) == roots.end()) continue;
        if (static_cast<int>(g) == last_reader || read != v) return {};
        last_reader = static_cast<int>(g);
        reader = &unit;
      }
  if (!reader || !is_chain(*reader)) return {};
  for (int written : reader->writes)
    if (producer(written)->inputs[0] == v && value(written).shape == value(v).shape &&
        value(written).type == value(v).type)
      if (auto home = output_home(written)) return home;
  return {};
}

std::optional<View> Storage::in_place(int v, int group, const Unit& unit) const {
  for (int candidate : unit.reads) {
    const auto view = settled(candidate);
    if (!view || value(candidate).shape != value(v).shape || value(candidate).type != value(v).type) continue;
    const Buffer& buffer = plan_.buffer(view->buffer);
    if (buffer.kind != BufferKind::kWorkspace) continue;
    const auto held = contents_.find(view->buffer);
    bool free = held != contents_.end();
    for (std::size_t g = static_cast<std::size_t>(group); free && g < groups_.size(); ++g)
      for (const Unit& other : groups_[g])
        for (int read : other.reads) {
          std::vector<int> roots;
          add_roots(plan_.program, producer_, read, roots);
          const auto place = settled(read);
          if (&other == &unit && place && same_place(*place, *view)) continue;
          for (int root : roots) {
            if (std::find(held->second.begin(), held->second.end(), root) == held->second.end()) continue;
            // A join that has no place yet is read where its parts are.
            if (!provably_disjoint(place ? *place : placed_.at(root), *view)) free = false;
          }
        }
    // Another result of this unit may have taken that place.
    for (int written : unit.writes)
      if (const auto at = placed_.find(written); at != placed_.end() && !provably_disjoint(at->second, *view))
        free = false;
    if (free) return view;
  }
  return {};
}

bool Storage::joins_in_place(const Op& join) const {
  std::vector<View> parts;
  for (int input : join.inputs) {
    std::optional<View> part;
    if (const auto at = placed_.find(input); at != placed_.end()) part = at->second;
    for (std::size_t g = 0; g < groups_.size() && !part; ++g)
      for (const Unit& unit : groups_[g])
        if (is_chain(unit) && writes(unit, input)) part = in_place(input, static_cast<int>(g), unit);
    if (!part) return false;
    parts.push_back(*part);
  }
  return joined(parts, join.axis).has_value();
}

// Inside the place of a larger join, if it is an operand of one.
View Storage::home_of_join(const Op& join) {
  if (const auto at = join_home_.find(join.output); at != join_home_.end()) return at->second;
  const auto within = slice_of_join(join.output);
  return join_home_[join.output] =
             within ? *within
                    : whole_buffer(add_buffer(BufferKind::kWorkspace, value(join.output)), value(join.output).shape);
}

std::optional<View> Storage::slice_of_join(int v) {
  for (const Op& op : plan_.program.ops) {
    if (op.code != OpCode::kJoin || std::count(op.inputs.begin(), op.inputs.end(), v) != 1) continue;
    bool splits = false;
    for (const Op& reader : plan_.program.ops)
      splits = splits || (reader.code == OpCode::kLinear && reader.inputs[0] == op.output && split_join(reader));
    if (splits || joins_in_place(op)) continue;
    const View whole = home_of_join(op);
    Dim start = 0;
    for (int input : op.inputs) {
      const Dim& length = value(input).shape[static_cast<std::size_t>(op.axis)];
      if (input == v) return sliced(whole, op.axis, start, length);
      start = start + length;
    }
  }
  return {};
}

std::optional<View> Storage::where_it_is_added(int v) {
  int readers = 0;
  const Unit* product = nullptr;
  int group = -1;
  for (std::size_t g = 0; g < groups_.size(); ++g)
    for (const Unit& unit : groups_[g]) {
      const int count = static_cast<int>(std::count(unit.reads.begin(), unit.reads.end(), v));
      readers += count;
      const Op& op = plan_.program.ops[static_cast<std::size_t>(unit.ops.front())];
      if (count != 1 || !is_linear(op.code) || addend_of(op) != v) continue;
      product = &unit;
      group = static_cast<int>(g);
    }
  if (!product || readers != 1) return {};
  const int sum = product->writes.front();
  if (value(sum).type != value(v).type) return {};
  return placed_.contains(sum) ? placed_.at(sum) : place(sum, group, *product);
}

View Storage::place(int v, int group, const Unit& unit) {
  if (const auto placed = placed_.find(v); placed != placed_.end()) return placed->second;
  std::optional<View> view = where_it_is_added(v);
  if (auto output = view ? std::nullopt : output_home(v)) {
    int buffer = -1;
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b)
      if (plan_.buffers[b].kind == BufferKind::kOutput && plan_.buffers[b].value == *output)
        buffer = static_cast<int>(b);
    if (buffer < 0)
      buffer =
          add_buffer(BufferKind::kOutput, value(plan_.program.outputs[static_cast<std::size_t>(*output)]), *output);
    view = whole_buffer(buffer, value(v).shape);
  }
  if (!view) view = slice_of_join(v);
  if (!view && is_chain(unit)) view = in_place(v, group, unit);
  if (!view) view = whole_buffer(add_buffer(BufferKind::kWorkspace, value(v)), value(v).shape);
  contents_[view->buffer].push_back(v);
  return placed_[v] = *view;
}

// The place of an attention's result [.., heads, head size] that is read as rows [.., width]. If other columns are
// joined to these rows, the row stride leaves space for them. Different rows may have different columns joined: text
// and image tokens, each with their adapters'.
std::optional<View> Storage::next_to_joined(const Op& attention, bool fixed_stride) {
  const Program& p = plan_.program;
  const auto readers = [&](int of) {
    std::vector<const Op*> found;
    for (const Op& op : p.ops)
      if (std::count(op.inputs.begin(), op.inputs.end(), of) > 0) found.push_back(&op);
    return found;
  };
  const auto only = readers(attention.output);
  if (only.size() != 1 || only.front()->code != OpCode::kReshape) return {};
  const int rows = only.front()->output, last = static_cast<int>(value(rows).shape.size()) - 1;
  const Dim width = value(rows).shape.back();
  // The nested joins that begin with these columns; none if the columns begin several joins.
  const auto joins_of = [&](int columns) {
    std::vector<const Op*> around;
    for (int inner = columns, found = 1; found == 1; inner = around.empty() ? inner : around.back()->output) {
      found = 0;
      for (const Op* reader : readers(inner))
        if (reader->code == OpCode::kJoin && reader->axis == last && reader->inputs.front() == inner && ++found == 1)
          around.push_back(reader);
      if (found > 1) around.clear();
    }
    return around;
  };
  struct Part {
    const Op* slice;  // null: all rows
    std::vector<const Op*> joins;
  };
  std::vector<Part> parts;
  if (auto joins = joins_of(rows); !joins.empty())
    parts.push_back({nullptr, std::move(joins)});
  else
    for (const Op* reader : readers(rows))
      if (reader->code == OpCode::kSlice && reader->axis != last)
        if (auto of_slice = joins_of(reader->output); !of_slice.empty()) parts.push_back({reader, std::move(of_slice)});
  fixed_stride = fixed_stride && attention.token_stride > 0;
  if (parts.empty() && !fixed_stride) return {};

  Dim wide = width;
  for (const Part& part : parts) wide = wide + (value(part.joins.back()->output).shape.back() - width);
  Value like = value(rows);
  like.shape.back() = fixed_stride ? Dim(attention.token_stride) : wide;
  const View whole = whole_buffer(add_buffer(BufferKind::kWorkspace, like), like.shape);
  for (const Part& part : parts)
    for (const Op* join : part.joins) {
      const View of_part = part.slice ? sliced(whole, part.slice->axis, part.slice->start, part.slice->length) : whole;
      join_home_[join->output] = sliced(of_part, last, 0, value(join->output).shape.back());
    }
  return reshaped(sliced(whole, last, 0, width), value(attention.output).shape);
}

View Storage::place_attention(const Op& attention, bool fixed_stride) {
  const int v = attention.output;
  std::optional<View> place;
  if (value(v).type == ElementType::kBF16) place = next_to_joined(attention, fixed_stride);
  const View view = place ? *place : whole_buffer(add_buffer(BufferKind::kLibrary, value(v)), value(v).shape);
  contents_[view.buffer].push_back(v);
  return placed_[v] = view;
}

}  // namespace ditfleet::region
