// The second half of fuse(): places each value so that joins, splits and in-place updates need no copies.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "pipeline/region/fusion/plan.h"
#include "pipeline/region/fusion/units.h"

namespace ditfleet::region {

class Storage {
 public:
  Storage(Plan& plan, const std::vector<Group>& groups);

  // The place of a value that has been computed. Adds a copy step if its elements must move.
  View view_of(int value);
  // Chooses where `unit` of `group` writes the value.
  View place(int value, int group, const Unit& unit);
  // Chooses where attention writes its result: in bf16 where joins along the last axis need it, else in a buffer that
  // the library may allocate.
  View place_attention(const Op& attention, bool fixed_stride);
  // The join whose operands a linear reads as parts, so that it is not materialized; null: none.
  const Op* split_join(const Op& linear) const;

 private:
  const Value& value(int i) const { return plan_.program.value(i); }
  const Op* producer(int value) const;
  int add_buffer(BufferKind kind, const Value& like, int of = -1);
  std::optional<View> settled(int value) const;  // view_of() without copies
  std::optional<int> output_home(int value) const;
  std::optional<View> in_place(int value, int group, const Unit& unit) const;
  std::optional<View> slice_of_join(int value);
  // The place of the product that the value is only added to.
  std::optional<View> where_it_is_added(int value);
  std::optional<View> next_to_joined(const Op& attention, bool fixed_stride);
  View home_of_join(const Op& join);
  bool joins_in_place(const Op& join) const;

  Plan& plan_;
  const std::vector<Group>& groups_;
  const std::vector<int> producer_;
  std::map<int, View> placed_;
  std::map<int, View> join_home_;             // a join's result → where it is assembled
  std::map<int, std::vector<int>> contents_;  // buffer → values placed in it
};

}  // namespace ditfleet::region
