// The second half of fuse(): where each value lies, so that joins, splits and in-place updates cost nothing.
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

  // Where a value lies that has been made; adds copies where its elements must move. `group` is the one that reads.
  View view_of(int value);
  // Where `unit` of `group` is to put the value; `reads_here` are the views that the unit's kernel loads.
  View place(int value, int group, const Unit& unit);
  // Where an attention's result goes: in bf16 the place where joins along the last axis want it, else a buffer that its
  // library may allocate.
  View place_attention(const Op& attention, bool pitched);
  // The join that a linear reads as parts and that therefore never happens.
  const Op* split_join(const Op& linear) const;

 private:
  const Value& value(int i) const { return plan_.program.values[static_cast<std::size_t>(i)]; }
  const Op* producer(int value) const;
  int add_buffer(BufferKind kind, const Value& like, int of = -1);
  std::optional<View> settled(int value) const;  // view_of without copies
  std::optional<int> output_home(int value) const;
  std::optional<View> in_place(int value, int group, const Unit& unit) const;
  std::optional<View> slice_of_join(int value);
  std::optional<View> beside_others(const Op& attention, bool pitched);
  View home_of_join(const Op& join);
  bool joins_in_place(const Op& join) const;

  Plan& plan_;
  const std::vector<Group>& groups_;
  const std::vector<int> producer_;
  std::map<int, View> placed_;
  std::map<int, View> join_home_;             // a join's result → where it is put together
  std::map<int, std::vector<int>> contents_;  // buffer → values placed in it
};

}  // namespace ditfleet::region
